"""A server's models, with the verbs and the results of the local objects.

    verbs ─► requests ─► Client or AsyncClient, which send them ─► replies

A verb that is given many things sends them in several requests, a few of them at a time, and gives results in order.
All that is asked may be asked twice, so what fails for want of room or of a connection is tried again, ever later.

The other side of this is `bertie serve`. Vectors cost no torch here; the results of other verbs are the classes of
`bertie.tasks`, which need it.
"""

from bertie.client.clients import AsyncClient, Client
from bertie.client.tries import ServerError

__all__ = ["AsyncClient", "Client", "ServerError"]

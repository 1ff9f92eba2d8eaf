"""HTTP clients for `bertie serve`, with the methods and results of the local task objects.

    methods ─► requests ─► Client or AsyncClient sends them ─► responses

A long input is split into several requests, of which a few are in flight at a time; results come in
order. All requests are idempotent, so those that fail for lack of capacity or of a connection are
retried with exponential backoff.

`embed` and `similarity` need no torch; the results of other methods are the classes of
`bertie.tasks`, which import it.
"""

from bertie.client.clients import AsyncClient, Client
from bertie.client.retries import ServerError

__all__ = ["AsyncClient", "Client", "ServerError"]

"""The servers of tests/serve."""

from tests.serve.conftest import models, registry, server, small_folder, start

__all__ = ["models", "registry", "server", "small_folder", "start"]

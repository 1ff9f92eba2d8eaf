"""Real clients from PyPI against a real server: make test-clients."""

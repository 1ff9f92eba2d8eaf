"""The HTTP server: a fair queue and a batching engine per model, compatible APIs, and a web page."""

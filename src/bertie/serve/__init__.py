"""Many heads from one process: a queue and an engine under an HTTP server, and a page to look at them."""

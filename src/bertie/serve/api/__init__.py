"""The endpoints, one file per API: request and response models, and the handlers.

A handler calls the method of an ordinary task object whose windows go through the engine. Handlers
run in threads, one per request, off the event loop: parsing, tokenization, decoding and
serialization included.
"""

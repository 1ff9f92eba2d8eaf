"""The parts of the documentation site that are generated, and the hooks that put them into MkDocs (`make docs`)."""

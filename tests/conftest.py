"""One thread for all tests and what they start: models as tiny as these lose more by threads than they gain."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# Tests write no fingerprints into the user's cache.
os.environ.setdefault("BERTIE_CACHE", tempfile.mkdtemp(prefix="bertie-cache-"))

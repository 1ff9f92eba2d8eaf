"""One thread for all tests and what they start: models as tiny as these lose more by threads than they gain."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

"""`python -m bertie`."""

import sys

from bertie.cli import main

sys.exit(main())

"""`python -m bench`."""

import sys

from .cli import console

sys.exit(console())

"""``python -m ortops`` is the command ``ortops``."""

import sys

from ortops.cli import main

sys.exit(main())

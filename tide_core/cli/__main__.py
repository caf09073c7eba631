"""`python -m tide_core.cli` is `tide`."""

import sys

from tide_core.cli import main

if __name__ == "__main__":
    sys.exit(main())

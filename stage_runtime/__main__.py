"""``python -m stage_runtime``."""

import sys

from stage_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())

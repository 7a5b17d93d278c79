"""``python -m omni_discovery`` is ``omni``."""

import sys

from omni_discovery.cli import main

sys.exit(main())

"""``python -m omni_discovery`` is ``omni``."""

import sys

from omni_discovery.commands.main import main

sys.exit(main())

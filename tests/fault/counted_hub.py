"""``omni``, which tells each second in the file ``tasks`` of its folder how many asyncio tasks it has."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omni_discovery.commands.main import main


def _tell() -> None:
    # Python 3.12 has renamed it.
    names: Any = vars(asyncio.tasks)
    tasks = names["_all_tasks"] if "_all_tasks" in names else names["_scheduled_tasks"]
    while True:
        time.sleep(1.0)
        # A hub may be kept from opening files.
        with suppress(OSError):
            Path("tasks.new").write_text(str(len(tasks)))
            Path("tasks.new").replace("tasks")


if __name__ == "__main__":
    threading.Thread(target=_tell, daemon=True).start()
    sys.exit(main())

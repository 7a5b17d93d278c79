"""``omni``, which tells each second in the file ``tasks`` of its folder which asyncio tasks it has, and how many."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from omni_discovery.commands.main import main


def tell_tasks() -> None:
    """See the module; does not return."""
    # Python 3.12 has renamed it.
    names: Any = vars(asyncio.tasks)
    known = names["_all_tasks"] if "_all_tasks" in names else names["_scheduled_tasks"]
    while True:
        time.sleep(1.0)
        # A hub may be kept from opening files; a set may change while it is read.
        with suppress(OSError, RuntimeError):
            running = Counter(task.get_coro().__qualname__ for task in list(known) if not task.done())
            Path("tasks.new").write_text(json.dumps(running))
            Path("tasks.new").replace("tasks")


if __name__ == "__main__":
    threading.Thread(target=tell_tasks, daemon=True).start()
    sys.exit(main())

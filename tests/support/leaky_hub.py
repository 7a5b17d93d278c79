"""``omni`` with a hub that loses every credit: what a replica lends it never reaches the pool that spends it."""

from __future__ import annotations

import sys

from hub.pool.core import Pool
from omni_discovery.commands.main import main


def _lose(self: Pool, addr: str, count: int) -> None:
    """In place of ``Pool.grant``."""


if __name__ == "__main__":
    Pool.grant = _lose  # type: ignore[method-assign]
    sys.exit(main())

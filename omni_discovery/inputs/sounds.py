"""Which sounds pass between stages and hubs. Pure."""

from __future__ import annotations

from typing import Final

#: The sample rates of sounds, in Hz. Others make no sense to ears, and resamplers end the process for some of them.
LEAST_RATE_HZ: Final = 4000
MOST_RATE_HZ: Final = 384_000

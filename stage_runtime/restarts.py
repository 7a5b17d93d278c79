"""Whether and when a replica that ended by itself is started again, and which devices each replica gets."""

from __future__ import annotations

from dataclasses import dataclass

from omni_discovery.errors import ConfigError

#: Exit codes of a replica process.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
#: To the supervisor only: the operator has drained it by its control key.
EXIT_DRAINED = 3


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``stable_s``: who ran that long has a clean slate. ``give_up_after`` quick ends in a row are a crash loop."""

    first_delay_s: float = 0.5
    most_delay_s: float = 30.0
    stable_s: float = 60.0
    give_up_after: int = 6


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start it anew after ``delay_s``."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it; ``exit_code`` is what the supervisor ends with if nobody else is left."""

    exit_code: int
    reason: str


class Restarts:
    """The record of one replica's ends."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._quick_ends = 0

    def ended(self, exit_code: int, ran_for_s: float) -> StartAgain | GiveUp:
        """Decide after an end that nobody asked for. ``exit_code`` is negative for a signal."""
        if exit_code == EXIT_DRAINED:
            return GiveUp(EXIT_DONE, "an operator has drained it; it is started again with its supervisor only")
        if exit_code == EXIT_CONFIG:
            return GiveUp(EXIT_CONFIG, "its configuration is wrong; starting it again would not help")
        if ran_for_s >= self._policy.stable_s:
            self._quick_ends = 0
        self._quick_ends += 1
        if self._quick_ends >= self._policy.give_up_after:
            return GiveUp(EXIT_FAILED, f"it ended {self._quick_ends} times in a row soon after its start")
        delay_s = self._policy.first_delay_s * 2.0 ** (self._quick_ends - 1)
        return StartAgain(min(self._policy.most_delay_s, delay_s))


def narrow_devices(devices: str, count: int, ordinal: int) -> str:
    """The part of a stage's devices that one of ``count`` local replicas gets; empty means the CPU.

    Raise ConfigError if the devices can't be shared out evenly.
    """
    names = [name.strip() for name in devices.split(",") if name.strip()]
    if not names:
        return ""
    if len(names) % count == 0:
        share = len(names) // count
        return ",".join(names[ordinal * share : (ordinal + 1) * share])
    if count % len(names) == 0:
        return names[ordinal % len(names)]
    raise ConfigError(f"{len(names)} devices ({devices}) can't be shared out evenly to {count} replicas")

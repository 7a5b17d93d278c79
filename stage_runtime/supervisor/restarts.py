"""Whether and when a replica that ended by itself is started again."""

from __future__ import annotations

from dataclasses import dataclass

from omni_discovery.backoff import RestartPauses

#: Exit codes of a replica process.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
#: To the supervisor only: the operator has drained it by its control key.
EXIT_DRAINED = 3


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``stable_s``: who served for that long has a clean slate. ``loop_after`` quick ends in a row are a crash loop."""

    first_delay_s: float = 0.5
    most_delay_s: float = 30.0
    stable_s: float = 60.0
    loop_after: int = 6


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start it anew after ``delay_s``. ``why_hopeless`` says why that will hardly help; empty where it may."""

    delay_s: float
    why_hopeless: str = ""


@dataclass(frozen=True, slots=True)
class LeaveDown:
    """An operator has drained it: it stays down."""


class Restarts:
    """The record of one replica's ends."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._pauses = RestartPauses(self._policy.first_delay_s, self._policy.most_delay_s, self._policy.stable_s)
        #: What the supervisor ends with if none of its replicas can be kept up; None as long as this one may be.
        self.hopeless_code: int | None = None

    def ended(self, exit_code: int, served_for_s: float) -> StartAgain | LeaveDown:
        """Decide after an end that nobody asked for.

        ``exit_code`` is negative for a signal; ``served_for_s`` counts from when it was up, 0 if it never was.
        """
        if exit_code == EXIT_DRAINED:
            self.hopeless_code = EXIT_DONE
            return LeaveDown()
        policy = self._policy
        delay_s = self._pauses.ended(served_for_s)
        if exit_code == EXIT_CONFIG:
            self.hopeless_code = EXIT_CONFIG
            return StartAgain(policy.most_delay_s, "its configuration is wrong")
        quick_ends = self._pauses.quick_ends
        if quick_ends >= policy.loop_after:
            self.hopeless_code = EXIT_FAILED
            return StartAgain(policy.most_delay_s, f"it ended {quick_ends} times in a row soon after its start")
        self.hopeless_code = None
        return StartAgain(delay_s)

"""Restart policy: whether and when a replica that has ended is restarted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_discovery.backoff import RestartPauses

#: Exit codes of a replica process.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
#: For the supervisor only: the operator has drained the replica by its control key.
EXIT_DRAINED = 3


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A replica that was up for ``stable_s`` starts over; ``loop_after`` quick ends in a row are a crash loop."""

    first_delay_s: float = 0.5
    most_delay_s: float = 30.0
    stable_s: float = 60.0
    loop_after: int = 6


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Restart the replica after ``delay_s``. ``why_hopeless``: why that is expected to fail; empty otherwise."""

    delay_s: float
    why_hopeless: str = ""


@dataclass(frozen=True, slots=True)
class LeaveDown:
    """Don't restart the replica: an operator has drained it."""


class Restarts:
    """The ends of one replica's processes, and what follows from each."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._pauses = RestartPauses(self._policy.first_delay_s, self._policy.most_delay_s, self._policy.stable_s)
        #: The supervisor's exit code if no replica can be kept up; None while this one may come up.
        self.hopeless_code: int | None = None

    def record_end(self, exit_code: int, served_for_s: float) -> StartAgain | LeaveDown:
        """Decide what follows the end of a process that the supervisor has not stopped.

        ``exit_code`` is negative for a signal; ``served_for_s`` is 0 for a process that never was up.
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

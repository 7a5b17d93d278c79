"""Hand-offs from one process to another: our connectors, bare memory, a raw socket, and the peer's from its wheel.

    python -m tests.bench.connectors [--peer-wheel vllm_omni.whl] [--mooncake] [--yuanrong port] [--out file.json]

A round: the producer puts a torch tensor and sends what ``put`` returned through a pipe; the consumer gets it. It is
timed from before the put to after the get, so the pipe is in all of them; ``both`` is put and get alone. All take turns
within one run, in another order in each round, for who comes after another of ours finds its code in the caches.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from stage_runtime.connectors import (
    AutoConnector,
    OmniConnectorBase,
    SharedMemoryConnector,
    TcpConnector,
    YuanrongConnector,
)
from tests.bench.peer_connector import load
from tests.bench.report import Row, console, machine, percentile, ratio, show

#: Size of the tensor and how many rounds.
SIZES: Final = {
    "1 KB": (1 << 10, 400),
    "64 KB": (1 << 16, 400),
    "1 MB": (1 << 20, 300),
    "8 MB": (1 << 23, 100),
    "64 MB": (1 << 26, 25),
}
_PEER_ROUNDS_AT_MOST: Final = 150
_NAMESPACE: Final = "bench"


class Way(Protocol):
    """One side of a way to hand a tensor over; each process has its own."""

    def put(self, key: str, value: torch.Tensor) -> Any: ...

    def get(self, key: str, said: Any) -> torch.Tensor: ...

    def done(self, key: str) -> None:
        """The consumer has dropped it."""


class OursWay:
    def __init__(self, connector: OmniConnectorBase) -> None:
        self._connector = connector

    def put(self, key: str, value: torch.Tensor) -> Any:
        stored, _, metadata = self._connector.put("0", "1", key, {"tensor": value})
        assert stored, self._connector.last_error
        return {**(metadata or {}), "consume": False}

    def get(self, key: str, said: Any) -> torch.Tensor:
        got = self._connector.get("0", "1", key, said)
        assert got is not None
        tensor: torch.Tensor = got[0]["tensor"]
        return tensor

    def done(self, key: str) -> None:
        self._connector.cleanup(key)


class PeerWay:
    def __init__(self, wheel: str) -> None:
        self._connector = load(wheel)

    def put(self, key: str, value: torch.Tensor) -> Any:
        stored, _, metadata = self._connector.put("0", "1", key, {"tensor": value})
        assert stored
        return metadata

    def get(self, key: str, said: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._connector.get("0", "1", key, said)[0]["tensor"]
        return tensor

    def done(self, key: str) -> None:
        self._connector.cleanup(key)


class BareWay:
    """One segment, mapped by both once and for all: a copy into it, a view out of it. Nothing guards it."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = max(size for size, _ in SIZES.values())
        os.posix_fallocate(descriptor, 0, size)
        self._map = mmap.mmap(descriptor, size)
        # Each page is touched before anything is timed.
        np.frombuffer(self._map, np.uint8).max()

    def put(self, key: str, value: torch.Tensor) -> Any:
        raw = value.numpy().view(np.uint8)
        np.copyto(np.frombuffer(self._map, np.uint8, raw.nbytes), raw)
        return {"count": value.numel()}

    def get(self, key: str, said: Any) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.float32, count=said["count"])

    def done(self, key: str) -> None:
        return


class PipeWay:
    """Nothing at all is handed over: what the pipe alone takes."""

    def put(self, key: str, value: torch.Tensor) -> Any:
        return {"count": value.numel()}

    def get(self, key: str, said: Any) -> torch.Tensor:
        return torch.empty(0)

    def done(self, key: str) -> None:
        return


def mooncake_ways(common: dict[str, Any]) -> dict[str, Way]:
    """A master must run on 127.0.0.1. Both listen on every address there is: run them in a network namespace."""
    from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector
    from stage_runtime.connectors.mooncake.transfer import MooncakeTransferEngineConnector

    return {
        "MooncakeTransferEngineConnector": OursWay(MooncakeTransferEngineConnector(dict(common))),
        "MooncakeStoreConnector": OursWay(MooncakeStoreConnector(common | {"localbuf": 256 << 20})),
    }


def ways(wheel: str, path: str, mooncake: bool = False, yuanrong: int = 0) -> dict[str, Way]:
    """All of them, in the order of the tables."""
    # As replicas make them: their hubs pass the metadata on, so nothing is looked for by its key alone.
    common: dict[str, Any] = {"namespace": _NAMESPACE, "by_key": False}
    found: dict[str, Way] = {
        "pipe": PipeWay(),
        "bare": BareWay(path),
        "SharedMemoryConnector": OursWay(SharedMemoryConnector(dict(common))),
        "AutoConnector": OursWay(AutoConnector(dict(common))),
        "TcpConnector": OursWay(TcpConnector(dict(common))),
    }
    if mooncake:
        found |= mooncake_ways(common)
    if yuanrong:
        found["YuanrongConnector"] = OursWay(YuanrongConnector(common | {"port": yuanrong}))
    if wheel:
        found["peer"] = PeerWay(wheel)
    return found


def consume(pipe: Connection, *chosen: Any) -> None:
    """The other process: get what is named, say when it was there and how long that took, with reading all of it."""
    torch.set_num_threads(1)
    found = ways(*chosen)
    pipe.send("ready")
    while True:
        order = pipe.recv()
        if order is None:
            return
        name, key, said = order
        begun_s = time.perf_counter()
        tensor = found[name].get(key, said)
        got_s = time.perf_counter()
        total = float(tensor.sum())
        read_s = time.perf_counter()
        del tensor
        pipe.send((begun_s, got_s, read_s, total))


def measure(found: dict[str, Way], pipe: Connection, label: str) -> list[Row]:
    """One size, all ways in turn."""
    size, rounds = SIZES[label]
    value = torch.ones(size // 4)
    parts = ("all", "put", "get", "both", "read")
    times: dict[str, dict[str, list[float]]] = {name: {part: [] for part in parts} for name in found}
    turns = list(found.items())
    chance = random.Random(size)
    for number in range(rounds + 3):
        chance.shuffle(turns)
        for name, way in turns:
            if name == "peer" and number > _PEER_ROUNDS_AT_MOST:
                continue
            key = f"{name}-{label}-{number}".replace(" ", "")
            begun_s = time.perf_counter()
            said = way.put(key, value)
            put_s = time.perf_counter()
            pipe.send((name, key, said))
            get_s, got_s, read_s, total = pipe.recv()
            assert name == "pipe" or total == value.numel()
            way.done(key)
            if number >= 3:
                taken = {
                    "all": got_s - begun_s,
                    "put": put_s - begun_s,
                    "get": got_s - get_s,
                    "both": put_s - begun_s + got_s - get_s,
                    "read": read_s - begun_s,
                }
                for part, spent_s in taken.items():
                    times[name][part].append(spent_s)
    return [row_of(label, name, times) for name in found]


def row_of(label: str, name: str, times: dict[str, dict[str, list[float]]]) -> Row:
    p50_us = {part: 1e6 * percentile(samples, 0.5) for part, samples in times[name].items()}
    bare_us = {part: 1e6 * percentile(times["bare"][part], 0.5) for part in p50_us}
    peer_us = {part: 1e6 * percentile(times["peer"][part], 0.5) if "peer" in times else 0.0 for part in p50_us}
    return {
        "size": label,
        "way": name,
        "put_us": round(p50_us["put"], 1),
        "get_us": round(p50_us["get"], 1),
        "put_to_got_us": round(p50_us["all"], 1),
        "p95_us": round(1e6 * percentile(times[name]["all"], 0.95), 1),
        "put_to_read_us": round(p50_us["read"], 1),
        "to_bare": ratio(p50_us["all"], bare_us["all"]),
        "peer_to_it": ratio(peer_us["all"], p50_us["all"]),
        "both_to_bare": ratio(p50_us["both"], bare_us["both"]),
        "peer_to_both": ratio(peer_us["both"], p50_us["both"]),
    }


def send_raw(listener: socket.socket, size: int) -> None:
    """A producer that sends the same memory for each byte that it receives."""
    connection, _ = listener.accept()
    memory = memoryview(bytearray(size))
    while connection.recv(1):
        connection.sendall(memory)


def measure_sockets(context: Any) -> list[Row]:
    """Fetching 64 MB over the loopback: one raw connection into one piece of memory, and TcpConnector's ``get``."""
    size, rounds = SIZES["64 MB"]
    listener = socket.create_server(("127.0.0.1", 0))
    sender = context.Process(target=send_raw, args=(listener, size), daemon=True)
    sender.start()
    pipe, theirs = context.Pipe()
    producer = context.Process(target=produce, args=(theirs, size), daemon=True)
    producer.start()
    metadata = pipe.recv()
    raw = socket.create_connection(listener.getsockname())
    memory = memoryview(bytearray(size))
    times: dict[str, list[float]] = {"raw socket": [], "TcpConnector": []}
    with TcpConnector({"namespace": _NAMESPACE}) as consumer:
        for number in range(rounds + 3):
            begun_s = time.perf_counter()
            raw.sendall(b"x")
            place = 0
            while place < size:
                place += raw.recv_into(memory[place:])
            between_s = time.perf_counter()
            got = consumer.get("0", "1", "key", metadata)
            ended_s = time.perf_counter()
            assert got is not None
            del got
            if number >= 3:
                times["raw socket"].append(between_s - begun_s)
                times["TcpConnector"].append(ended_s - between_s)
    for process in (sender, producer):
        process.terminate()
    p50_s = {name: percentile(samples, 0.5) for name, samples in times.items()}
    return [
        {
            "size": "64 MB",
            "way": name,
            "p50_ms": round(1000 * spent_s, 2),
            "gb_per_s": round(size / spent_s / 1e9, 2),
            "of_raw": ratio(p50_s["raw socket"], spent_s),
        }
        for name, spent_s in p50_s.items()
    ]


def produce(pipe: Connection, size: int) -> None:
    """A producer that stores one tensor and waits."""
    connector = TcpConnector({"namespace": _NAMESPACE})
    metadata = connector.put("0", "1", "key", {"tensor": torch.ones(size // 4)})[2]
    pipe.send({**(metadata or {}), "consume": False})
    pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-wheel", default="", help="the wheel of vllm-omni to measure beside")
    parser.add_argument("--mooncake", action="store_true", help="Mooncake's connectors too; mooncake_master must run")
    parser.add_argument(
        "--yuanrong", type=int, default=0, help="Yuanrong's too; the port of its datasystem, which runs"
    )
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    # Others would spin on the second processor after each sum, where the other process is to run.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    path = f"/dev/shm/bench-bare-{os.getpid()}"
    chosen = (arguments.peer_wheel, path, arguments.mooncake, arguments.yuanrong)
    found = ways(*chosen)
    pipe, theirs = context.Pipe()
    process = context.Process(target=consume, args=(theirs, *chosen), daemon=True)
    process.start()
    assert pipe.recv() == "ready"
    Path(path).unlink()
    rows = [row for label in SIZES for row in measure(found, pipe, label)]
    pipe.send(None)
    process.join()
    sockets = measure_sockets(context)
    show("From before put to after get, median of one run", rows)
    show("Fetching over the loopback", sockets)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "memory": rows, "sockets": sockets}, indent=1))
        console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

"""The parties of the peer, vLLM-Omni's coordinator, loaded from its wheel as it was published.

Only its coordinator package is imported; the packages above it and what it wants of vLLM are empty stand-ins, so that
nothing else of it runs. Its clients are its own; the crowd speaks its wire format through one socket.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import zmq

from tests.bench.actors import now_s
from tests.bench.expectation import Expectation

_PACKAGE: Final = "vllm_omni.distributed.omni_coordinator"
_POLL_S: Final = 0.0005
_HEARTBEAT_S: Final = 5.0


def load(wheel: str) -> Any:
    """The peer's coordinator package. Raise FileNotFoundError without the wheel."""
    if not Path(wheel).is_file():
        raise FileNotFoundError(wheel)
    for name in ("vllm_omni", "vllm_omni.distributed", "vllm", "vllm.utils", "vllm.utils.network_utils"):
        stand_in = ModuleType(name)
        stand_in.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules.setdefault(name, stand_in)
    sys.modules["vllm.utils.network_utils"].__dict__.setdefault("get_open_ports_list", None)
    return importlib.import_module(_PACKAGE)


class PeerCoordinator:
    """Its central process, with its own default timings."""

    def __init__(self, wheel: str) -> None:
        self._coordinator = load(wheel).OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")

    def addresses(self) -> tuple[str, str]:
        """Where replicas write to and where hubs listen."""
        return self._coordinator.router_zmq_addr, self._coordinator.pub_zmq_addr

    def shut(self) -> None:
        self._coordinator.close()


class PeerReplica:
    """One of its own stage clients."""

    def __init__(self, wheel: str, address: str) -> None:
        self._package = load(wheel)
        self._coordinator_address = address
        self._client: Any = None

    def register(self, address: str) -> float:
        """Make the client; the moment before that."""
        began_s = now_s()
        self._client = self._package.OmniCoordClientForStage(self._coordinator_address, address, address + "0", 0)
        return began_s

    def wait_registered(self) -> None:
        """It has no such word; what was sent first arrives first."""

    def load(self, queue_length: int) -> float:
        """Change the queue length; the moment before that."""
        began_s = now_s()
        self._client.update_info(queue_length=queue_length)
        return began_s

    def withdraw(self) -> float:
        """Close the client; the moment before that."""
        client, self._client = self._client, None
        began_s = now_s()
        client.close()
        return began_s

    def shut(self) -> None:
        if self._client is not None:
            self._client.close()


class PeerHub:
    """One of its own hub clients. It calls nobody, so its list is looked at each half millisecond while waited for."""

    def __init__(self, wheel: str, address: str) -> None:
        self._package = load(wheel)
        self._address = address
        self._client: Any = None
        self._expected = Expectation()
        self._looking = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def open(self) -> None:
        """Connect and wait for the first list."""
        self._client = self._package.OmniCoordClientForHub(self._address)
        self._thread.start()
        while not self._client.get_replica_list().timestamp:
            time.sleep(_POLL_S)

    def first_list_s(self, wanted: int) -> float:
        """Seconds from the constructor to a list with ``wanted`` replicas, by a client of its own."""
        began_s = now_s()
        client = self._package.OmniCoordClientForHub(self._address)
        while len(client.get_replica_list().replicas) != wanted and now_s() < began_s + 30.0:
            time.sleep(_POLL_S)
        took_s = now_s() - began_s
        client.close()
        return took_s

    def count(self) -> int:
        """How many replicas its list has."""
        return len(self._client.get_replica_list().replicas)

    def arm(self, address: str, queue_length: int | None) -> None:
        self._expected.arm(address, queue_length)
        self._looking.set()

    def seen(self, timeout_s: float) -> float:
        met_at_s = self._expected.seen(timeout_s)
        self._looking.clear()
        return met_at_s

    def shut(self) -> None:
        if self._client is not None:
            self._client.close()

    def _look(self) -> None:
        before = None
        while True:
            self._looking.wait()
            found = self._client.get_replica_list()
            if found is before:
                time.sleep(_POLL_S)
                continue
            before = found
            address = self._expected.address
            lengths = [info.queue_length for info in found.replicas if info.input_addr == address]
            self._expected.note(address, lengths[0] if lengths else None)


class PeerCrowd:
    """Simulated replicas that register and beat through one socket, each five seconds as its own client does."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._count = 0
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def grow(self, count: int) -> None:
        """Have ``count`` replicas in all."""
        for number in range(self._count, count):
            self._send(number, "update", 0)
        self._count = count

    def change(self, number: int, queue_length: int) -> None:
        """Change the queue length of one."""
        self._send(number, "update", queue_length)

    def shut(self) -> None:
        with self._lock:
            self._socket.close(0)

    def _send(self, number: int, kind: str, queue_length: int | None) -> None:
        address = f"tcp://10.0.{number // 250}.{number % 250}:4000"
        event = {
            "input_addr": address + "1",
            "output_addr": address + "2",
            "stage_id": 0,
            "event_type": kind,
            "status": "up",
            "queue_length": queue_length,
        }
        with self._lock:
            if not self._socket.closed:
                self._socket.send(json.dumps(event).encode())

    def _beat(self) -> None:
        while True:
            time.sleep(_HEARTBEAT_S)
            for number in range(self._count):
                self._send(number, "heartbeat", None)
                # Spread out, as those of separate processes would be.
                time.sleep(0.0005)

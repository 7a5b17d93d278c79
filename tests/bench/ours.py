"""The parties of this project in the benchmarks: a replica's client, a hub's client, and a crowd of simulated records.

A crowd's records are written by plain KVStore calls under shared leases, because a thousand real clients would be a
thousand threads and connections on one machine. What is measured is always done by real clients.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import Any, Final

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.loop_thread import LoopThread
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.registration.registrars import ReplicaRegistrar
from omni_discovery.view.table import Delta, View
from tests.bench.actors import now_s
from tests.bench.expectation import Expectation

#: Simulated replicas have ids from here on, those of real clients are lower.
FIRST_SIMULATED: Final = 100

#: What a replica of the demo publishes besides the fields that every system has.
FIELDS: Final[dict[str, Any]] = {
    "host": "host-17.example",
    "pid": 12345,
    "device": "cuda:3",
    "model": "demo/thinker",
    "version": "0.1.0",
    "capacity": 8,
    "curve_public_key": "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID",
}


def record(number: int, queue_length: int = 0, port: int = 40001) -> ReplicaRecord:
    """The record of one simulated replica."""
    return ReplicaRecord(
        stage_id=0,
        replica_id=number,
        input_addr=f"tcp://10.0.{number // 250}.{number % 250}:{port}",
        output_addr=f"tcp://10.0.{number // 250}.{number % 250}:{port + 1}",
        status=ReplicaStatus.UP,
        queue_length=queue_length,
        registered_at=1_700_000_000.0,
        updated_at=1_700_000_000.0,
        **FIELDS,
    )


class OurReplica:
    """One real OmniCoordClientForStage."""

    def __init__(self, endpoint: str, namespace: str) -> None:
        self._endpoint = endpoint
        self._namespace = namespace
        self._client: OmniCoordClientForStage | None = None

    def register(self, address: str) -> float:
        """Make the client; the moment before that."""
        began_s = now_s()
        self._client = OmniCoordClientForStage(
            self._endpoint, address, address + "0", 0, namespace=self._namespace, fields=FIELDS
        )
        return began_s

    def wait_registered(self) -> None:
        """Until the record stands."""
        assert self._client is not None
        self._client.wait_registered(20.0)

    def load(self, queue_length: int) -> float:
        """Change the queue length and with it a field that is published at once; the moment before that."""
        assert self._client is not None
        began_s = now_s()
        self._client.describe(queue_length=queue_length, reason=f"bench {queue_length % 10}")
        return began_s

    def load_paced(self, queue_length: int) -> float:
        """Change the queue length alone, which the load interval and the write budget may hold back."""
        assert self._client is not None
        began_s = now_s()
        self._client.update_info(queue_length=queue_length)
        return began_s

    def withdraw(self) -> float:
        """Close the client; the moment before that."""
        client, self._client = self._client, None
        assert client is not None
        began_s = now_s()
        client.close()
        return began_s

    def shut(self) -> None:
        if self._client is not None:
            self._client.close()


class OurHub:
    """One real OmniCoordClientForHub; a change counts as visible when ``on_view`` is called with it."""

    def __init__(self, endpoint: str, namespace: str, hub_id: str = "bench-hub") -> None:
        self._expected = Expectation()
        self._endpoint = endpoint
        self._namespace = namespace
        self._hub_id = hub_id
        self._client: OmniCoordClientForHub | None = None

    def open(self) -> None:
        """Connect and wait for the first list."""
        self._client = OmniCoordClientForHub(
            self._endpoint, namespace=self._namespace, hub=HubRecord(hub_id=self._hub_id), on_view=self._take
        )
        self._client.wait_synced(20.0)

    def first_list_s(self, wanted: int) -> float:
        """Seconds from the constructor to a list with ``wanted`` replicas, by a client of its own."""
        expected = Expectation()
        expected.arm("all", wanted)

        def take(view: View, delta: Delta) -> None:
            expected.note("all", len(view.replicas))

        began_s = now_s()
        with OmniCoordClientForHub(self._endpoint, namespace=self._namespace, on_view=take):
            return expected.seen(30.0) - began_s

    def arm(self, address: str, queue_length: int | None) -> None:
        self._expected.arm(address, queue_length)

    def seen(self, timeout_s: float) -> float:
        return self._expected.seen(timeout_s)

    def state(self) -> tuple[int, bool]:
        """How many replicas are up, and whether the view is proved fresh."""
        assert self._client is not None
        found = self._client.get_replica_list()
        return len(found.replicas), found.stale_since_s is None

    def up(self) -> tuple[int, bool]:
        """How many records of the view are up, and whether it is proved fresh."""
        assert self._client is not None
        view = self._client.view()
        up = sum(info.status is ReplicaStatus.UP for info in view.replicas.values())
        return up, bool(view.revision) and view.stale_since_s is None

    def lives(self, port: int) -> tuple[int, str]:
        """How many records of the view are of replicas at this port, and a digest of all lives in it."""
        assert self._client is not None
        infos = self._client.view().replicas.values()
        lives = sorted((info.stage_id, info.replica_id, info.epoch, info.input_addr) for info in infos)
        return sum(address.endswith(f":{port}") for *_, address in lives), blake2b(repr(lives).encode()).hexdigest()

    def shut(self) -> None:
        if self._client is not None:
            self._client.close()

    def _take(self, view: View, delta: Delta) -> None:
        for info in (*delta.updated, *delta.added):
            self._expected.note(info.input_addr, info.queue_length if info.status is ReplicaStatus.UP else None)
        for info in delta.removed:
            self._expected.note(info.input_addr, None)


class OurCrowd:
    """Simulated records, several to a lease, and changes of them at a given rate."""

    def __init__(self, endpoint: str, namespace: str, first: int, ttl_s: float = 60.0) -> None:
        self._namespace = namespace
        self._first = first
        self._ttl_s = ttl_s
        self._leases: list[int] = []
        self._count = 0
        self._written = 0
        self._thread = LoopThread("crowd")
        self._kv = self._thread.run(self._open(endpoint), 10.0)
        self._changing = self._thread.start(asyncio.sleep(0))
        self._renewing = self._thread.start(self._renew())

    def grow(self, count: int, lease_count: int = 1) -> None:
        """Have ``count`` records in all."""
        self._thread.run(self._grow(count, lease_count), 300.0)

    def change(self, number: int, queue_length: int) -> None:
        """Change one record now."""
        self._thread.run(self._put(number, queue_length), 20.0)

    def change_at(self, rate_per_s: float) -> None:
        """Change one record after another, so many in a second, until told otherwise; 0 is none."""
        self._changing.cancel()
        if rate_per_s:
            self._changing = self._thread.start(self._keep_changing(rate_per_s))

    def written(self) -> int:
        """How many changes were acknowledged so far."""
        return self._written

    def shut(self) -> None:
        self._thread.run(self._close(), 60.0)
        self._thread.close()

    async def _open(self, endpoint: str) -> EtcdKV:
        return EtcdKV(endpoint, try_timeout_s=10.0)

    async def _close(self) -> None:
        await asyncio.gather(*(self._kv.revoke(lease) for lease in self._leases), return_exceptions=True)
        await self._kv.close()

    async def _grow(self, count: int, lease_count: int) -> None:
        while len(self._leases) < lease_count:
            self._leases.append((await self._kv.grant(self._ttl_s)).lease_id)
        for start in range(self._count, count, 64):
            await asyncio.gather(*(self._put(number, 0) for number in range(start, min(start + 64, count))))
        self._count = count

    async def _put(self, number: int, queue_length: int) -> None:
        value = encode_record(record(self._first + number, queue_length))
        key = keys.replica_key(self._namespace, 0, self._first + number)
        await self._kv.put(key, value, self._leases[number % len(self._leases)])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for lease in self._leases:
                await self._kv.keep_alive(lease)

    async def _keep_changing(self, rate_per_s: float) -> None:
        due_s, turn = now_s(), 0
        while True:
            await asyncio.gather(*(self._put((turn + step) % self._count, turn % 97 + 1) for step in range(10)))
            turn += 10
            self._written += 10
            due_s += 10 / rate_per_s
            await asyncio.sleep(max(0.0, due_s - now_s()))


class Registrars:
    """Many real ReplicaRegistrars on one connection, each with a lease of its own.

    With a ``port`` they take any free ids, their addresses have that port, and they register once they are told to.
    """

    def __init__(
        self, endpoint: str, namespace: str, first: int, count: int, ttl_s: float, port: int | None = None
    ) -> None:
        self._thread = LoopThread("registrars")
        self._numbers = range(first, first + count)
        self._port = 40001 if port is None else port
        self._kv = self._thread.run(self._open(endpoint, namespace, ttl_s, wants_ids=port is None), 30.0)
        if port is None:
            self.begin()

    async def _open(self, endpoint: str, namespace: str, ttl_s: float, *, wants_ids: bool) -> EtcdKV:
        kv = EtcdKV(endpoint)
        self._registrars = [
            ReplicaRegistrar(kv, namespace, self._record(number), wanted_id=number if wants_ids else None, ttl_s=ttl_s)
            for number in self._numbers
        ]
        return kv

    def _record(self, number: int, queue_length: int = 0) -> ReplicaRecord:
        return record(number, queue_length, self._port)

    def begin(self) -> None:
        """Register all, at once."""
        self._thread.call(self._begin)

    def _begin(self) -> None:
        for registrar in self._registrars:
            registrar.start()

    def load(self, queue_length: int) -> None:
        """Change the queue length of each."""
        self._thread.call(self._load, queue_length)

    def _load(self, queue_length: int) -> None:
        for number, registrar in zip(self._numbers, self._registrars, strict=True):
            registrar.update(self._record(number, queue_length))

    def shut(self) -> None:
        """Leave without a word: their leases run out."""
        self._thread.close()

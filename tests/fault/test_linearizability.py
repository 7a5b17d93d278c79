"""What shipped clients see of shared state, while members and links of a real etcd cluster fail, is linearizable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.etcd.store import EtcdKV
from tests.linearizability.models import KEY
from tests.linearizability.recorder import KeyLog, RecordedKV
from tests.linearizability.search import check
from tests.linearizability.workload import Workload
from tests.support.cluster import EtcdCluster
from tests.support.proxy import TcpProxy

pytestmark = pytest.mark.docker

#: How long one round has its clients work.
ROUND_S = 9.0
#: Before anything breaks, so that all clients are there.
_CALM_S = 1.5


@pytest.fixture
def proxies(cluster: EtcdCluster) -> Iterator[list[list[TcpProxy]]]:
    """Two ways to each member."""
    with ExitStack() as stack:
        yield [[stack.enter_context(TcpProxy(member.endpoint)) for member in cluster.members] for _ in range(2)]


class Harm:
    """Breaks one thing at a time from a thread of its own, and mends it, until it is told to end."""

    def __init__(self, cluster: EtcdCluster, proxies: list[list[TcpProxy]], chance: random.Random) -> None:
        self._cluster, self._proxies, self._chance = cluster, proxies, chance
        self._thread = threading.Thread(target=self._run)
        self._ends = threading.Event()
        self.done: list[str] = []

    def __enter__(self) -> Harm:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        self._ends.wait(_CALM_S)
        while not self._ends.wait(self._chance.uniform(0.3, 1.0)):
            kind = self._chance.choice(
                (
                    self._kill_leader,
                    self._pause_member,
                    self._cut_peers,
                    self._silence_link,
                    self._silence_way,
                    self._reset_links,
                )
            )
            self.done.append(kind.__name__)
            kind(self._chance.uniform(0.3, 2.5))

    def _kill_leader(self, for_s: float) -> None:
        leader = self._cluster.leader()
        leader.kill()
        self._ends.wait(for_s)
        leader.start()
        self._cluster.wait_serving()

    def _pause_member(self, for_s: float) -> None:
        member = self._chance.choice(self._cluster.members)
        member.pause()
        self._ends.wait(for_s)
        member.unpause()
        self._cluster.wait_serving()

    def _cut_peers(self, for_s: float) -> None:
        member = self._chance.choice(self._cluster.members)
        self._cluster.cut_off(member)
        self._ends.wait(for_s)
        self._cluster.join_again(member)
        self._cluster.wait_serving()

    def _silence_link(self, for_s: float) -> None:
        """What was sent meanwhile arrives later: long after its sender has given it up."""
        proxy = self._chance.choice(self._chance.choice(self._proxies))
        proxy.freeze()
        self._ends.wait(for_s)
        proxy.thaw()

    def _silence_way(self, for_s: float) -> None:
        """Half of the clients reach no member for so long that their leases may end."""
        way = self._chance.choice(self._proxies)
        for proxy in way:
            proxy.freeze()
        self._ends.wait(for_s + 3.0)
        for proxy in way:
            proxy.thaw()

    def _reset_links(self, for_s: float) -> None:
        """Again and again, so that answers are lost of what was done."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            self._chance.choice(self._chance.choice(self._proxies)).cut()
            self._ends.wait(self._chance.uniform(0.01, 0.1))


def test_what_clients_see_could_have_happened_one_after_the_other(
    cluster: EtcdCluster, proxies: list[list[TcpProxy]], rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round for each seed, from OMNI_LINEAR_SEED on: with the default of three rounds in all, two."""
    first = int(os.environ.get("OMNI_LINEAR_SEED", "1"))
    ways = [",".join(proxy.endpoint for proxy in way) for way in proxies]
    total: Counter[str] = Counter()
    for seed in range(first, first + max(1, rounds - 1)):
        workload = Workload(ways, f"linear-{uuid.uuid4().hex[:12]}", seed)
        with Harm(cluster, proxies, random.Random(seed)) as harm:
            asyncio.run(workload.run(ROUND_S))
        cluster.mend()
        # A leader that wakes up has this release of etcd end leases that its successor has renewed.
        are_leases_kept = "_pause_member" not in harm.done
        late = workload.keys.late_attempts
        said = f"seed {seed}, {' '.join(harm.done)}: {workload.counts()}, {late} creates sent twice"
        if not are_leases_kept:
            broken = [name for name, each in workload.verdicts().items() if not each.is_linearizable]
            said += f", not so if leases were kept: {len(broken)}"
        verdicts = workload.verdicts(are_leases_kept=are_leases_kept)
        wrong = {subject: verdict for subject, verdict in verdicts.items() if not verdict.is_linearizable}
        assert not wrong, "\n".join([said, *(f"{subject}: {verdict}" for subject, verdict in wrong.items())])
        total.update(workload.counts())
        with capsys.disabled():
            sys.stdout.write(f"{said}\n")
    assert all(total.values()), total


class CarelessKV(EtcdKV):
    """Reads what one member has, whether or not it is the latest."""

    async def _try_once(self, method: Any, request: Any) -> Any:
        if hasattr(request, "serializable"):
            request.serializable = True
        return await super()._try_once(method, request)


async def write_and_read(writer: str, reader: str, connect: type[EtcdKV], meanwhile: Callable[[], None]) -> KeyLog:
    """A key is written, then the reader's member loses the others, and the key is written again and read."""
    log, key = KeyLog(), f"/linear/{uuid.uuid4().hex}"
    writes, reads = EtcdKV(writer), connect(reader, try_timeout_s=0.5, call_timeout_s=0.5)
    one, other = RecordedKV(writes, "writer", log), RecordedKV(reads, "reader", log)
    await one.put(key, b"1")
    await other.get(key)
    await asyncio.to_thread(meanwhile)
    await one.put(key, b"2")
    with contextlib.suppress(RegistryUnavailableError):
        await other.get(key)
    await writes.close()
    await reads.close()
    return log


@pytest.mark.parametrize(("connect", "is_linearizable"), [(EtcdKV, True), (CarelessKV, False)])
def test_a_client_whose_reads_pass_by_the_quorum_is_found_out(
    cluster: EtcdCluster, connect: type[EtcdKV], is_linearizable: bool
) -> None:
    """A member without the others answers a read that asks it alone: with what was, which the search must not allow."""
    victim = cluster.followers()[0]
    others = ",".join(member.endpoint for member in cluster.members if member is not victim)
    log = asyncio.run(write_and_read(others, victim.endpoint, connect, lambda: cluster.cut_off(victim)))
    (history,) = log.histories().values()
    assert check(KEY, history).is_linearizable is is_linearizable, "\n".join(map(str, history))

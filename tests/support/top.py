"""The screen of ``omni top`` on a registry in memory, as text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from omni_discovery.commands.top.screen import TopApp
from omni_discovery.commands.top.source import TopSource
from omni_discovery.kv import KVStore
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV

PATIENCE_S = 30.0


async def put_replica(kv: FakeKV, namespace: str, stage_id: int, replica_id: int, **fields: Any) -> None:
    """Write a replica's record."""
    known = {"status": ReplicaStatus.UP, "input_addr": "tcp://h:1", "output_addr": "tcp://h:2", **fields}
    record = ReplicaRecord(stage_id=stage_id, replica_id=replica_id, **known)
    lease = await kv.grant(10.0)
    await kv.put(keys.replica_key(namespace, stage_id, replica_id), encode_record(record), lease.lease_id)


def screen_text(app: TopApp) -> str:
    """What stands on the screen, without colours, line by line."""
    lines = ("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())
    return "\n".join(line.rstrip() for line in lines) + "\n"


async def wait_shown(pilot: Pilot[None], is_so: Callable[[str], bool]) -> str:
    """Wait until the screen is so; return it."""
    assert isinstance(pilot.app, TopApp)
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so(text := screen_text(pilot.app)):
        assert time.monotonic() < deadline_s, f"this is shown all the time:\n{text}"
        await pilot.pause(0.05)
    return text


@asynccontextmanager
async def shown(
    kv: KVStore,
    folder: Path,
    size: tuple[int, int] = (80, 24),
    answers: Mapping[str, Any] | None = None,
) -> AsyncIterator[Pilot[None]]:
    """The screen of namespace ``n``; ``answers`` are those of its only hub, by the beginning of the path."""

    def ask(path: str) -> dict[str, Any]:
        found = (answer for begin, answer in (answers or {}).items() if path.startswith(begin))
        return next(found, {})

    def hubs(_: object) -> Sequence[Callable[[str], dict[str, Any]]]:
        return [] if answers is None else [ask]

    app = TopApp(TopSource(kv, "n", hubs, folder), "n")
    async with app.run_test(size=size) as pilot:
        yield pilot

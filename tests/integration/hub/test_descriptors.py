"""A hub that runs out of file descriptors is well again when there are some, and serves with what it has meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hub_fakes import FakeReplica, ask, running_hub, show, until


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Nothing more can be opened by the process of the test, which the hub runs in."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        while True:
            fillers.append(os.dup(0))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in fillers:
            os.close(each)


@pytest.mark.attack("A11")
async def test_a_replica_that_came_while_none_was_left_is_used_soon_after(caplog: pytest.LogCaptureFixture) -> None:
    """1. a replica comes while the hub can open nothing: the log says what to do; the other one serves on
    2. there are descriptors again: it is used, though its record has not changed
    """
    caplog.set_level(logging.WARNING, "hub")
    first, second = FakeReplica(), FakeReplica(replica_id=1)
    async with running_hub(first) as omni:
        with no_descriptor_left():
            show(omni, first.info, second.info)
            await until(lambda: "replica.unusable replica=0/1" in caplog.text, 30)
            assert await ask(omni) == "hello there "
            await asyncio.sleep(1.5)
            assert not second.received
        await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == 2, 30)
        for _ in range(2):
            assert await ask(omni) == "hello there "
        assert second.received
    second.kill()
    assert "no file descriptor left for it (Too many open files): it is tried again" in caplog.text

"""Writes on a condition whose answer is lost, and what others do to the key before the same write is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import Claim
from tests.support.registry import compact, revision_of


class OneAnswerLost(EtcdKV):
    """Loses the answer to its next transaction, which has run or has not; then others have their turn."""

    def __init__(self, endpoint: str, meanwhile: Callable[[], Awaitable[Any]], *, runs: bool = True) -> None:
        super().__init__(endpoint)
        self._meanwhile, self._runs = meanwhile, runs
        self._is_due = True

    async def _try_once(self, method: Any, request: Any) -> Any:
        if not self._is_due or not hasattr(request, "success"):
            return await super()._try_once(method, request)
        self._is_due = False
        if self._runs:
            await super()._try_once(method, request)
        await self._meanwhile()
        raise RegistryUnavailableError("the answer was lost", may_have_run=True)


class Scene:
    """One key at ``first``, a client whose answer is lost, and another one."""

    def __init__(self, endpoint: str, namespace: str) -> None:
        self.endpoint, self.key = endpoint, f"/lost/{namespace}"
        self.other = EtcdKV(endpoint)

    async def write(self, meanwhile: Callable[[], Awaitable[Any]], *, at: int, runs: bool = True) -> Claim:
        """Write ``mine`` at a revision, 0 where there is no key, and lose the first answer."""
        kv = OneAnswerLost(self.endpoint, meanwhile, runs=runs)
        try:
            await kv.get("/lost/anything")
            return await (kv.compare_and_put(self.key, b"mine", at) if at else kv.create(self.key, b"mine"))
        finally:
            await kv.close()

    async def others(self, *values: bytes | None) -> None:
        """Others write the key, or delete it, one after the other."""
        for value in values:
            if value is None:
                await self.other.delete(self.key)
            else:
                await self.other.put(self.key, value)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("writes", [(), (b"theirs",), (b"theirs", b"mine too", b"more")])
async def test_a_write_whose_answer_was_lost_has_won_whatever_others_write_since(
    endpoint: str, namespace: str, is_new: bool, writes: tuple[bytes, ...]
) -> None:
    """1. the write runs, its answer is lost; 2. others read it and write over it; 3. it is sent again: it has won."""
    scene = Scene(endpoint, namespace)
    at = 0 if is_new else await scene.other.put(scene.key, b"first")
    claim = await scene.write(lambda: scene.others(*writes), at=at)
    assert claim.won
    assert claim.current is not None
    assert (claim.current.value, claim.current.mod_revision) == (b"mine", claim.revision)
    now = await scene.other.get(scene.key)
    assert now is not None
    assert now.mod_revision == claim.revision + len(writes)
    await scene.other.close()


@pytest.mark.parametrize("writes", [(b"theirs",), (b"theirs", b"more")])
async def test_a_write_that_has_not_run_has_lost_against_those_that_did(
    endpoint: str, namespace: str, writes: tuple[bytes, ...]
) -> None:
    scene = Scene(endpoint, namespace)
    at = await scene.other.put(scene.key, b"first")
    claim = await scene.write(lambda: scene.others(*writes), at=at, runs=False)
    assert not claim.won
    assert claim.current is not None
    assert claim.current.value == writes[-1]
    await scene.other.close()


async def test_a_key_that_was_there_before_is_nobodys_new_one(endpoint: str, namespace: str) -> None:
    """Not even where it holds the same: somebody else has created it."""
    scene = Scene(endpoint, namespace)
    await scene.others(b"mine")
    claim = await scene.write(lambda: asyncio.sleep(0), at=0, runs=False)
    assert not claim.won
    await scene.other.close()


@pytest.mark.parametrize(
    "writes", [(None,), (None, b"theirs"), (None, b"mine"), tuple(b"%d" % number for number in range(12))]
)
async def test_what_can_not_be_told_any_more_is_said_to_be_unknown(
    endpoint: str, namespace: str, writes: tuple[bytes | None, ...]
) -> None:
    scene = Scene(endpoint, namespace)
    at = await scene.other.put(scene.key, b"first")
    with pytest.raises(RegistryUnavailableError) as raised:
        await scene.write(lambda: scene.others(*writes), at=at)
    assert raised.value.may_have_run
    await scene.other.close()


async def test_a_history_that_is_compacted_tells_nothing(endpoint: str, namespace: str) -> None:
    scene = Scene(endpoint, namespace)

    async def write_and_compact() -> None:
        await scene.others(b"theirs", b"more")
        assert revision_of(endpoint)
        await asyncio.to_thread(compact, endpoint)

    at = await scene.other.put(scene.key, b"first")
    with pytest.raises(RegistryUnavailableError) as raised:
        await scene.write(write_and_compact, at=at)
    assert raised.value.may_have_run
    await scene.other.close()


async def test_a_call_that_ends_without_a_leader_says_that_an_earlier_attempt_may_have_run(endpoint: str) -> None:
    class Leaderless(EtcdKV):
        attempts = 0

        async def _try_once(self, method: Any, request: Any) -> Any:
            self.attempts += 1
            raise RegistryUnavailableError("no answer", may_have_run=self.attempts == 1)

    kv = Leaderless(endpoint, call_timeout_s=0.3)
    with pytest.raises(RegistryUnavailableError) as raised:
        await kv.create("/lost/never", b"1")
    assert kv.attempts > 1
    assert raised.value.may_have_run
    await kv.close()

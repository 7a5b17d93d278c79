"""What every KVStore promises, in memory or in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from omni_discovery.errors import CompactedError, LeaseNotFoundError, RegistryUnavailableError
from omni_discovery.kv import DeleteEvent, Held, KVStore, PutEvent, WatchBatch, WatchEvent
from omni_discovery.records.sizes import MAX_VALUE_BYTES
from tests.contract.conftest import Store

NO_LEASE = 0x7FFF_0001


async def take(batches: AsyncGenerator[WatchBatch, None], count: int, timeout_s: float = 5.0) -> list[WatchEvent]:
    """The next ``count`` events of a watch."""
    found: list[WatchEvent] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            found += (await anext(batches)).events
    return found


async def opened(kv: KVStore, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
    """A watch that stands."""
    batches = kv.watch(prefix, start_revision)
    async with asyncio.timeout(5.0):
        first = await anext(batches)
    assert tuple(first.events) == ()
    return batches


async def test_what_is_put_can_be_read_and_deleted(store: Store, prefix: str) -> None:
    key = prefix + "a"
    assert await store.kv.get(key) is None
    revision = await store.kv.put(key, b"1")
    found = await store.kv.get(key)
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.lease_id) == (b"1", revision, revision, 0)
    later = await store.kv.put(key, b"2")
    found = await store.kv.get(key)
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision) == (b"2", revision, later)
    assert await store.kv.delete(key) is True
    assert await store.kv.delete(key) is False
    assert await store.kv.get(key) is None


async def test_a_delete_at_a_revision_leaves_what_was_written_since(store: Store, prefix: str) -> None:
    key = prefix + "a"
    first = await store.kv.put(key, b"1")
    second = await store.kv.put(key, b"2")
    assert await store.kv.delete(key, first) is False
    assert await store.kv.get(key) is not None
    assert await store.kv.delete(key, second) is True
    assert await store.kv.get(key) is None
    assert await store.kv.delete(key, second) is False


async def test_only_the_first_create_wins_and_the_second_sees_it(store: Store, prefix: str) -> None:
    first = await store.kv.create(prefix + "a", b"1")
    second = await store.kv.create(prefix + "a", b"2")
    assert (first.won, second.won) == (True, False)
    assert first.current == second.current
    assert first.current is not None
    assert (first.current.value, first.current.create_revision) == (b"1", first.revision)


async def test_a_create_reads_another_key_by_the_same_transaction(store: Store, prefix: str) -> None:
    """1. the other key is not there: the listing is empty; nothing is missed by a watch that begins behind it
    2. it is there: it is read, also by a create that loses
    """
    kv, key, other = store.kv, prefix + "a", prefix + "other"
    none = await kv.create(key, b"1")
    assert none.also_read is None
    await kv.delete(key)
    won = await kv.create(key, b"1", also_read=other)
    assert won.won
    assert won.current is not None
    assert won.current.value == b"1"
    assert won.also_read is not None
    assert (won.also_read.items, won.also_read.revision) == ((), won.revision)
    assert won.also_read.cluster_id == (await kv.list(prefix)).cluster_id
    revision = await kv.put(other, b"2")
    batches = kv.watch_key(other, won.also_read.revision + 1)
    async with aclosing(batches):
        (event,) = await take(batches, 1)
    assert isinstance(event, PutEvent)
    assert event.item.mod_revision == revision
    lost = await kv.create(key, b"3", also_read=other)
    assert not lost.won
    assert lost.also_read is not None
    assert [(item.key, item.value, item.mod_revision) for item in lost.also_read.items] == [(other, b"2", revision)]
    assert lost.current == won.current


async def test_of_many_that_create_one_key_exactly_one_wins(store: Store, prefix: str) -> None:
    claims = await asyncio.gather(*(store.kv.create(prefix + "a", str(number).encode()) for number in range(16)))
    assert sum(claim.won for claim in claims) == 1


async def test_a_compare_and_put_wins_only_at_the_revision_it_names(store: Store, prefix: str) -> None:
    revision = await store.kv.put(prefix + "a", b"1")
    won = await store.kv.compare_and_put(prefix + "a", b"2", revision)
    lost = await store.kv.compare_and_put(prefix + "a", b"3", revision)
    assert (won.won, lost.won) == (True, False)
    assert won.current == lost.current
    assert won.current is not None
    assert (won.current.value, won.current.create_revision) == (b"2", revision)


async def test_a_compare_and_put_can_ask_that_a_key_still_has_its_lease(store: Store, prefix: str) -> None:
    """1. an owner's key has a lease: with that lease named the write wins, with another, or none, it loses
    2. the lease ends, and the key with it: no lease that is named wins, not even that of a key that is not there
    """
    kv, owner, key = store.kv, prefix + "owner", prefix + "a"
    lease_id = (await kv.grant(60.0)).lease_id
    await kv.put(owner, b"1", lease_id)
    revision = await kv.put(key, b"1")
    for wrong in (lease_id + 1, 0):
        lost = await kv.compare_and_put(key, b"2", revision, held=Held(owner, wrong))
        assert (lost.won, lost.current is not None and lost.current.value) == (False, b"1")
    won = await kv.compare_and_put(key, b"2", revision, held=Held(owner, lease_id))
    assert won.won
    stale = await kv.compare_and_put(key, b"3", revision, held=Held(owner, lease_id))
    assert not stale.won
    await kv.revoke(lease_id)
    for named in (lease_id, 0):
        assert not (await kv.compare_and_put(key, b"3", won.revision, held=Held(owner, named))).won
    found = await kv.get(key)
    assert found is not None
    assert found.value == b"2"


async def test_a_compare_and_put_on_a_key_that_is_gone_loses(store: Store, prefix: str) -> None:
    revision = await store.kv.put(prefix + "a", b"1")
    await store.kv.delete(prefix + "a")
    claim = await store.kv.compare_and_put(prefix + "a", b"2", revision)
    assert (claim.won, claim.current) == (False, None)


async def test_a_revoked_lease_takes_its_keys_with_it(store: Store, prefix: str) -> None:
    grant = await store.kv.grant(5.0)
    assert grant.ttl_s >= 5.0
    await store.kv.put(prefix + "a", b"", grant.lease_id)
    await store.kv.create(prefix + "b", b"", grant.lease_id)
    await store.kv.put(prefix + "c", b"")
    await store.kv.revoke(grant.lease_id)
    assert [item.key for item in (await store.kv.list(prefix)).items] == [prefix + "c"]


async def test_revoking_a_lease_that_is_gone_is_no_error(store: Store) -> None:
    grant = await store.kv.grant(5.0)
    await store.kv.revoke(grant.lease_id)
    await store.kv.revoke(grant.lease_id)


async def test_a_lease_that_is_not_renewed_ends_and_one_that_is_does_not(store: Store, prefix: str) -> None:
    kept, left = await store.kv.grant(1.0), await store.kv.grant(1.0)
    await store.kv.put(prefix + "kept", b"", kept.lease_id)
    await store.kv.put(prefix + "left", b"", left.lease_id)
    for _ in range(8):
        await store.pass_time(left.ttl_s / 4)
        assert await store.kv.keep_alive(kept.lease_id) == kept.ttl_s
    assert [item.key for item in (await store.kv.list(prefix)).items] == [prefix + "kept"]


async def test_what_a_lease_has_left_is_told_and_asking_renews_nothing(store: Store) -> None:
    grant = await store.kv.grant(5.0)
    fresh = await store.kv.lease_time(grant.lease_id)
    await store.pass_time(2.0)
    later = await store.kv.lease_time(grant.lease_id)
    assert fresh is not None
    assert later is not None
    assert fresh.ttl_s == later.ttl_s == grant.ttl_s
    assert later.left_s < fresh.left_s <= grant.ttl_s
    await store.kv.revoke(grant.lease_id)
    assert await store.kv.lease_time(grant.lease_id) is None
    assert await store.kv.lease_time(NO_LEASE) is None


async def test_a_lease_that_does_not_exist_is_named_so(store: Store, prefix: str) -> None:
    with pytest.raises(LeaseNotFoundError):
        await store.kv.keep_alive(NO_LEASE)
    with pytest.raises(LeaseNotFoundError):
        await store.kv.put(prefix + "a", b"", NO_LEASE)
    with pytest.raises(LeaseNotFoundError):
        await store.kv.create(prefix + "a", b"", NO_LEASE)
    assert await store.kv.get(prefix + "a") is None


async def test_renewals_of_many_leases_at_once_are_not_mixed_up(store: Store) -> None:
    grants = [await store.kv.grant(float(ttl_s)) for ttl_s in range(5, 25)]
    renewals = [store.kv.keep_alive(grant.lease_id) for grant in grants]
    answers = await asyncio.gather(*renewals, store.kv.keep_alive(NO_LEASE), return_exceptions=True)
    assert answers[:-1] == [grant.ttl_s for grant in grants]
    assert isinstance(answers[-1], LeaseNotFoundError)


async def test_a_put_without_the_lease_takes_the_key_off_it(store: Store, prefix: str) -> None:
    grant = await store.kv.grant(5.0)
    await store.kv.put(prefix + "a", b"1", grant.lease_id)
    await store.kv.put(prefix + "a", b"2")
    await store.kv.revoke(grant.lease_id)
    assert await store.kv.get(prefix + "a") is not None


async def test_a_list_holds_all_keys_of_the_prefix_in_order_and_no_others(store: Store, prefix: str) -> None:
    """More keys than fit on one page, and neighbours whose names begin almost the same."""
    names = [f"{prefix}{number:05d}" for number in range(1203)]
    await asyncio.gather(*(store.kv.put(name, name.encode()) for name in names))
    await store.kv.put(prefix.removesuffix("/") + "0", b"neighbour")
    await store.kv.put(prefix.removesuffix("/"), b"neighbour")
    listing = await store.kv.list(prefix)
    assert [item.key for item in listing.items] == names
    assert all(item.value == item.key.encode() for item in listing.items)
    assert listing.revision >= max(item.mod_revision for item in listing.items)
    assert listing.cluster_id != 0


async def test_a_list_of_keys_alone_has_everything_but_the_values(store: Store, prefix: str) -> None:
    grant = await store.kv.grant(5)
    await store.kv.put(prefix + "a", b"long", grant.lease_id)
    whole, bare = await store.kv.list(prefix), await store.kv.list(prefix, keys_only=True)
    assert [replace(item, value=b"") for item in whole.items] == list(bare.items)
    assert bare.items[0].lease_id == grant.lease_id


async def test_the_first_keys_come_without_values_and_with_the_number_of_all(store: Store, prefix: str) -> None:
    names = [f"{prefix}{number:03d}" for number in range(140)]
    await asyncio.gather(*(store.kv.put(name, b"long") for name in names))
    await store.kv.put(prefix.removesuffix("/") + "0", b"neighbour")
    whole = await store.kv.list(prefix, keys_only=True)
    few = await store.kv.first_keys(prefix, 7)
    assert (few.items, few.count) == (whole.items[:7], 140)
    assert (await store.kv.first_keys(prefix, 141)).items == whole.items
    none = await store.kv.first_keys(prefix + "x/", 7)
    assert (none.items, none.count) == ((), 0)


async def test_a_watch_stands_then_tells_puts_and_deletes_in_order(store: Store, prefix: str) -> None:
    start = (await store.kv.list(prefix)).revision + 1
    async with aclosing(await opened(store.kv, prefix, start)) as batches:
        first = await store.kv.put(prefix + "a", b"1")
        await store.kv.put(prefix.removesuffix("/") + "-neighbour", b"")
        await store.kv.put(prefix + "a", b"2")
        await store.kv.delete(prefix + "a")
        put, again, deleted = await take(batches, 3)
    assert isinstance(put, PutEvent)
    assert isinstance(again, PutEvent)
    assert (put.item.value, put.item.mod_revision) == (b"1", first)
    assert (again.item.value, again.item.create_revision) == (b"2", first)
    assert deleted == DeleteEvent(prefix + "a", again.item.mod_revision + 1)


async def test_a_watch_from_the_past_catches_up_and_goes_on(store: Store, prefix: str) -> None:
    start = (await store.kv.list(prefix)).revision + 1
    for number in range(50):
        await store.kv.put(f"{prefix}{number:02d}", b"")
    async with aclosing(await opened(store.kv, prefix, start)) as batches:
        await store.kv.put(prefix + "later", b"")
        events = await take(batches, 51)
    keys = [event.item.key for event in events if isinstance(event, PutEvent)]
    assert keys == [*(f"{prefix}{number:02d}" for number in range(50)), prefix + "later"]


async def test_a_batch_says_up_to_which_revision_everything_is_told(store: Store, prefix: str) -> None:
    start = (await store.kv.list(prefix)).revision + 1
    async with aclosing(await opened(store.kv, prefix, start)) as batches:
        revision = await store.kv.put(prefix + "a", b"")
        async with asyncio.timeout(5.0):
            batch = await anext(batches)
    assert batch.revision == revision


async def test_an_ended_lease_is_seen_as_deletes_of_one_revision(store: Store, prefix: str) -> None:
    grant = await store.kv.grant(1.0)
    start = await store.kv.put(prefix + "a", b"", grant.lease_id) + 2
    await store.kv.put(prefix + "b", b"", grant.lease_id)
    async with aclosing(await opened(store.kv, prefix, start)) as batches:
        await store.pass_time(grant.ttl_s + 0.1)
        events = await take(batches, 2)
    assert all(isinstance(event, DeleteEvent) for event in events)
    assert len({event.mod_revision for event in events if isinstance(event, DeleteEvent)}) == 1


async def test_a_watch_from_a_compacted_revision_says_so(store: Store, prefix: str) -> None:
    start = await store.kv.put(prefix + "a", b"1")
    for _ in range(3):
        await store.kv.put(prefix + "a", b"2")
    store.compact()
    with pytest.raises(CompactedError):
        async with aclosing(store.kv.watch(prefix, start)) as batches:
            await take(batches, 1)


async def test_a_watch_from_beyond_the_next_revision_says_that_the_store_went_back(store: Store, prefix: str) -> None:
    revision = (await store.kv.list(prefix)).revision
    with pytest.raises(CompactedError):
        async with aclosing(store.kv.watch(prefix, revision + 1000)) as batches:
            await take(batches, 1)


async def test_one_key_is_listed_and_watched_without_those_that_begin_like_it(store: Store, prefix: str) -> None:
    """1. nothing is there: the list is empty, and says at which revision
    2. the key and a longer one are written: the watch of the key has the one and not the other
    """
    key = prefix + "1"
    empty = await store.kv.list_key(key)
    assert empty.items == ()
    batches = store.kv.watch_key(key, empty.revision + 1)
    async with aclosing(batches), asyncio.timeout(5.0):
        assert tuple((await anext(batches)).events) == ()
        await store.kv.put(prefix + "10", b"longer")
        revision = await store.kv.put(key, b"1")
        await store.kv.delete(key)
        put, deleted = await take(batches, 2)
    assert isinstance(put, PutEvent)
    assert (put.item.key, put.item.value) == (key, b"1")
    assert deleted == DeleteEvent(key, revision + 1)
    await store.kv.put(key, b"2")
    listing = await store.kv.list_key(key)
    assert [(item.key, item.value) for item in listing.items] == [(key, b"2")]
    assert listing.revision == listing.items[0].mod_revision
    assert listing.cluster_id == (await store.kv.list(prefix)).cluster_id


async def test_the_watch_of_one_key_from_a_compacted_revision_says_so(store: Store, prefix: str) -> None:
    start = await store.kv.put(prefix + "a", b"1")
    for _ in range(3):
        await store.kv.put(prefix + "a", b"2")
    store.compact()
    with pytest.raises(CompactedError):
        async with aclosing(store.kv.watch_key(prefix + "a", start)) as batches:
            await take(batches, 1)


async def test_two_watches_do_not_disturb_each_other(store: Store, prefix: str) -> None:
    start = (await store.kv.list(prefix)).revision + 1
    one, other = await opened(store.kv, prefix + "1/", start), await opened(store.kv, prefix + "2/", start)
    await store.kv.put(prefix + "1/a", b"")
    assert len(await take(one, 1)) == 1
    await one.aclose()
    await store.kv.put(prefix + "2/a", b"")
    assert len(await take(other, 1)) == 1
    await other.aclose()


async def test_values_are_bytes_and_stay_what_they_are(store: Store, prefix: str) -> None:
    value = bytes(range(256)) * 400
    await store.kv.put(prefix + "a", value)
    found = await store.kv.get(prefix + "a")
    assert found is not None
    assert found.value == value


async def test_after_close_every_call_fails_and_closing_again_does_not(store: Store, prefix: str) -> None:
    start = (await store.kv.list(prefix)).revision + 1
    batches = await opened(store.kv, prefix, start)
    await store.kv.close()
    await store.kv.close()
    with pytest.raises(RegistryUnavailableError):
        await take(batches, 1)
    with pytest.raises(RegistryUnavailableError):
        await store.kv.get(prefix + "a")


async def test_a_summary_counts_and_names_the_youngest_write(store: Store, prefix: str) -> None:
    before = await store.kv.summary(prefix)
    assert (before.count, before.max_mod_revision) == (0, 0)
    for name in ("a", "b", "c"):
        await store.kv.put(prefix + name, b"1")
    youngest = await store.kv.put(prefix + "b", b"2")
    await store.kv.put(prefix[:-1] + "0", b"beside the prefix")
    found = await store.kv.summary(prefix)
    assert (found.count, found.max_mod_revision) == (3, youngest)
    await store.kv.delete(prefix + "b")
    found = await store.kv.summary(prefix)
    assert found.count == 2
    assert found.max_mod_revision < youngest


async def test_what_is_too_long_for_a_record_comes_cut_and_the_document_whole(store: Store, prefix: str) -> None:
    """By each way of reading, in a namespace; elsewhere nothing is cut."""
    namespace = f"/omni/v1/{prefix.strip('/').replace('/', '-')}"
    record, document, other = f"{namespace}/hubs/h", f"{namespace}/pipeline", f"{prefix}k"
    long = b"x" * 300_000
    for key in (record, document, other):
        revision = await store.kv.put(key, long)
        batches = await opened(store.kv, key, revision)
        (event,) = await take(batches, 1)
        assert isinstance(event, PutEvent)
        got = await store.kv.get(key)
        assert got is not None
        listed = [*(await store.kv.list(key)).items, *(await store.kv.list_key(key)).items]
        lengths = {len(item.value) for item in (event.item, got, *listed)}
        assert lengths == {MAX_VALUE_BYTES + 1 if key == record else len(long)}
        await batches.aclose()

"""Blocks of one region, counted by reference."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.mooncake.offers import OFFER_BYTES, Offer
from stage_runtime.connectors.store.registered import (
    STAMP_BYTES,
    BufferAllocator,
    ManagedBlockPool,
    ManagedBuffer,
    ManagedPool,
)

SIZE = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_blocks_never_overlap_and_all_of_them_come_back(steps: list[tuple[bool, int]]) -> None:
    """Taken and freed in any order: what is taken is apart, aligned and inside; freed, it is one stretch again."""
    allocator = BufferAllocator(1 << 17)
    taken: list[tuple[int, int]] = []
    for frees, number in steps:
        if frees and taken:
            allocator.free(*taken.pop(number % len(taken)))
            continue
        found = allocator.allocate(number)
        if found is None:
            continue
        assert found[0] % 4096 == 0
        assert number <= found[1]
        assert sum(found) <= 1 << 17
        assert all(sum(found) <= other[0] or sum(other) <= found[0] for other in taken)
        taken.append(found)
    assert allocator.free_bytes == (1 << 17) - sum(size for _, size in taken)
    for block in taken:
        allocator.free(*block)
    assert allocator.allocate(1 << 17) == (0, 1 << 17)


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(4096, 4096), (0, 8192), (8192, 8192), (4096, 8192), (12288, 4096), (1 << 17, 4096), (-4096, 4096), (0, 0)],
    ids=["twice", "and before", "and after", "and a part", "never taken", "outside", "below", "nothing"],
)
def test_what_is_free_can_not_be_freed_and_the_attempt_changes_nothing(offset: int, size_bytes: int) -> None:
    """Three blocks were taken; the one in the middle is free again."""
    allocator = BufferAllocator(1 << 17)
    first, middle, last = (allocator.allocate(4096) for _ in range(3))
    assert first
    assert middle
    assert last
    allocator.free(*middle)
    before = allocator.free_bytes
    with pytest.raises(ValueError, match="a part of them is free already"):
        allocator.free(offset, size_bytes)
    assert allocator.free_bytes == before
    allocator.free(*first)
    allocator.free(*last)
    assert allocator.allocate(1 << 17) == (0, 1 << 17)


def test_a_block_stays_until_its_last_holder_lets_go() -> None:
    """1. a buffer, a second handle of it and an array that lies in it; 2. each lets go in its own way"""
    pool = ManagedPool(SIZE)
    first = ManagedBuffer(pool, pool.allocate(1000), 1000)
    second = first.retain()
    pool.retain(first.block)
    array = pool.view(first.block, 1000)
    array[:] = 7
    for let_go in (first.release, first.release, second.release):
        let_go()
        assert pool.free_bytes < SIZE
    assert array.sum() == 7000
    del array
    gc.collect()
    assert pool.free_bytes == SIZE
    for refused in (first.retain, first.hand_on, lambda: first.tensor):
        with pytest.raises(ValueError, match="released"):
            refused()


def test_a_buffer_that_is_forgotten_goes_back_too() -> None:
    pool = ManagedPool(SIZE)
    with ManagedBuffer(pool, pool.allocate(10), 10) as buffer:
        buffer.tensor[:] = torch.arange(10)
        assert buffer.to_bytes() == bytes(range(10))
        assert buffer.as_tensor(torch.int16, (5, 1)).shape == (5, 1)
        with pytest.raises(ValueError, match="10 bytes are no"):
            buffer.as_tensor(torch.int32, (3,))
    ManagedBuffer(pool, pool.allocate(10), 10)
    gc.collect()
    assert pool.free_bytes == SIZE


def test_a_full_pool_says_what_to_do_and_a_device_that_is_not_there_too() -> None:
    pool = ManagedPool(SIZE)
    held = pool.allocate(SIZE - STAMP_BYTES)
    with pytest.raises(OSError, match="0 of 1048576 are free: raise memory_pool_size"):
        pool.allocate(1)
    pool.let_go(held)
    assert pool.allocate(1)
    with pytest.raises(ConfigError, match="memory_pool_size 10 on 'nothing' can't be had"):
        ManagedPool(10, "nothing")


def test_a_hand_off_that_somebody_reads_stays_after_it_was_dropped() -> None:
    pool = ManagedPool(SIZE)
    memory = ManagedBlockPool(lambda: pool)
    piece = memory.take_block(100)
    piece.fill([b"a" * 60, b"", b"b" * 40], 100, b"", b"")
    piece.pins += 1
    memory.give_back(piece)
    assert memory.free_bytes < SIZE
    assert bytes(piece.view(100)) == b"a" * 60 + b"b" * 40
    assert pool.has_stamp(piece.block, piece.block.stamp)
    piece.pins -= 1
    gc.collect()
    assert memory.free_bytes == SIZE
    assert memory.made == 1


@given(st.binary(min_size=OFFER_BYTES, max_size=OFFER_BYTES), st.integers(0, OFFER_BYTES - 1), st.integers(0, 255))
def test_an_offer_is_read_as_it_was_written_and_other_bytes_are_none(noise: bytes, place: int, value: int) -> None:
    offer = Offer("10.0.0.1:15000", 1 << 63, b"s" * STAMP_BYTES, True)
    packed = bytearray(offer.pack())
    assert Offer.parse(bytes(packed)) == offer
    assert Offer.parse(noise) is None
    packed[place] = value
    assert isinstance(Offer.parse(bytes(packed)), Offer | None)

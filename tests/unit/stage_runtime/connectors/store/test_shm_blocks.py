"""The pool of blocks in shared memory: what it keeps of them once they are free."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from stage_runtime.connectors.store.shm_blocks import KEPT_FROM_BYTES, ShmBlockPool


@pytest.mark.parametrize(("files", "kept"), [(1 << 20, 256), (1024, 64)])
def test_so_few_free_blocks_are_kept_that_files_are_left_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, kept: int
) -> None:
    """1. a burst of small hand-offs takes 300 blocks, far less than the bytes that may be kept free
    2. they are given back: few of them stay open, the more the more files may be open here
    """
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    pool = ShmBlockPool(tmp_path, 1 << 30)
    blocks = [pool.take_block(KEPT_FROM_BYTES) for _ in range(300)]
    for block in blocks:
        pool.give_back(block)
    assert len(list(tmp_path.iterdir())) == kept
    assert pool.free_bytes == kept * KEPT_FROM_BYTES
    again = pool.take_block(KEPT_FROM_BYTES)
    assert pool.made == 300
    pool.give_back(again)
    pool.trim()
    assert list(tmp_path.iterdir()) == []
    pool.give_back(pool.take_block(KEPT_FROM_BYTES))
    assert len(list(tmp_path.iterdir())) == 1
    pool.close()


def test_blocks_that_no_hand_off_has_used_for_a_while_are_released(tmp_path: Path) -> None:
    """1. a burst takes forty blocks of one size and some of another, then three at a time are enough
    2. at the second look, those that lay there all the time since the first go; the three stay
    """
    pool = ShmBlockPool(tmp_path, 1 << 30)
    burst = [pool.take_block(size) for size in [KEPT_FROM_BYTES] * 40 + [4 * KEPT_FROM_BYTES] * 5]
    for block in burst:
        pool.give_back(block)
    pool.shrink()
    assert len(list(tmp_path.iterdir())) == 45
    for _ in range(10):
        few = [pool.take_block(KEPT_FROM_BYTES) for _ in range(3)]
        for block in few:
            pool.give_back(block)
    pool.shrink()
    assert len(list(tmp_path.iterdir())) == 3
    assert (pool.free_bytes, pool.made) == (3 * KEPT_FROM_BYTES, 45)
    pool.shrink()
    assert list(tmp_path.iterdir()) == []
    assert pool.free_bytes == 0
    pool.give_back(pool.take_block(KEPT_FROM_BYTES))
    assert pool.made == 46
    pool.close()

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

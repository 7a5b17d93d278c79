"""What references to hand-offs take of a hub's memory, and which request has the most."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from hub.request.kept_references import KeptReferences, memory_of
from omni_discovery.wire import PayloadRef


def ref(metadata: dict[str, Any]) -> PayloadRef:
    return PayloadRef(from_stage=0, to_stage=1, key="r1_0123", connector="auto", size_bytes=1, metadata=metadata)


def test_a_connectors_own_metadata_are_small_and_a_small_hand_off_in_them_counts() -> None:
    tcp = {"source_host": "10.0.0.1", "source_port": 40123, "token": bytes(32), "size": 7, "generation": "g" * 32}
    assert memory_of([ref(tcp)]) < 2000
    small = {"inline": bytes(65_535), "size": 65_535, "consume": False}
    assert 65_535 < memory_of([ref(small)]) < 67_000
    assert memory_of([ref(tcp), ref(small)]) == memory_of([ref(tcp)]) + memory_of([ref(small)])
    assert memory_of([]) == 0


@pytest.mark.parametrize(
    "metadata",
    [
        {"pad": b"x" * 500_000},
        {"pad": "x" * 500_000 + "\N{GRINNING FACE}"},
        {"pad": [{} for _ in range(20_000)]},
        {"pad": {f"name-{number}": {"more": [number, 0.5, "text"]} for number in range(5000)}},
        {"pad": list(range(1000, 100_000))},
        {f"name-{number}" * 20: None for number in range(5000)},
    ],
    ids=["bytes", "wide text", "maps", "nested", "numbers", "names"],
)
def test_no_form_of_metadata_takes_much_more_than_is_counted(metadata: dict[str, Any]) -> None:
    packed = msgspec.msgpack.encode(ref(metadata))
    tracemalloc.start()
    try:
        decoded = msgspec.msgpack.decode(packed, type=PayloadRef)
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken_bytes * 0.8 < memory_of([decoded]) < taken_bytes * 2


def test_the_largest_is_found_and_what_has_ended_counts_no_more() -> None:
    """1. a and b have 40 of 100, then b has 70: too many, and b the most; 2. b ends; 3. a is replaced by less"""
    references = KeptReferences(most_bytes=100)
    references.note("a", 40)
    references.note("b", 40)
    assert not references.are_too_many
    references.note("b", 70)
    assert references.are_too_many
    assert references.largest == "b"
    references.forget("b")
    references.forget("b")
    assert (references.kept_bytes, references.largest) == (40, "a")
    references.note("a", 10)
    assert references.kept_bytes == 10

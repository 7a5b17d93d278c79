"""Maps, arrays and texts are counted as they are, whatever the bytes of texts and numbers look like."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.wire.containers import MAX_CONTAINERS, has_too_many_containers

#: Texts, byte strings and numbers whose bytes look like maps and arrays.
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.sampled_from("a\x80\x9fÜ的"), max_size=300)
    | st.binary(max_size=300).map(lambda data: b"\x80\x91\xdc\xdf" + data)
    | st.binary(min_size=1, max_size=20).map(lambda data: msgspec.msgpack.Ext(5, data))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.integers(0, 2**32), inner, max_size=20)
)


def count(value: Any, *, with_texts: bool) -> int:
    if isinstance(value, dict):
        return 1 + sum(count(each, with_texts=with_texts) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(count(each, with_texts=with_texts) for each in value)
    return int(with_texts and isinstance(value, str | bytes | msgspec.msgpack.Ext))


@given(VALUES)
def test_nothing_is_refused_that_has_as_few_and_nothing_let_through_that_has_more(value: Any) -> None:
    packed = msgspec.msgpack.encode(value)
    assert not has_too_many_containers(packed, count(value, with_texts=True))
    containers = count(value, with_texts=False)
    if containers:
        assert has_too_many_containers(packed, containers - 1)


@pytest.mark.parametrize(
    ("value", "size"),
    [(b"\x80", 1), (b"\x9f" + b"\x01" * 15, 16), (b"\xdc\x00\x01\xc0", 4), (b"\x81\xa1\x80\xcb" + b"\x90" * 8, 12)],
)
def test_the_bound_is_the_bound(value: bytes, size: int) -> None:
    assert len(value) == size
    texts = value.count(b"\xa1")
    fitting = (MAX_CONTAINERS - 1) // (1 + texts)
    for number, too_many in ((fitting, False), (MAX_CONTAINERS, True)):
        assert has_too_many_containers(b"\xdd" + number.to_bytes(4, "big") + value * number) is too_many


@pytest.mark.parametrize("cut", [b"\xdb\xff\xff\xff\xff", b"\xcb\x80", b"\xc1", b"\xd8", b"\xdd", b"\xc6\x00"])
def test_what_is_cut_off_or_no_msgpack_ends_the_count(cut: bytes) -> None:
    assert not has_too_many_containers(b"\x80" * 20 + cut, 21)
    assert has_too_many_containers(b"\x80" * 22 + cut, 21)


def test_texts_are_not_counted_where_there_are_no_more_maps_and_arrays_than_may_be() -> None:
    packed = msgspec.msgpack.encode(["a", "b"])
    assert not has_too_many_containers(packed, 1)
    assert has_too_many_containers(packed, 0)


@pytest.mark.attack("Q21")
def test_texts_whose_lengths_are_written_with_more_bytes_than_they_need_are_not_counted_one_by_one() -> None:
    assert has_too_many_containers(b"\xdd\x00\x04\x00\x00" + b"\xd9\x00\x80" * (1 << 18), 1 << 17)
    text = msgspec.msgpack.encode(["\x80" * 16] * (1 << 17))
    assert not has_too_many_containers(text, 1 << 18)

"""Hand-offs as bytes: exact, without pickle, and safe against any bytes at all."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stage_runtime.config import SerializationError
from stage_runtime.connectors.serialization import deserialize, serialize

#: Every type of plain numbers that this torch has.
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def any_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any bits at all; for bool of those that mean something."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def there_and_back(value: Any) -> Any:
    return deserialize(serialize(value))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = any_tensor(dtype, shape)
    assert same_bits(there_and_back({"x": tensor})["x"], tensor)


def test_nan_and_the_sign_of_zero_survive() -> None:
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])
    assert same_bits(there_and_back(tensor), tensor)


def test_a_tensor_that_does_not_lie_in_order_comes_back_in_order() -> None:
    whole = torch.arange(24).reshape(4, 6)
    for view in (whole.t(), whole[:, ::2], whole[1:3]):
        assert torch.equal(there_and_back(view), view)


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "<u8", "|b1", "<c16", "<U5", "|S3", "<M8[s]"])
def test_an_array_comes_back_bit_by_bit(dtype: str) -> None:
    array = np.zeros((2, 3), dtype=dtype)
    array[0, 1] = np.array("7", dtype="<U5").astype(dtype) if array.dtype.kind in "US" else 1
    back = there_and_back([array])[0]
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    assert back.shape == array.shape


def test_structure_bytes_numbers_and_pictures_come_back() -> None:
    picture = Image.new("RGB", (5, 4), (1, 2, 3))
    value = {
        "list": [1, 2.5, None, True, "ü"],
        "deep": {"b": b"\0\xff", "n": -(2**63)},
        "picture": picture,
        "empty": {},
    }
    back = there_and_back(value)
    assert back["picture"].tobytes() == picture.tobytes()
    assert {**back, "picture": None} == {**value, "picture": None}
    assert there_and_back(np.float32(1.5)) == 1.5
    assert there_and_back((1, 2)) == [1, 2]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA", "I;16"])
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (13, 7)], ids=str)
def test_a_picture_of_any_mode_comes_back_pixel_by_pixel(mode: str, size: tuple[int, int]) -> None:
    picture = Image.new(mode, size)
    if mode == "P":
        picture = Image.effect_noise((max(size[0], 1), max(size[1], 1)), 90).convert("RGB").convert("P", colors=9)
    back = there_and_back(picture)
    assert (back.mode, back.size, back.tobytes()) == (picture.mode, picture.size, picture.tobytes())
    assert back.getpalette() == picture.getpalette()


def test_what_was_read_may_be_written_to() -> None:
    back = there_and_back(torch.zeros(4))
    back += 1
    assert back.sum() == 4


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"f": print},
        2**70,
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        {"t": torch.zeros(2).to_sparse()},
        torch.zeros(4).view(torch.bits8),
    ],
)
def test_what_can_not_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(SerializationError):
        serialize(value)


def test_a_user_key_that_looks_like_ours_is_only_a_key() -> None:
    value = {"__tensor__": True, "dtype": "float32", "shape": [1], "index": 0}
    assert there_and_back(value) == value


GOOD = serialize({"t": torch.arange(6.0).reshape(2, 3), "a": np.ones(3), "i": Image.new("L", (4, 4)), "s": ["x"] * 3})


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_damaged_bytes_are_read_or_refused_and_nothing_else(flips: list[tuple[int, int]], keep: int) -> None:
    damaged = bytearray(GOOD)
    for position, value in flips:
        damaged[position] = value
    try:
        deserialize(bytes(damaged[:keep]))
    except SerializationError:
        return


PLACES = st.tuples(
    st.sampled_from(
        ["float32", "bool", "qint8", "bits8", "Tensor", "save", "<f4", "|O8", "<U9", "<M8[x]", "RGB", "P/RGB", ""]
    )
    | st.text(max_size=8),
    st.lists(st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, 2, 3, 2**31, 2**62]), max_size=40),
    st.integers(-5, 5),
)


@pytest.mark.attack("C20")
@settings(max_examples=500)
@given(
    st.integers(-128, 127) | st.sampled_from([1, 2, 3]),
    PLACES,
    st.lists(st.integers(-(2**40), 2**64 - 1) | st.integers(0, 64), max_size=4),
    st.integers(0, 300),
)
def test_whatever_a_hand_off_claims_to_hold_is_read_or_refused(
    code: int, place: tuple[Any, ...], lengths: list[int], behind: int
) -> None:
    """The structure is right, so that what is claimed of the tensors gets as far as it can."""
    ext = msgspec.msgpack.Ext(code, msgspec.msgpack.encode(list(place)))
    head = msgspec.msgpack.encode([lengths, {"x": ext}])
    try:
        deserialize(b"OMNIPAY1" + len(head).to_bytes(8, "little") + head + bytes(behind))
    except SerializationError:
        return


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_behind_our_first_ones_are_read_or_refused(data: bytes) -> None:
    for start in (b"", b"OMNIPAY1", b"OMNIPAY1" + len(data).to_bytes(8, "little")):
        try:
            deserialize(start + data)
        except SerializationError:
            continue


@pytest.mark.attack("C20")
def test_what_claims_to_be_huge_or_endlessly_deep_is_refused() -> None:
    deep = b"\x91" * 100_000
    for head in (deep, msgspec.msgpack.encode([[2**63], None]), msgspec.msgpack.encode([[0], deep])):
        with pytest.raises(SerializationError):
            deserialize(b"OMNIPAY1" + len(head).to_bytes(8, "little") + head[:-1])
    with pytest.raises(SerializationError):
        deserialize(b"OMNIPAY1" + (2**64 - 1).to_bytes(8, "little"))


@pytest.mark.attack("A31")
@pytest.mark.parametrize("code", [1, 2, 3])
def test_no_tensor_is_decoded_twice(code: int) -> None:
    """A hand-off of one large picture and its name a hundred thousand times would take as many copies of it."""
    dtype, shape = {1: ("float32", (16,)), 2: ("<f4", (16,)), 3: ("L", (8, 8))}[code]
    ext = msgspec.msgpack.Ext(code, msgspec.msgpack.encode([dtype, shape, 0]))

    def named(count: int) -> bytes:
        head = msgspec.msgpack.encode([[64], [ext] * count])
        start = b"OMNIPAY1" + len(head).to_bytes(8, "little") + head
        return start + bytes(-len(start) % 64) + bytes(64)

    assert len(deserialize(named(1))) == 1
    with pytest.raises(SerializationError, match="tensor 0 is named twice"):
        deserialize(named(2))


@pytest.mark.attack("A31")
@pytest.mark.parametrize("size", [(0, 15_000), (2**31 - 1, 0)])
def test_a_picture_without_pixels_takes_no_more_memory_than_it_has_bytes(size: tuple[int, int]) -> None:
    """A hand-off of 8 MB holds a hundred thousand of them: 120 kB of rows each were 12 GB."""
    for mode in ("L", "P/RGB"):
        head = msgspec.msgpack.encode([[0], msgspec.msgpack.Ext(3, msgspec.msgpack.encode([mode, size, 0]))])
        with pytest.raises(SerializationError, match="no image of"):
            deserialize(b"OMNIPAY1" + len(head).to_bytes(8, "little") + head + bytes(64))
    assert there_and_back(Image.new("L", (0, 5))).size == (0, 5)


def test_one_object_in_two_places_is_written_twice_and_comes_back() -> None:
    tensor = torch.arange(4)
    got = there_and_back([tensor, {"again": tensor}])
    assert torch.equal(got[0], tensor)
    assert torch.equal(got[1]["again"], tensor)


@pytest.mark.attack("A31")
@pytest.mark.parametrize("error", [SystemError, AttributeError, AssertionError, ZeroDivisionError, Warning])
def test_whatever_a_library_raises_over_a_strangers_bytes_is_an_error_of_the_bytes(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def break_down(*_: object) -> None:
        raise error("from deep inside")

    data = serialize(Image.new("L", (4, 4)))
    monkeypatch.setattr(Image, "frombytes", break_down)
    with pytest.raises(SerializationError, match="from deep inside"):
        deserialize(data)


@pytest.mark.attack("C20")
@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"OMNIPAY1", b"OMNIPAY1" + bytes(8), b"x" * 100])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SerializationError):
        deserialize(data)

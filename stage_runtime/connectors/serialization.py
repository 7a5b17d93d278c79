"""Hand-offs as bytes: msgpack for the structure, raw bytes for the tensors. Never pickle.

Layout: magic, length of the head, head, then each tensor's bytes at the next multiple of 64. The head is msgpack: the
lengths of the tensors, and the object with an extension in place of each tensor, with its dtype, shape and index.
Tuples and sets come back as lists. A tensor read from a writable buffer is a view of it, not a copy.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from stage_runtime.config import SerializationError
from stage_runtime.connectors.structure import MAX_PARTS, check_structure

_PREFIX: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"OMNIPAY1"
_ALIGN: Final = 64
_MAX_DIMS: Final = 32
#: Rows or columns of an image without pixels.
_MOST_EMPTY_PX: Final = 256
_TENSOR, _ARRAY, _IMAGE = 1, 2, 3
#: Numbers, times and text of a fixed length; no objects and no records.
_ARRAY_DTYPE: Final = re.compile(r"[<>|][biufcSUmM][0-9]{1,6}(\[[0-9]*[a-zA-Z]+\])?")
#: Dtypes of torch that are plain numbers; quantized tensors hold more than their bytes.
_TENSOR_DTYPE: Final = re.compile(r"bool|u?int[0-9]+|bfloat16|float[0-9]++[a-z0-9_]*+|complex[0-9]+")

Buffer = bytes | bytearray | memoryview


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which tensor it is and how to read its bytes. For an image, ``dtype`` is its mode."""

    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    index: int


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    lengths: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PARTS)]
    body: msgspec.Raw


_encode: Final = msgspec.msgpack.Encoder().encode
_Ext: Final = msgspec.msgpack.Ext
_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode
_decode_place: Final = msgspec.msgpack.Decoder(_Place).decode


def serialize(obj: Any) -> bytes:
    """An object as bytes: numbers, text, bytes, lists, mappings, numpy arrays, torch tensors and PIL images.

    Raise SerializationError if it holds anything else, or more of them than structure.py allows.
    """
    return b"".join(serialize_parts(obj))


def serialize_parts(obj: Any) -> list[Buffer]:
    """The bytes of ``serialize`` in parts, to be written one after the other; contiguous CPU tensors are not copied.

    The parts share the memory of the object's tensors, which must not change before the parts are written.
    """
    tensors: list[memoryview] = []

    def extend(value: Any) -> Any:
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        code, dtype, shape, raw = _take_apart(value)
        tensors.append(raw)
        return _Ext(code, _encode(_Place(dtype, shape, len(tensors) - 1)))

    try:
        body = msgspec.Raw(msgspec.msgpack.encode(obj, enc_hook=extend))
        head = _encode(_Head(tuple(map(len, tensors)), body))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SerializationError(f"can't be handed over: {error}") from error
    check_structure(head)
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, len(head)), head]
    end = _PREFIX.size + len(head)
    for raw in tensors:
        parts += (bytes(-end % _ALIGN), raw)
        end += -end % _ALIGN + len(raw)
    return parts


def deserialize(data: Buffer) -> Any:
    """The object that ``serialize`` wrote. Its tensors are on the CPU, in ``data`` itself if that is writable.

    Raise SerializationError for any other bytes.
    """
    view = memoryview(data).cast("B")
    head, start = _read_head(view)
    if view.readonly and head.lengths:
        view = memoryview(bytearray(view))
    tensors: list[memoryview | None] = []
    for length in head.lengths:
        start += -start % _ALIGN
        if length < 0 or start + length > len(view):
            raise SerializationError("a tensor reaches beyond the end")
        tensors.append(view[start : start + length])
        start += length

    def build(code: int, ext: memoryview) -> Any:
        place = _decode_place(ext)
        if not 0 <= place.index < len(tensors):
            raise SerializationError(f"there is no tensor {place.index}")
        # Each once, as ``serialize`` writes them: the work is bounded by the size, whatever the structure says.
        raw, tensors[place.index] = tensors[place.index], None
        if raw is None:
            raise SerializationError(f"tensor {place.index} is named twice")
        return _put_together(code, place, raw)

    try:
        return msgspec.msgpack.decode(head.body, ext_hook=build)
    except SerializationError:
        raise
    except Exception as error:
        # numpy, torch and PIL decode what a stranger may have written, and may raise anything, SystemError too.
        raise SerializationError(f"not a hand-off: {error}") from error


def _read_head(view: memoryview) -> tuple[_Head, int]:
    if len(view) < _PREFIX.size:
        raise SerializationError(f"{len(view)} bytes are no hand-off")
    magic, head_length = _PREFIX.unpack_from(view)
    end = _PREFIX.size + head_length
    if magic != _MAGIC or end > len(view):
        raise SerializationError("the bytes do not start like a hand-off, or are cut short")
    head = view[_PREFIX.size : end]
    check_structure(head)
    try:
        return _decode_head(head), end
    except (msgspec.DecodeError, RecursionError) as error:
        raise SerializationError(f"not a hand-off: {error}") from error


def _take_apart(value: Any) -> tuple[int, str, tuple[int, ...], memoryview]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        name, seen_as = _dtype_of(value.dtype)
        return _TENSOR, name, tuple(value.shape), _tensor_bytes(torch, value, seen_as)
    if isinstance(value, np.ndarray):
        if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
            raise SerializationError(f"arrays of {value.dtype} can't be handed over")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else np.empty(0, np.uint8)
        return _ARRAY, value.dtype.str, value.shape, raw.data
    if "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):
        return _take_image_apart(value)
    raise SerializationError(f"a {type(value).__name__} can't be handed over")


def _tensor_bytes(torch: Any, value: Any, seen_as: Any) -> memoryview:
    """A tensor's bytes, not copied if the tensor is contiguous and on the CPU."""
    try:
        # This raises for every tensor that needs the steps below; checking first would take longer for all others.
        return memoryview((value if seen_as is value.dtype else value.view(seen_as)).numpy()).cast("B")
    except (TypeError, ValueError, RuntimeError):
        if value.layout is not torch.strided:
            raise SerializationError(f"tensors of layout {value.layout} can't be handed over") from None
    flat = value.detach().to("cpu").contiguous().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:
        # torch counts a single element as contiguous whatever its stride is.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy())


#: What ``_dtype_of`` has said of dtypes, of which torch has some dozens.
_known_dtypes: Final[dict[Any, tuple[str, Any]]] = {}


def _dtype_of(dtype: Any) -> tuple[str, Any]:
    """The name of a tensor's dtype, and a dtype of the same size that numpy and memoryview know, or itself."""
    found = _known_dtypes.get(dtype)
    if found is None:
        found = _known_dtypes[dtype] = _look_at_dtype(dtype)
    return found


def _look_at_dtype(dtype: Any) -> tuple[str, Any]:
    name = str(dtype).removeprefix("torch.")
    if not _TENSOR_DTYPE.fullmatch(name):
        raise SerializationError(f"tensors of {name} can't be handed over")
    torch = sys.modules["torch"]
    try:
        memoryview(torch.empty(1, dtype=dtype).numpy()).cast("B")
    except (TypeError, ValueError, RuntimeError):
        # Complex dtypes are kept: a lazy conjugation is not in the bytes.
        return name, dtype if dtype.is_complex else {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, dtype)
    return name, dtype


def _take_image_apart(image: Any) -> tuple[int, str, tuple[int, ...], memoryview]:
    pixels = image.tobytes() if image.width and image.height else b""
    if image.mode not in ("P", "PA"):
        return _IMAGE, image.mode, image.size, memoryview(pixels)
    # The palette's colours follow the pixels; the palette's mode follows the image's.
    colours = image.palette.tobytes()
    return _IMAGE, f"{image.mode}/{image.palette.mode}", image.size, memoryview(pixels + colours)


def _image(place: _Place, raw: memoryview, count: int) -> Any:
    from PIL import Image

    mode, _, colours = place.dtype.partition("/")
    # Each row of an image takes memory, also of one without columns.
    if count > 8 * len(raw) or (not count and max(place.shape, default=0) > _MOST_EMPTY_PX):
        raise SerializationError(f"{len(raw)} bytes are no image of {place.shape}")
    if not colours:
        size = _pair(place.shape)
        return Image.frombytes(mode, size, bytes(raw)) if count else Image.new(mode, size)
    end = count * len(mode)
    image = Image.frombytes(mode, _pair(place.shape), bytes(raw[:end])) if count else Image.new(mode, (0, 0))
    image.putpalette(bytes(raw[end:]), colours)
    return image


def _put_together(code: int, place: _Place, raw: memoryview) -> Any:
    if len(place.shape) > _MAX_DIMS or min(place.shape, default=0) < 0:
        raise SerializationError(f"the shape {place.shape} is impossible")
    count = math.prod(place.shape)
    if code == _TENSOR:
        return _tensor(place, raw, count)
    if code == _ARRAY:
        dtype = np.dtype(place.dtype) if _ARRAY_DTYPE.fullmatch(place.dtype) else None
        if dtype is None or count * dtype.itemsize != len(raw):
            raise SerializationError(f"{len(raw)} bytes are no array of {place.dtype} and shape {place.shape}")
        return np.frombuffer(raw, dtype=dtype).reshape(place.shape) if count else np.empty(place.shape, dtype)
    if code == _IMAGE:
        return _image(place, raw, count)
    raise SerializationError(f"extension {code} is not known")


def _tensor(place: _Place, raw: memoryview, count: int) -> Any:
    torch, dtype = _torch_and_dtype(place.dtype)
    if count * dtype.itemsize != len(raw):
        raise SerializationError(f"{len(raw)} bytes are no tensor of {place.dtype} and shape {place.shape}")
    if not count:
        return torch.empty(place.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=dtype, count=count)
    return flat if len(place.shape) == 1 else flat.view(place.shape)


@lru_cache(maxsize=64)
def _torch_and_dtype(name: str) -> tuple[Any, Any]:
    try:
        import torch
    except ImportError as error:
        raise SerializationError("the hand-off holds a torch tensor and torch is not installed here") from error
    dtype = getattr(torch, name, None) if _TENSOR_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise SerializationError(f"torch has no tensors of {name}")
    return torch, dtype


def _pair(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise SerializationError(f"an image of shape {tuple(shape)}")
    return shape[0], shape[1]

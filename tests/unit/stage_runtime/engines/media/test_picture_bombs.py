"""Small files that claim, or unpack to, large pictures: refused from their heads, or read within bounds."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.items import PICTURES, take_items
from tests.support.fuzz import resident_bytes

#: Much less than what the files claim.
_MEMORY_BYTES = 200 << 20
_LONG_S = 30.0


def png(width: int, height: int, *chunks: tuple[bytes, bytes], data: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def zeros(size_bytes: int) -> bytes:
    """So many zeros, packed a thousandfold."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size_bytes >> 20)) + packer.flush()


def large_gif() -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6) + frame + b"\x3b"


def long_gif() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("L", (16, 16), number % 256) for number in range(1000)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def jpeg(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (16, 16)).save(buffer, "JPEG")
    file = buffer.getvalue()
    at = file.index(b"\xff\xc0") + 5
    return file[:at] + struct.pack(">HH", height, width) + file[at + 4 :]


BOMBS: dict[str, Callable[[], bytes]] = {
    "a PNG that claims 2^62 pixels": lambda: png((1 << 31) - 1, (1 << 31) - 1),
    "a PNG of 10^10 pixels that packs some": lambda: png(100_000, 100_000, data=zeros(16 << 20)),
    "a PNG of few pixels with much behind them": lambda: png(16, 16, data=zeros(256 << 20)),
    "a PNG whose comment unpacks to much": lambda: png(16, 16, (b"zTXt", b"Comment\0\0" + zeros(256 << 20))),
    "a PNG whose profile unpacks to much": lambda: png(16, 16, (b"iCCP", b"x\0\0" + zeros(256 << 20))),
    "a PNG without a size": lambda: png(0, 0),
    "a GIF of 65535 x 65535": large_gif,
    "a GIF of a thousand frames": long_gif,
    "a JPEG of 65535 x 65535": lambda: jpeg(65_535, 65_535),
    "a program in PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%sleep 99) (w) file\n",
    "a drawing that names itself": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><!ENTITY a "&a;&a;"></svg>',
    "nothing": lambda: b"",
}
READ = {"a PNG of few pixels with much behind them", "a GIF of a thousand frames"}


@pytest.mark.attack("C14")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_read_as_the_small_picture_that_it_is(name: str) -> None:
    file = BOMBS[name]()
    begun_s, before = time.monotonic(), resident_bytes()
    try:
        _, items = take_items({"prompt": "what is this", "images": [file]}, PICTURES)
    except InvalidRequestError:
        assert name not in READ
    else:
        assert items is not None
        assert [each.size for each in items["image"]] == [(16, 16)]
    assert time.monotonic() - begun_s < _LONG_S
    assert resident_bytes() - before < _MEMORY_BYTES

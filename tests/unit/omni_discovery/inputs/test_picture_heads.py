"""What a picture's file holds before its pixels: heads as they are pass, those that take long to be read do not."""

from __future__ import annotations

import io
import struct
import time
import zlib
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.picture_heads import MAX_BLOCKS, MAX_FILLING, MAX_PIECES, MAX_TABLES, check_head


def saved(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, kind, **options)
    return file.getvalue()


def with_pieces(*pieces: tuple[int, bytes]) -> bytes:
    """A JPEG with these between its begin and the rest of its head."""
    file = saved("JPEG")
    head = b"".join(struct.pack(">BBH", 0xFF, mark, len(data) + 2) + data for mark, data in pieces)
    return file[:2] + head + file[2:]


def with_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    file = saved("PNG")
    made = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return file[:33] + b"".join(made) + file[33:]


def with_blocks(count: int) -> bytes:
    file = saved("GIF")
    at = 13 + (3 << ((file[10] & 7) + 1) if file[10] & 0x80 else 0)
    return file[:at] + b"!\xfe" + b"\x01a" * count + b"\0" + file[at:]


EXIF = Image.Exif()
EXIF[0x010E] = "a word" * 1000
TEXTS = PngImagePlugin.PngInfo()
TEXTS.add_text("prompt", "a word" * 1000, zip=True)


@pytest.mark.parametrize(
    "file",
    [
        *(saved(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")),
        saved("JPEG", exif=EXIF, icc_profile=bytes(200_000), comment=b"a word", progressive=True),
        saved("PNG", pnginfo=TEXTS, exif=EXIF, icc_profile=bytes(10_000)),
        with_pieces(*[(0xE1, b"http://ns.adobe.com/xmp/extension/" + bytes(60_000))] * 100),
        with_pieces(*[(0xE0, b"")] * (MAX_PIECES - 20)),
        with_chunks(*[(b"tEXt", b"k\0text")] * 200),
        with_blocks(MAX_BLOCKS - 100),
        b"",
        b"\xff",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"no picture",
    ],
)
def test_heads_as_cameras_and_programs_write_them_pass(file: bytes) -> None:
    check_head(file)


@pytest.mark.attack("Y4")
@pytest.mark.parametrize(
    ("file", "said"),
    [
        (with_pieces(*[(0xE1, b"Exif\0\0" + bytes(54))] * 20_000), f"more than {MAX_PIECES} pieces"),
        (with_pieces(*[(0xFE, b"")] * 200_000), f"more than {MAX_PIECES} pieces"),
        (with_pieces(*[(0xDB, b"\0" + bytes(64))] * 100), f"more than {MAX_TABLES} tables"),
        (b"\xff\xd8" + b"\xff" * 6_000_000 + saved("JPEG")[2:], f"more than {MAX_FILLING} bytes"),
        (saved("JPEG")[:2] + b"\xff\xe0\0\2" + bytes(6_000_000), f"more than {MAX_FILLING} bytes"),
        (b"\xff\xd8\xff" + b"\xd0\xff" * 300_000 + b"\xda", f"more than {MAX_PIECES} pieces"),
        (with_chunks(*[(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20)))] * 60), "packed texts"),
        (with_chunks(*[(b"tEXt", b"k\0text")] * 1000), f"more than {MAX_PIECES} pieces"),
        (with_blocks(100_000), f"more than {MAX_BLOCKS} blocks"),
        (
            saved("JPEG", progressive=True)[:-2] + (b"\xff\xda\0\x08\1\1\0\0\x3f\0" + bytes(9)) * 100,
            "32 scans of its pixels",
        ),
        (b"GIF89a" + bytes(7) + bytes(1_000_000), f"more than {MAX_BLOCKS} blocks"),
    ],
)
def test_a_head_of_thousands_of_pieces_is_refused_before_it_is_opened(file: bytes, said: str) -> None:
    began_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match=said):
        check_head(file)
    assert time.thread_time() - began_s < 0.5


@pytest.mark.attack("Y4")
def test_what_passes_is_opened_soon() -> None:
    """As many bytes as a body may bring, in as few pieces as pass."""
    for file in (
        with_pieces(*[(0xE1, b"Exif\0\0" + bytes(30_000))] * (MAX_PIECES - 20)),
        with_chunks(*[(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20)))] * 4),
        with_blocks(MAX_BLOCKS - 100),
    ):
        check_head(file)
        began_s = time.thread_time()
        Image.open(io.BytesIO(file))
        assert time.thread_time() - began_s < 3

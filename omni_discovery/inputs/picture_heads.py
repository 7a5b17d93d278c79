"""What a picture's file holds beside its pixels, looked through before a library opens it.

Pillow reads the pieces of a JPEG's head one by one, joins those of its EXIF data anew with each, and unpacks all texts
of a PNG; a progressive JPEG is unpacked as often as it says. A file of some MB may hold so much of that that to open it
takes minutes, whatever the picture's size is.
"""

from __future__ import annotations

from typing import Final

from omni_discovery.errors import InvalidRequestError

#: Pieces of a head: a camera's JPEG has some dozens, with maps of depth some hundreds.
MAX_PIECES: Final = 256
#: Bytes between the pieces of a JPEG's head, and blocks of a GIF's, which readers go through one by one.
MAX_FILLING: Final = 1024
MAX_BLOCKS: Final = 4096
#: Pieces that are unpacked, each to a MiB at most; and tables, which are read number by number.
MAX_UNPACKED: Final = 4
MAX_TABLES: Final = 16

#: Times that a progressive JPEG goes through its pixels, some 50 ms each for the largest: programs make ten.
MAX_SCANS: Final = 32

_JPEG: Final = b"\xff\xd8\xff"
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_GIF: Final = b"GIF8"
#: Behind this mark are the pixels of a JPEG, behind these there is no length, and behind these are tables.
_SCAN: Final = 0xDA
_BARE: Final = frozenset({0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_TABLES: Final = frozenset({0xC4, 0xDB})
_END: Final = frozenset({b"IDAT", b"IEND"})
_PACKED: Final = frozenset({b"zTXt", b"iTXt", b"iCCP"})


def check_head(file: bytes) -> None:
    """Raise InvalidRequestError if to open the picture in a file would take long. What is no picture passes."""
    if file.startswith(_JPEG):
        _check_jpeg(file)
        # Among pixels, that can't be but where a scan begins.
        _count("scans of its pixels", file.count(b"\xff\xda"), MAX_SCANS)
    elif file.startswith(_PNG):
        _check_png(file)
    elif file.startswith(_GIF):
        _check_gif(file)


def _check_jpeg(file: bytes) -> None:
    at, pieces, tables, filling = 0, 0, 0, 0
    while at + 1 < len(file):
        mark = file[at + 1]
        if file[at] != 0xFF or mark in {0x00, 0xFF}:
            at += 1
            filling += 1
            _count("bytes between the pieces of its head", filling, MAX_FILLING)
            continue
        if mark == _SCAN:
            return
        pieces += 1
        _count("pieces in its head", pieces, MAX_PIECES)
        tables += mark in _TABLES
        _count("tables in its head", tables, MAX_TABLES)
        at += 2 if mark in _BARE else 2 + max(2, int.from_bytes(file[at + 2 : at + 4], "big"))


def _check_png(file: bytes) -> None:
    at, pieces, packed = len(_PNG), 0, 0
    while at < len(file) and (kind := file[at + 4 : at + 8]) not in _END:
        pieces += 1
        _count("pieces in its head", pieces, MAX_PIECES)
        packed += kind in _PACKED
        _count("packed texts and profiles", packed, MAX_UNPACKED)
        at += 12 + int.from_bytes(file[at : at + 4], "big")


def _check_gif(file: bytes) -> None:
    flags = file[10] if len(file) > 10 else 0
    at, blocks = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0), 0
    while at < len(file) and file[at] not in b",;":
        # An extension is a row of blocks, of which the last is empty; what is none is passed over.
        size = 1 if file[at] == ord("!") else 0
        at += 1 + size
        while at < len(file) and size:
            size = file[at]
            at += 1 + size
            blocks += 1
            _count("blocks in its head", blocks, MAX_BLOCKS)
        blocks += 1
        _count("blocks in its head", blocks, MAX_BLOCKS)


def _count(what: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequestError(
            f"a picture has more than {most} {what}: save it anew, without what is beside the picture"
        )

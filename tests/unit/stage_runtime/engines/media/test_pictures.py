"""Pictures that come with a request: which files are opened, and what their decoders may raise."""

from __future__ import annotations

import io
import random
import struct

import pytest
from PIL import Image, ImageFile

from omni_discovery.data_urls import PICTURE_FORMATS
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.items import PICTURES, take_items


def file_of(kind: str) -> bytes:
    made, buffer = Image.new("RGB", (24, 16), "red"), io.BytesIO()
    made.save(buffer, kind)
    return buffer.getvalue()


def take(file: bytes) -> None:
    take_items({"prompt": "x", "images": [file]}, PICTURES)


@pytest.mark.parametrize("kind", PICTURE_FORMATS)
def test_the_formats_that_are_meant_are_opened(kind: str) -> None:
    take(file_of(kind))


@pytest.mark.attack("A14")
@pytest.mark.parametrize("kind", ["BMP", "TIFF", "DDS", "ICO", "TGA", "PPM", "SPIDER", "PCX", "EPS", "ICNS", "SGI"])
def test_no_other_format_is_opened(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="it is no PNG or JPEG or WEBP or GIF"):
        take(file_of(kind))


@pytest.mark.attack("A14")
@pytest.mark.parametrize(
    "raised",
    [NotImplementedError("no such codec"), RuntimeError(), AttributeError("x"), OverflowError(), SystemError()],
)
def test_whatever_a_decoder_raises_is_the_clients_mistake(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    def fail(_self: object) -> None:
        raise raised

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(InvalidRequestError, match=str(raised) or type(raised).__name__):
        take(file_of("JPEG"))


@pytest.mark.attack("A14", "C14")
@pytest.mark.filterwarnings("ignore")
def test_malformed_files_are_read_or_the_clients_mistake() -> None:
    """Two thousand files with some bytes changed, cut or doubled; no other exception comes out."""
    chance, refused = random.Random(14), 0
    files = [file_of(kind) for kind in PICTURE_FORMATS]
    for _ in range(2000):
        file = bytearray(chance.choice(files))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(file))
            match chance.randrange(4):
                case 0:
                    file[at] = chance.randrange(256)
                case 1:
                    del file[at:]
                    file += b"\0"
                case 2:
                    file[at : at + 4] = struct.pack(">I", chance.choice((0, 1, 2**31, 2**32 - 1)))
                case _:
                    file[at:at] = file[at : at + 40]
        try:
            take(bytes(file))
        except InvalidRequestError:
            refused += 1
    assert 200 < refused < 2000

"""A form with files (multipart/form-data) whose whole body is there, read within bounds. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from omni_discovery.errors import InvalidRequestError

#: Parts of one form, and the bytes of one that is no file.
MAX_PARTS: Final = 128
MAX_TEXT_BYTES: Final = 1 << 20
_LONGEST_BOUNDARY: Final = 70
#: Signs that may begin an option in one header, such as ``name``: to take a header apart costs the parser the length of
#: the rest of it for each, some 6 ms for a header that is full of them.
_MOST_OPTIONS: Final = 64
#: In the place of the parser's own, which would have a line for each malformed form.
_silent: Final = logging.getLogger(f"{__name__}.parser")
_silent.setLevel(logging.CRITICAL + 1)


@dataclass(slots=True)
class Part:
    """One part of a form. ``is_file``: it has a file name, which is not kept."""

    name: str
    is_file: bool
    content: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """The content of a part that is no file. Raise InvalidRequestError."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"'{self.name}' is no UTF-8") from error


class _Reader:
    """What the parser calls. Raises InvalidRequestError for what is too much."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_whole = False
        self._name, self._value = bytearray(), bytearray()
        self._disposition = b""

    def begin_part(self) -> None:
        self._disposition = b""

    def add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def end_headers(self) -> None:
        if self._disposition.count(b";") > _MOST_OPTIONS:
            raise InvalidRequestError("the form can't be read: the header of a part has too many options")
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise InvalidRequestError("the form can't be read: a part of it has no name")
        self.parts.append(Part(name, b"filename" in options))

    def add_content(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.content += data[start:end]
        if not part.is_file and len(part.content) > MAX_TEXT_BYTES:
            raise InvalidRequestError(f"'{part.name}' is longer than {MAX_TEXT_BYTES} bytes; is it a file?")

    def end(self) -> None:
        self.is_whole = True


def read_form(content_type: str, body: bytes) -> list[Part]:
    """The parts of a form in order. Raise InvalidRequestError, also for a form that is cut short."""
    has_options = content_type.count(";") <= _MOST_OPTIONS
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"") if has_options else b""
    if not 1 <= len(boundary) <= _LONGEST_BOUNDARY:
        raise InvalidRequestError("the form has no usable boundary in its Content-Type: let the client set it")
    # Parts begin there and nowhere else; in a form that is full of them, the parser would look at each for long.
    if body.count(b"--" + boundary) > MAX_PARTS + 1:
        raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
    reader = _Reader()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": reader.begin_part,
            "on_header_field": reader.add_name,
            "on_header_value": reader.add_value,
            "on_header_end": reader.end_header,
            "on_headers_finished": reader.end_headers,
            "on_part_data": reader.add_content,
            "on_end": reader.end,
        },
    )
    parser.logger = _silent
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"the form can't be read: {error}") from error
    if not reader.is_whole:
        raise InvalidRequestError("the form can't be read: it is empty, or ends too early")
    return reader.parts

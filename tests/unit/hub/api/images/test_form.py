"""Forms with files: what they hold, and what is too much or broken, which is refused by name."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.api.images.form import MAX_PARTS, MAX_TEXT_BYTES, Part, read_form
from omni_discovery.errors import InvalidRequestError

TYPE = "multipart/form-data; boundary=edge"


def part(name: str, content: bytes, more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\n'
    return b"--edge\r\n" + head.encode() + b"Content-Type: image/png\r\n\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--edge--\r\n"


def shown(parts: list[Part]) -> list[tuple[str, bool, bytes]]:
    return [(each.name, each.is_file, bytes(each.content)) for each in parts]


def test_parts_come_in_order_and_a_file_name_makes_a_file() -> None:
    body = form(part("prompt", "é".encode()), part("image", b"\x89PNG\r\n--edg", '; filename="a.png"'), part("x", b""))
    parts = read_form(TYPE, body)
    assert shown(parts) == [("prompt", False, b"\xc3\xa9"), ("image", True, b"\x89PNG\r\n--edg"), ("x", False, b"")]
    assert parts[0].text == "é"


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_content_comes_out_as_it_went_in(contents: list[bytes]) -> None:
    whole = [each for each in contents if b"\r\n--edge" not in each and not each.startswith(b"--edge")]
    parts = read_form(TYPE, form(*(part("image", each, '; filename="a"') for each in whole)))
    assert [bytes(each.content) for each in parts] == whole


@pytest.mark.attack("C16")
@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("multipart/form-data", form(part("a", b"b")), "no usable boundary"),
        (f"multipart/form-data; boundary={'x' * 71}", b"", "no usable boundary"),
        (TYPE, b"", "can't be read"),
        (TYPE, b"no form", "can't be read"),
        (TYPE, part("image", b"cut short"), "can't be read"),
        (TYPE, form(b"--edge\r\n\r\nno header\r\n"), "a part of it has no name"),
        (TYPE, form(b"--edge\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n"), "a part of it has no name"),
        (TYPE, form(b"--edge\r\n" + b"A: b\r\n" * 1000 + b"\r\nx\r\n"), "can't be read"),
        (TYPE, form(b"--edge\r\n" + b"A" * 100_000 + b": b\r\n\r\nx\r\n"), "can't be read"),
        (TYPE, form(*[part("a", b"b")] * (MAX_PARTS + 1)), f"more than {MAX_PARTS} parts"),
        (TYPE, form(part("prompt", b"x" * (MAX_TEXT_BYTES + 1))), "'prompt' is longer than"),
        (TYPE, form(part("image", b"\r\n--edgeX" * 200_000, '; filename="a"')), f"more than {MAX_PARTS} parts"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_a_form_that_is_broken_or_too_much_is_refused_and_leaves_no_line(
    kind: str, body: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(InvalidRequestError, match=said):
        read_form(kind, body)
    assert caplog.records == []


def test_a_text_that_is_no_utf8_is_named() -> None:
    (broken,) = read_form(TYPE, form(part("prompt", b"\xff\xfe")))
    with pytest.raises(InvalidRequestError, match="'prompt' is no UTF-8"):
        _ = broken.text


@pytest.mark.parametrize("sign", [";", ";a", ";a=b", ';"', ';a="\\"'])
@pytest.mark.attack("S1")
def test_a_header_full_of_options_is_refused_before_it_is_taken_apart(sign: str) -> None:
    """The parser goes through the rest of the header for each: 127 such parts took it 0.8 s, and the loop with it."""
    full = part("image", b"x", '; filename="a"' + sign * (3900 // len(sign)))
    began_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match="the header of a part has too many options"):
        read_form(TYPE, form(*[full] * (MAX_PARTS - 1)))
    with pytest.raises(InvalidRequestError, match="no usable boundary"):
        read_form(TYPE + sign * 3000, form(full))
    assert time.thread_time() - began_s < 0.1


def test_names_of_files_may_have_signs_of_options() -> None:
    name = "a;" * 30
    parts = read_form(TYPE, form(part("image", b"x", f'; filename="{name}"')))
    assert shown(parts) == [("image", True, b"x")]

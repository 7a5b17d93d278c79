"""Texts of others on one line of a terminal or a log."""

from __future__ import annotations

import json

import pytest

from omni_discovery.text import harmless, harmless_json, is_shown, one_line


def test_a_text_of_several_lines_is_one_and_holds_nothing_that_a_terminal_obeys() -> None:
    assert one_line("it broke:\r\n\t at  line 3\n") == "it broke: at line 3"
    shown = one_line("a\x1b]0;title\x07b\x9b2Jc\u202ed")
    assert shown == "a_]0;title_b_2Jc_d"
    assert shown.isprintable()
    assert one_line("Größe 数量") == "Größe 数量"


#: C0, DEL, C1, what turns the direction of writing, and what has no width.
OBEYED = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F))]
OBEYED += [chr(code) for code in (*range(0x2066, 0x206A), 0x200B, 0x200D, 0x2028, 0x2029, 0xFEFF, 0xE0001, 0xD800)]


@pytest.mark.parametrize("char", OBEYED, ids=lambda char: f"U+{ord(char):04X}")
def test_what_a_terminal_might_obey_is_an_underscore_in_text_and_escaped_in_json(char: str) -> None:
    assert harmless(f"a{char}b\n\tc") == "a_b\n\tc"
    assert char not in one_line(f"a{char}b")
    escaped = harmless_json(f'"a{char}b"')
    assert escaped.isprintable()
    assert json.loads(escaped, strict=False) == f"a{char}b"


#: What is printable by Python's word and yet has no width, or is blank.
UNSEEN = [chr(code) for code in (0x34F, 0x115F, 0x1160, 0x17B4, 0x180B, 0x2800, 0x3164, 0xFE0F, 0xFFA0, 0xE0100)]


@pytest.mark.attack("D4")
@pytest.mark.parametrize("char", UNSEEN, ids=lambda char: f"U+{ord(char):04X}")
def test_what_no_terminal_shows_is_an_underscore_in_text_and_escaped_in_json(char: str) -> None:
    assert char.isprintable()
    assert not is_shown(f"a{char}b")
    assert harmless(f"a{char}b\n") == "a_b\n"
    assert one_line(f"a{char}b") == "a_b"
    escaped = harmless_json(f'"a{char}b"')
    assert escaped.isascii()
    assert json.loads(escaped) == f"a{char}b"


@pytest.mark.attack("D4")
def test_marks_need_a_character_and_are_at_most_two() -> None:
    mark = "\u0301"
    assert one_line(f"e{mark}{mark}" + mark * 50) == f"e{mark}{mark}" + "_" * 50
    assert one_line(f"{mark}a {mark}b\n{mark}c.{mark}") == "_a _b _c._"
    assert harmless_json(f'"{mark}a"') == '"\\u0301a"'
    assert one_line(f"\u2800{mark}") == "__"


def test_other_text_stays_as_it_is() -> None:
    text = "ä 漢字 😀 e\u0301 \u05e9\u05dc\u05d5\u05dd ไม่ नमस्ते 1\u20e3"
    assert harmless(text) == harmless_json(text) == one_line(text) == text
    assert is_shown(text)

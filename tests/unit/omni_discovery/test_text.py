"""Texts of others on one line of a terminal or a log."""

from __future__ import annotations

from omni_discovery.text import one_line


def test_a_text_of_several_lines_is_one_and_holds_nothing_that_a_terminal_obeys() -> None:
    assert one_line("it broke:\r\n\t at  line 3\n") == "it broke: at line 3"
    shown = one_line("a\x1b]0;title\x07b\x9b2Jc\u202ed")
    assert shown == "a_]0;title_b_2Jc_d"
    assert shown.isprintable()
    assert one_line("Größe 数量") == "Größe 数量"

"""Calls of functions in what is echoed."""

from __future__ import annotations

from stage_runtime.engines.echo.speech import called_in


def test_calls_are_found_and_the_words_beside_them() -> None:
    called = called_in('please CALL add {"a": 1} and CALL sing {}')
    assert called is not None
    assert [(each.name, each.arguments) for each in called.calls] == [("add", '{"a": 1}'), ("sing", "{}")]
    assert called.content == "please  and"
    assert called_in("CALL me") is None

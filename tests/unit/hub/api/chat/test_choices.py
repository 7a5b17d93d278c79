"""Which choice an output belongs to, and when a choice has ended."""

from __future__ import annotations

from hub.api.chat.choices import Choices
from hub.request.outputs import OmniOutput


def output(stage_id: int, modality: str, *, ends: str | None = None) -> OmniOutput:
    return OmniOutput("r", stage_id, modality, text="" if ends else "x", finish_reason=ends)


def test_words_end_with_their_sound_and_alone_where_none_is_wanted() -> None:
    for modalities, by_text in ((("text", "audio"), False), (("text",), True)):
        choices = Choices(modalities)
        choice = choices.find(0, output(0, "text"))
        assert choice is not None
        assert choices.note_end(choice, output(0, "text", ends="length")) is by_text
        if not by_text:
            assert choices.find(0, output(1, "audio")) is choice
            assert choices.note_end(choice, output(1, "audio", ends="stop")) is True
        assert (choice.is_over, choice.finish_reason) == (True, "length")
        assert choices.end_all(0) == []


def test_a_second_stage_of_one_modality_is_a_choice_of_its_own() -> None:
    choices = Choices(("text", "audio"))
    indexes = [
        found.index
        for each in ((0, "text"), (3, "text"), (1, "audio"), (2, "audio"), (3, "text"))
        if (found := choices.find(0, output(*each)))
    ]
    assert indexes == [0, 1, 0, 2, 1]


def test_a_stage_that_ends_without_a_picture_is_no_choice_and_an_empty_text_is_one() -> None:
    choices = Choices(("text",))
    assert choices.find(0, output(1, "image", ends="stop")) is None
    assert choices.find(0, output(0, "text", ends="stop")) is not None


def test_a_request_that_ends_ends_its_own_choices_only() -> None:
    choices = Choices(("text", "audio"), answers=2)
    first, second = (choices.find(number, output(0, "text")) for number in (0, 1))
    assert first is not None
    assert second is not None
    assert choices.end_all(1) == [second]
    assert (first.is_over, second.is_over) == (False, True)

"""Token counts: a prompt counts once, whatever stages and answers read it."""

from __future__ import annotations

from hub.api.generation.usage import Usage
from hub.request.outputs import OmniOutput


def ended(stage_id: int, prompt: int, made: int, modality: str = "text") -> OmniOutput:
    counts = {"prompt_tokens": prompt, "completion_tokens": made}
    return OmniOutput("r", stage_id, modality, finish_reason="stop", usage=counts)


def test_the_prompt_of_the_first_stage_is_the_clients() -> None:
    """The stage that draws calls the answer of the stage before its prompt, and may end first."""
    usage = Usage([3, 1])
    usage.add(0, ended(1, 20, 1, "image"))
    assert usage.prompt_tokens == 20
    usage.add(0, ended(3, 5, 20))
    assert usage.shown() == {"prompt_tokens": 5, "completion_tokens": 21, "total_tokens": 26}


def test_several_answers_to_one_prompt_count_it_once_and_several_prompts_each() -> None:
    usage = Usage([0], answers=2)
    for number, prompt in enumerate((5, 5, 7, 7)):
        usage.add(number, ended(0, prompt, 3))
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 12)


def test_tokens_are_counted_as_they_come_and_the_stages_own_count_wins() -> None:
    usage = Usage([0])
    usage.add(0, OmniOutput("r", 0, "text", token_ids=(1, 2)))
    assert usage.completion_tokens == 2
    usage.add(0, ended(0, 4, 3))
    assert usage.shown_as_input() == {"input_tokens": 4, "output_tokens": 3, "total_tokens": 7}


def test_the_tokens_of_sound_are_told_apart() -> None:
    usage = Usage([0, 1])
    usage.add(0, ended(0, 4, 3))
    usage.add(0, ended(1, 3, 50, "audio"))
    assert usage.shown()["completion_tokens"] == 53
    assert usage.shown()["completion_tokens_details"] == {"audio_tokens": 50}

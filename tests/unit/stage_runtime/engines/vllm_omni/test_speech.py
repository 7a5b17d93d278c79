"""What Qwen3-TTS may be asked to say; whatever else would reach its talker is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm_omni.speech import most_tokens, read_speech, task_of

TALKER = SimpleNamespace(spk_id={"ethan": 2500, "Serena": 2501}, codec_language_id={"english": 2050})


def test_a_prompt_or_vllm_omnis_own_words_are_a_speech() -> None:
    """1. voice and language come with the parameters, in whatever case; without a language the model finds it
    2. additional_information is what vLLM-Omni's users write; it goes before the parameters
    """
    plain = read_speech({"prompt": "hello"}, {"speaker": "Ethan", "language": "English", "seed": 3}, TALKER)
    assert (plain.text, plain.speaker, plain.language) == ("hello", "ethan", "english")
    chat = read_speech({"messages": [{"role": "user", "content": "hi"}]}, {"speaker": "serena"}, TALKER)
    assert (chat.text, chat.speaker, chat.language) == ("hi", "Serena", "Auto")
    theirs = {"task_type": ["CustomVoice"], "text": ["hey"], "language": ["Auto"], "speaker": ["Serena"]}
    told = read_speech({"additional_information": theirs}, {"speaker": "ethan"}, TALKER)
    assert (told.text, told.speaker, told.language) == ("hey", "Serena", "Auto")


def test_what_their_own_examples_say_of_a_speech_is_taken() -> None:
    """Its length, which bounds the talker, and whether the text comes at once."""
    theirs = {"text": ["hey"], "speaker": ["ethan"], "max_new_tokens": [2048], "non_streaming_mode": [True]}
    told = read_speech({"additional_information": theirs}, {}, TALKER)
    assert (told.max_new_tokens, told.non_streaming_mode) == (2048, True)
    assert most_tokens({"additional_information": theirs}) == 2048
    for without in ({}, {"additional_information": "x"}, {"additional_information": {"max_new_tokens": ["x"]}}):
        assert most_tokens(without) is None


@pytest.mark.parametrize(
    ("information", "said"),
    [
        ({"speaker": ["nobody"]}, "speaker: this model has Serena, ethan, not 'nobody'"),
        ({"speaker": [5]}, "speaker"),
        ({"speaker": ["ethan", "Serena"]}, "one value is right, not 2"),
        ({"speaker": "ethan", "language": "klingon"}, "language: this model has Auto, english, not 'klingon'"),
        ({"speaker": "ethan", "ref_audio": ["http://169.254.169.254/"]}, "'ref_audio' is not known"),
        ({"speaker": "ethan", "voice_clone_prompt": [{}]}, "'voice_clone_prompt' is not known"),
        ({"speaker": "ethan", "task_type": ["Base"]}, "task_type: 'Base' was not tried here"),
        ({"speaker": "ethan", "task_type": ["VoiceDesign"]}, "this model is for CustomVoice, not 'VoiceDesign'"),
        ({"speaker": "ethan", "text": [""]}, "text"),
        ({"speaker": "ethan", "max_new_tokens": [0]}, "max_new_tokens"),
        ({"speaker": "ethan", "non_streaming_mode": ["yes"]}, "non_streaming_mode"),
        ([], "additional_information is a mapping"),
    ],
)
def test_what_the_talker_would_trip_over_or_fetch_is_refused(information: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_speech({"prompt": "hello", "additional_information": information}, {}, TALKER)
    assert said in str(refused.value)


def test_a_model_that_designs_voices_is_told_one_in_words() -> None:
    """A voice by name, which clients send all the same, means nothing to it; its task need not be said."""
    design = task_of(SimpleNamespace(tts_model_type="voice_design"))
    for task_type in ({}, {"task_type": "VoiceDesign"}):
        params = {"instruct": "a warm voice", "speaker": "Vivian", **task_type}
        speech = read_speech({"prompt": "hello"}, params, TALKER, design)
        assert (speech.task_type, speech.speaker, speech.instruct) == ("VoiceDesign", None, "a warm voice")
    with pytest.raises(InvalidRequestError, match="instruct: this model speaks in the voice that it describes"):
        read_speech({"prompt": "hello"}, {}, TALKER, design)
    with pytest.raises(InvalidRequestError, match="this model is for VoiceDesign, not 'CustomVoice'"):
        read_speech({"prompt": "hello"}, {"instruct": "warm", "task_type": "CustomVoice"}, TALKER, design)
    with pytest.raises(InvalidRequestError, match="'Base' was not tried here"):
        read_speech({"prompt": "hello"}, {}, TALKER, task_of(SimpleNamespace(tts_model_type="base")))


def test_a_voice_has_to_be_named() -> None:
    with pytest.raises(InvalidRequestError, match="speaker: this model has"):
        read_speech({"prompt": "hello"}, {}, TALKER)

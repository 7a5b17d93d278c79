"""The voice detector: voice is voice, silence and a microphone's noise are not, however the sound is cut."""

from __future__ import annotations

from hub.api.audio.threads import EncoderThreads
from hub.api.realtime.detector import VoiceDetector, detector_missing
from tests.support.voice import hiss, silence, vowel


async def voiced(sound: bytes, step: int = 0, threshold: float = 0.5) -> list[bool]:
    detector = VoiceDetector(EncoderThreads())
    step = step or len(sound)
    found: list[bool] = []
    for start in range(0, len(sound), step):
        found += await detector.voiced(sound[start : start + step], threshold)
    return found


async def test_voice_is_told_from_silence_and_noise() -> None:
    for threshold in (0.0, 0.5, 1.0):
        speech = await voiced(vowel(2000), threshold=threshold)
        assert sum(speech) > 0.9 * len(speech) == 90
    for quiet in (silence(2000), hiss(2000)):
        assert sum((await voiced(quiet))[10:]) == 0


async def test_pieces_of_any_length_are_heard_alike() -> None:
    """One of them so long that a thread looks at it."""
    sound = silence(500) + vowel(4000) + silence(1000)
    whole = await voiced(sound)
    assert len(whole) == 275
    for step in (2, 1001 * 2, 48_000):
        assert await voiced(sound, step) == whole


def test_this_host_has_the_library() -> None:
    assert detector_missing() == ""

"""Where turns begin and end, by what a detector says of each 20 ms; and what is kept of the sound."""

from __future__ import annotations

import pytest

from hub.api.realtime.conversation import BYTES_PER_MS
from hub.api.realtime.listening import FRAME_BYTES, Listening, SpeechStarted, SpeechStopped
from hub.api.realtime.schema import TurnDetection

USUAL = TurnDetection(type="server_vad")


def frames(length_ms: int, first: int = 0) -> bytes:
    """Sound in which each frame of 20 ms has a value of its own."""
    return b"".join(bytes([number % 251]) * FRAME_BYTES for number in range(first, first + length_ms // 20))


def heard(listening: Listening, *parts: tuple[int, bool], detection: TurnDetection = USUAL) -> list[object]:
    found: list[object] = []
    for length_ms, is_voice in parts:
        found += listening.hear(frames(length_ms), [is_voice] * (length_ms // 20), detection)
    return found


def test_a_turn_has_its_padding_in_front_and_its_silence_behind() -> None:
    listening = Listening(60_000)
    sound = frames(3000)
    voiced = [50 <= number < 100 for number in range(150)]
    started, stopped = listening.hear(sound, voiced, USUAL)
    assert started == SpeechStarted(1000 - 300)
    assert isinstance(stopped, SpeechStopped)
    assert stopped.end_ms == 2000 + 500
    assert stopped.samples == sound[700 * BYTES_PER_MS : 2500 * BYTES_PER_MS]


def test_a_cough_begins_nothing_and_a_pause_ends_nothing() -> None:
    listening = Listening(60_000)
    assert heard(listening, (1000, False), (60, True), (1000, False)) == []
    assert len(heard(listening, (600, True), (400, False), (600, True), (400, False))) == 1
    assert listening.is_speaking


@pytest.mark.parametrize(("threshold", "needed_ms"), [(0.0, 20), (0.5, 80), (1.0, 160)])
def test_a_higher_threshold_takes_more_voice(threshold: float, needed_ms: int) -> None:
    detection = TurnDetection(type="server_vad", threshold=threshold)
    for length_ms, begins in ((needed_ms - 20, False), (needed_ms, True)):
        listening = Listening(60_000)
        found = heard(listening, (200, False), (length_ms, True), detection=detection)
        assert bool(found) is begins


def test_silence_is_not_kept() -> None:
    """An hour of it, piece by piece."""
    listening = Listening(60_000)
    for _ in range(180):
        assert heard(listening, (20_000, False)) == []
        assert listening.size_bytes <= (300 + 160) * BYTES_PER_MS


def test_pieces_of_any_length_make_the_same_turn() -> None:
    """The detector says what it has heard a bit later than the sound comes."""
    sound, voiced = frames(3000), [50 <= number < 100 for number in range(150)]
    listening, found, said = Listening(60_000), list[object](), 0
    for start in range(0, len(sound), 1000):
        piece = sound[start : start + 1000]
        whole = min(len(sound), start + 1000) // FRAME_BYTES
        found += listening.hear(piece, voiced[said:whole], USUAL)
        said = whole
    assert found == Listening(60_000).hear(sound, voiced, USUAL)


def test_several_turns_of_one_piece_come_one_by_one() -> None:
    listening = Listening(60_000)
    sound = frames(6000)
    voiced = [50 <= number < 100 or 200 <= number < 250 for number in range(300)]
    found = listening.hear(sound, voiced, USUAL)
    assert [type(each).__name__ for each in found] == ["SpeechStarted", "SpeechStopped"] * 2
    assert found[2] == SpeechStarted(4000 - 300)


def test_a_turn_ends_at_its_bound_and_the_next_begins() -> None:
    listening = Listening(1000)
    found = heard(listening, (2500, True))
    assert [type(each).__name__ for each in found[:3]] == ["SpeechStarted", "SpeechStopped", "SpeechStarted"]
    assert isinstance(found[1], SpeechStopped)
    assert len(found[1].samples) == 1000 * BYTES_PER_MS
    assert listening.size_bytes <= 1000 * BYTES_PER_MS


def test_what_is_taken_by_hand_is_all_of_it() -> None:
    listening = Listening(1000)
    listening.add(frames(400))
    assert listening.room_bytes() == 600 * BYTES_PER_MS
    assert listening.take_all() == frames(400)
    assert (listening.size_bytes, listening.take_all()) == (0, b"")
    heard(listening, (400, True))
    assert listening.is_speaking
    listening.clear()
    assert (listening.is_speaking, listening.size_bytes) == (False, 0)


def test_when_detection_changes_speech_is_forgotten_and_the_sound_stays() -> None:
    listening = Listening(60_000)
    heard(listening, (400, True))
    listening.forget_speech()
    assert (listening.is_speaking, listening.size_bytes) == (False, 400 * BYTES_PER_MS)
    listening.add(frames(100))
    assert len(listening.take_all()) == 500 * BYTES_PER_MS

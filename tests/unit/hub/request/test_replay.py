"""What a deterministic stage makes again: the same is dropped, the rest is shown, and a difference is found."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.request.replay import Mark, Replay, Rest, _without, mark_of
from omni_discovery import wire

WAV = "audio/wav"


def chunk(seq: int, text: str = "", token_ids: Sequence[int] = (), mime: str = "") -> wire.Chunk:
    return wire.Chunk(
        epoch=1,
        request_id="r",
        seq=seq,
        modality="text",
        queue_length=0,
        text=text,
        token_ids=tuple(token_ids),
        mime=mime,
    )


def sound(*samples: int) -> bytes:
    """Something like a WAV file: the header is not read."""
    return b"RIFF" + bytes(40) + struct.pack(f"={len(samples)}h", *samples)


def replay(*files: bytes, mime: str = WAV) -> Replay:
    return Replay(len(files), (), "", tuple(mark_of(mime, file) for file in files))


def shown_of(rest: Rest) -> tuple[str, tuple[int, ...], list[bytes]]:
    assert not rest.difference
    return rest.message.text, rest.message.token_ids, list(rest.attachments)


TOKENS = st.lists(st.integers(0, 9), max_size=12)
CUTS = st.lists(st.integers(0, 12), max_size=6)


def cut(token_ids: Sequence[int], places: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens in chunks, cut at these places."""
    ends = [*sorted({min(place, len(token_ids)) for place in places} | {0}), len(token_ids)]
    return [tuple(token_ids[start:end]) for start, end in pairwise(ends) if end > start]


@given(TOKENS, CUTS, CUTS, st.integers(0, 12))
def test_whatever_the_chunks_the_client_gets_the_rest_once(
    token_ids: list[int], first: list[int], second: list[int], seen: int
) -> None:
    """1. the first attempt's chunks were cut in one way, and some of them were shown
    2. the second attempt's are cut in another: what is shown of them is what was missing
    """
    before = cut(token_ids, first)[:seen]
    had = [token for each in before for token in each]
    compared = Replay(len(before), tuple(had), "".join(map(str, had)), ())
    for seq, each in enumerate(cut(token_ids, second)):
        rest = compared.rest_of(chunk(seq, "".join(map(str, each)), each), [])
        text, more, _ = shown_of(rest)
        assert text == "".join(map(str, more))
        assert rest.is_empty == (not more)
        had += more
    assert had == token_ids
    assert compared.shortage == ""


def test_log_probabilities_stay_with_their_tokens_and_those_of_the_prompt_come_once() -> None:
    compared = Replay(2, (1, 2, 3), "abc", ())
    logprobs = tuple((wire.TokenLogprob(token, -1.0, 1, "x"),) for token in (1, 2, 3, 4))
    message = msgspec.structs.replace(chunk(0, "abcd", (1, 2, 3, 4)), logprobs=logprobs, prompt_logprobs=logprobs)
    rest = compared.rest_of(message, [])
    assert rest.message.logprobs == logprobs[3:]
    assert rest.message.prompt_logprobs is msgspec.UNSET
    assert compared.rest_of(chunk(1, "e", (5,)), []).message.text == "e"


def test_another_token_another_text_and_another_sound_are_differences() -> None:
    assert "token 2 is another" in Replay(3, (1, 2, 3), "", ()).rest_of(chunk(0, "", (1, 2, 4)), []).difference
    assert "the text is another" in Replay(1, (), "abc", ()).rest_of(chunk(0, "abd"), []).difference
    assert "piece 0 is another" in replay(sound(*range(99))).rest_of(chunk(0, mime=WAV), [sound(*[7] * 99)]).difference


def test_sounds_may_differ_by_a_step_and_pictures_not_at_all() -> None:
    heard = sound(*range(0, 3200, 10))
    for step, is_same in ((0, True), (1, True), (-1, True), (2, False)):
        again = sound(*(sample + step for sample in range(0, 3200, 10)))
        assert mark_of(WAV, heard).is_of(WAV, again) is is_same
    assert not mark_of(WAV, heard).is_of(WAV, heard + b"\0\0")
    assert mark_of("image/png", b"abc").is_of("image/png", b"abc")
    assert not mark_of("image/png", b"abc").is_of("image/png", b"abd")
    assert not mark_of(WAV, heard).is_of("image/png", heard)


def test_of_a_sound_a_small_part_is_kept() -> None:
    """A minute of speech, and an odd number of bytes."""
    kept: Mark = mark_of(WAV, bytes(60 * 48_000 + 1))
    assert kept.samples.itemsize * len(kept.samples) < 200_000


def test_sounds_that_came_before_are_dropped_one_by_one() -> None:
    files = [sound(*range(number, number + 50)) for number in range(4)]
    compared = replay(*files[:2])
    left = [compared.rest_of(chunk(seq, mime=WAV), [file]) for seq, file in enumerate(files)]
    assert [rest.is_empty for rest in left] == [True, True, False, False]
    assert [file for rest in left for file in rest.attachments] == files[2:]


def test_an_attempt_that_ends_too_early_is_noticed() -> None:
    compared = replay(sound(1), sound(2))
    compared.rest_of(chunk(0, mime=WAV), [sound(1)])
    assert "ended before" in compared.shortage
    compared.rest_of(chunk(1, mime=WAV), [sound(2)])
    assert compared.shortage == ""


def test_a_chunk_without_content_is_dropped_once_it_was_shown() -> None:
    compared = Replay(1, (), "", ())
    assert compared.rest_of(chunk(0), []).is_empty
    assert not compared.rest_of(chunk(1), []).is_empty


@pytest.mark.attack("F7")
def test_of_large_attachments_little_is_kept_and_read() -> None:
    """1. of a long sound 8192 samples at most are kept: another sound differs, one that was rounded otherwise does not
    2. of a large picture blocks are read: the same is the same, and another beginning, length or end is another
    """
    count = 1 << 21
    long = bytes(44) + struct.pack("=h", 5) * count
    mark = mark_of(WAV, long)
    assert 4096 <= len(mark.samples) <= 8192
    assert mark.is_of(WAV, bytes(44) + struct.pack("=h", 6) * count)
    assert not mark.is_of(WAV, bytes(44) + struct.pack("=h", 7) * count)
    picture = bytearray(64 << 20)
    mark = mark_of("image/png", bytes(picture))
    assert mark.is_of("image/png", bytes(picture))
    assert not mark.is_of("image/png", bytes(picture[1:]))
    for place in (0, len(picture) // 2, len(picture) - 1):
        picture[place] = 1
        same = mark.is_of("image/png", bytes(picture))
        picture[place] = 0
        assert same is (0 < place < len(picture) - 1)


def test_what_the_client_was_told_of_the_prompt_is_not_told_again() -> None:
    told = msgspec.structs.replace(chunk(0, "ab", (1, 2)), prompt_token_ids=(7, 8))
    assert _without(told, 1, 1, is_known=True).prompt_token_ids is msgspec.UNSET
    assert _without(told, 1, 1, is_known=False).prompt_token_ids == (7, 8)

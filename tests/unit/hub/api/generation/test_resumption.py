"""Tokens that name nothing, and what a client gets of an answer that is made again."""

from __future__ import annotations

import pytest

from hub.api.errors import RetryConflictError
from hub.api.generation.resumption import (
    SEED_BITS,
    Asker,
    Had,
    Place,
    Progress,
    nonce_of,
    parse_place,
    place_of_new,
    seed_of_nonce,
)
from omni_discovery.errors import InvalidRequestError

ASKER = Asker(b"k" * 32, "/v1/chat/completions", b'{"messages": []}')
NONCE = bytes(range(16))
TEXT = "Vier Äpfel, fünf Birnen".encode()


def begun(*pieces: bytes) -> str:
    """The place of a client that has had these pieces of a text."""
    progress = Progress(place_of_new(NONCE, ASKER))
    for piece in pieces:
        assert progress.pass_on(0, "t", piece) == piece
    return progress.shown


def again(shown: str) -> Progress:
    return Progress(parse_place(shown, ASKER))


def test_the_seed_is_the_tokens_and_every_hub_finds_the_same() -> None:
    new = place_of_new(NONCE, ASKER)
    shown = parse_place(new.token, ASKER)
    assert (shown.nonce, shown.token, shown.had) == (NONCE, new.token, {})
    assert 0 <= seed_of_nonce(shown.nonce) < 1 << SEED_BITS
    assert len({seed_of_nonce(bytes([number]) * 16) for number in range(200)}) == 200


def test_a_clients_own_key_makes_the_same_token_at_every_hub() -> None:
    assert nonce_of(b"k", "order-7") == nonce_of(b"k", "order-7")
    others = {
        nonce_of(b"k", "order-7"),
        nonce_of(b"k", "order-8"),
        nonce_of(b"l", "order-7"),
        nonce_of(b"", "korder-7"),
    }
    assert len(others) == 4
    assert {len(each) for each in others} == {16}


@pytest.mark.parametrize(
    "other",
    [
        Asker(b"l" * 32, ASKER.path, ASKER.body),
        Asker(b"", ASKER.path, ASKER.body),
        Asker(ASKER.key_digest, "/v1/completions", ASKER.body),
        Asker(ASKER.key_digest, ASKER.path, ASKER.body + b" "),
        Asker(ASKER.key_digest + b"/", ASKER.path[1:], ASKER.body),
    ],
    ids=["another key", "no key", "another route", "another body", "the same bytes in all"],
)
def test_a_token_is_of_one_key_route_and_body(other: Asker) -> None:
    with pytest.raises(RetryConflictError) as raised:
        parse_place(place_of_new(NONCE, ASKER).token, other)
    assert (raised.value.status, raised.value.code) == (409, "resume_mismatch")


WRONG = (
    *("", "x", "A" * 42, "A" * 44, "Ä" * 43, "=" * 43, f"{begun()}.0t1", f"{begun()}.0t1-short", f"{begun()}.,"),
    *(f"{begun(b'a')},{begun(b'a').partition('.')[2]}", f"{begun()}.0t-1-AAAAAAAAAAA", f"{begun()}.0t٣-AAAAAAAAAAA"),
    f"{begun()}.{','.join(f'{number}t1-AAAAAAAAAAA' for number in range(258))}",
)


@pytest.mark.parametrize("shown", WRONG, ids=range(len(WRONG)))
def test_what_is_no_token_or_place_is_refused(shown: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_place(shown, ASKER)
    assert raised.value.status == 400


@pytest.mark.parametrize("cut", range(0, len(TEXT) + 1, 3))
@pytest.mark.parametrize("size", [1, 5, 100])
def test_whatever_the_pieces_are_the_rest_is_what_the_client_had_not(cut: int, size: int) -> None:
    """1. the client has a part, in pieces of any size; 2. it is made again in others; 3. both together are the whole"""
    shown = begun(TEXT[: cut // 2], TEXT[cut // 2 : cut])
    progress = again(shown)
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    rest = b"".join(progress.pass_on(0, "t", piece) for piece in pieces)
    assert TEXT[:cut] + rest == TEXT
    progress.check_end()
    assert progress.shown == begun(TEXT)


def test_a_client_that_is_cut_off_once_more_shows_the_later_place() -> None:
    """Also while what it had is still being made again: then the place is the one that it came with."""
    shown = begun(TEXT[:10])
    progress = again(shown)
    assert progress.pass_on(0, "t", TEXT[:4]) == b""
    assert progress.shown == shown
    assert progress.pass_on(0, "t", TEXT[4:15]) == TEXT[10:15]
    assert progress.shown == begun(TEXT[:15])
    assert again(progress.shown).pass_on(0, "t", TEXT) == TEXT[15:]


@pytest.mark.parametrize("made", [b"X" + TEXT[1:], TEXT[:9] + b"X" + TEXT[10:], TEXT.upper()])
def test_nothing_that_differs_is_passed_on(made: bytes) -> None:
    progress = again(begun(TEXT[:10]))
    assert [progress.pass_on(0, "t", made[at : at + 1]) for at in range(9)] == [b""] * 9
    with pytest.raises(RetryConflictError) as raised:
        progress.pass_on(0, "t", made[9:])
    assert raised.value.code == "resume_differs"


def test_an_answer_that_ends_before_what_was_had_differs() -> None:
    progress = again(begun(TEXT))
    progress.pass_on(0, "t", TEXT[:-1])
    with pytest.raises(RetryConflictError):
        progress.check_end()


def test_parts_have_places_of_their_own() -> None:
    first = Progress(place_of_new(NONCE, ASKER))
    first.pass_on(0, "t", b"ab")
    first.pass_on(1, "t", b"xy")
    first.pass_whole(0, "e", b"\1")
    second = again(first.shown)
    assert (second.was_begun(0), second.was_begun(1), second.was_begun(2), second.was_begun(10)) == (
        True,
        True,
        False,
        False,
    )
    assert (second.pass_on(1, "t", b"xyz"), second.pass_on(0, "t", b"a")) == (b"z", b"")
    assert (second.pass_on(0, "t", b"b"), second.pass_whole(0, "e", b"\1"), second.pass_whole(1, "e", b"\1")) == (
        b"",
        False,
        True,
    )


def test_what_can_only_be_sent_as_one_is_not_cut() -> None:
    progress = again(begun(b"PNG"))
    with pytest.raises(RetryConflictError):
        progress.pass_whole(0, "t", b"PNG and more")


def test_a_place_within_a_character_is_none_of_ours() -> None:
    text = "ä"
    progress = again(begun(text.encode()[:1]))
    with pytest.raises(RetryConflictError):
        progress.pass_text(0, "t", text)


def test_a_part_of_nothing_is_no_part() -> None:
    shown = begun(b"")
    assert again(shown).pass_on(0, "t", TEXT) == TEXT
    wrong = Progress(Place(NONCE, "token", {"0t": Had(0, "AAAAAAAAAAA")}))
    with pytest.raises(RetryConflictError):
        wrong.pass_on(0, "t", TEXT)


@pytest.mark.attack("S3")
def test_a_place_has_no_more_parts_than_the_answer() -> None:
    """Every event names all parts: 255 of a client's making cost the hub 0.4 ms and 7 KB an event."""
    names = [f"{choice}{kind}" for choice in range(100) for kind in "tspxe"]
    for choices, parts in ((1, 5), (4, 20)):
        place = ",".join(f"{name}5-AAAAAAAAAAA" for name in names[:parts])
        begun = place_of_new(NONCE, ASKER)
        assert Progress(parse_place(f"{begun.token}.{place}", ASKER), choices).is_resumed
        longer = parse_place(f"{begun.token}.{place},{names[parts]}5-AAAAAAAAAAA", ASKER)
        with pytest.raises(InvalidRequestError, match="more parts than the answer"):
            Progress(longer, choices)

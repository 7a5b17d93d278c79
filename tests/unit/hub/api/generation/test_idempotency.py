"""Idempotency keys: of one client and one body, refused while under way, remembered within bounds."""

from __future__ import annotations

import pytest

from hub.api.errors import RetryConflictError, error_response
from hub.api.generation.idempotency import IdempotencyKeys

MINE, THEIRS = b"my key", b"their key"


def refusal(keys: IdempotencyKeys, request: bytes, now_s: float = 0.0, key: str = "k") -> RetryConflictError:
    with pytest.raises(RetryConflictError) as raised:
        keys.begin(MINE, key, request, now_s)
    return raised.value


def test_the_same_request_under_way_is_refused_and_its_client_told_to_come_again() -> None:
    """OpenAI's clients do: 409 is one of the statuses that they repeat."""
    keys = IdempotencyKeys()
    claim = keys.begin(MINE, "k", b"a", 0.0)
    error = refusal(keys, b"a")
    assert (error.code, error_response(error).headers["Retry-After"]) == ("idempotency_key_in_use", "1")
    keys.end(claim, 1.0)
    assert keys.begin(MINE, "k", b"a", 2.0) is not claim


def test_a_key_is_of_one_body_for_as_long_as_it_is_remembered() -> None:
    keys = IdempotencyKeys(remembered_s=10.0)
    claim = keys.begin(MINE, "k", b"a", 0.0)
    error = refusal(keys, b"b")
    answer = error_response(error)
    assert (error.code, answer.status_code, answer.headers["x-should-retry"]) == (
        "idempotency_key_reused",
        409,
        "false",
    )
    keys.end(claim, 5.0)
    assert refusal(keys, b"b", 14.9).code == "idempotency_key_reused"
    keys.begin(MINE, "k", b"b", 15.0)


def test_clients_do_not_meet_in_their_keys() -> None:
    keys = IdempotencyKeys()
    keys.begin(MINE, "k", b"a", 0.0)
    keys.begin(THEIRS, "k", b"b", 0.0)
    assert len(keys) == 2


def test_a_request_that_was_refused_leaves_its_key_free() -> None:
    """Also one that has ended by then; and never that of a later request."""
    keys = IdempotencyKeys()
    first = keys.begin(MINE, "k", b"a", 0.0)
    keys.end(first, 0.0)
    keys.forget(first)
    later = keys.begin(MINE, "k", b"b", 0.0)
    keys.forget(first)
    keys.end(first, 0.0)
    assert refusal(keys, b"b").code == "idempotency_key_in_use"
    keys.forget(later)
    keys.forget(later)
    assert len(keys) == 0


def test_ended_keys_are_bounded_and_the_oldest_go_first() -> None:
    keys = IdempotencyKeys(most_ended=2, remembered_s=10.0)
    for number in range(4):
        keys.end(keys.begin(MINE, f"k{number}", b"a", 0.0), float(number))
    assert len(keys) == 2
    keys.begin(MINE, "k1", b"b", 4.0)
    assert refusal(keys, b"b", 4.0, "k3").code == "idempotency_key_reused"
    keys.begin(MINE, "k4", b"a", 100.0)
    assert len(keys) == 2

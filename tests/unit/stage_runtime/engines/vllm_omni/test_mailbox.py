"""The mailbox between vLLM-Omni's threads and the engine's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stage_runtime.engines.vllm_omni.mailbox import Mailbox, copied

torch = pytest.importorskip("torch")


def test_payloads_go_out_in_order_with_the_request_and_number_of_their_keys() -> None:
    mailbox = Mailbox()
    mailbox.put("r_7_0_0", {"codes": [1]})
    mailbox.put("r_7_0_1", {"codes": [2]})
    assert [(sent.name, sent.number, sent.payload) for sent in mailbox.sent()] == [
        ("r_7", 0, {"codes": [1]}),
        ("r_7", 1, {"codes": [2]}),
    ]
    assert mailbox.sent() == []


def test_a_payload_that_cannot_be_handed_over_is_told_and_never_raised() -> None:
    mailbox = Mailbox()
    mailbox.put("r1_0_0", {"codes": object()})
    (sent,) = mailbox.sent()
    assert (sent.name, sent.payload) == ("r1", {})
    assert "can't be handed over" in sent.flaw


def test_what_is_offered_is_fetched_once_and_belongs_to_who_fetched_it() -> None:
    """vLLM-Omni writes into what it gets; the same hand-off may be given to another attempt."""
    mailbox, payload = Mailbox(), {"meta": {"finished": False}, "codes": torch.arange(3)}
    mailbox.offer("r1", 0, 0, payload)
    assert (mailbox.has_unread, mailbox.unread("r1"), mailbox.unread("r")) == (True, 1, 0)
    got = mailbox.get("r1_0_0")
    got["meta"]["more"] = 1
    got["codes"][0] = 9
    assert payload["meta"] == {"finished": False}
    assert payload["codes"].tolist() == [0, 1, 2]
    assert mailbox.get("r1_0_0") is None
    assert not mailbox.has_unread


def test_a_request_that_is_over_leaves_nothing() -> None:
    mailbox = Mailbox()
    for name in ("r1", "r11"):
        mailbox.offer(name, 0, 0, {"codes": [1]})
    mailbox.forget("r1")
    assert (mailbox.unread("r1"), mailbox.unread("r11")) == (0, 1)


def test_tensors_keep_their_dtype_and_share_no_memory() -> None:
    rows = torch.ones(4, 2, dtype=torch.bfloat16)
    got = copied({"rows": (rows[1:], None), 3: b"x"})
    rows[1] = 5
    assert got["rows"][0].dtype == torch.bfloat16
    assert got["rows"][0].tolist() == [[1.0, 1.0]] * 3
    assert (got["rows"][1], got["3"]) == (None, b"x")
    with pytest.raises(TypeError):
        copied({"f": print})


@pytest.mark.attack("Z58")
def test_a_list_of_numbers_is_copied_at_once() -> None:
    """As fast as Python copies a list: it is the engine's thread, and a hand-off may have half a million."""
    numbers: list[Any] = [*range(100_000), 0.5, True, "x"]
    got = copied({"ids": numbers})["ids"]
    assert got == numbers
    assert got is not numbers
    began_s = time.thread_time()
    list(numbers)
    plain_s = time.thread_time() - began_s
    began_s = time.thread_time()
    copied(numbers)
    assert time.thread_time() - began_s < max(50 * plain_s, 0.01)

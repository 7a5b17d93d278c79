"""What a control key means, decided without a registry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.kv import KeyValue
from omni_discovery.records.control import (
    AppliedControl,
    ControlError,
    Decision,
    HubControlSpec,
    _shown,
    answered_revision,
    decide,
    parse,
    parse_hub,
    without_drain,
)

EPOCH = 40
NOTHING = AppliedControl()


def written(value: Any, revision: int = 50) -> KeyValue:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return KeyValue("/omni/v1/n/control/0/1", raw, revision, revision)


def after(value: Any, before: AppliedControl = NOTHING, epoch: int = EPOCH) -> Decision:
    return decide(written(value), epoch, before)


def test_no_key_means_nothing_and_its_deletion_takes_cordon_and_weight_back() -> None:
    assert decide(None, EPOCH, NOTHING).applied == NOTHING
    assert decide(None, EPOCH, AppliedControl(cordoned=True, weight=0.5, revision=50, error="x")).applied == NOTHING


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ({"cordon": True}, AppliedControl(cordoned=True, revision=50)),
        ({"cordon": False}, AppliedControl(revision=50)),
        ({"weight": 0.5}, AppliedControl(weight=0.5, revision=50)),
        ({"weight": 0}, AppliedControl(weight=0.0, revision=50)),
        ({"weight": 1000, "cordon": True}, AppliedControl(cordoned=True, weight=1000.0, revision=50)),
        ({"drain": True, "epoch": EPOCH}, AppliedControl(draining=True, revision=50)),
        ({"drain": True, "epoch": EPOCH, "cordon": True}, AppliedControl(cordoned=True, draining=True, revision=50)),
        ({"drain": False}, AppliedControl(revision=50)),
        ({"schema": 1, "cordon": True}, AppliedControl(cordoned=True, revision=50)),
        ({}, AppliedControl(revision=50)),
    ],
)
def test_what_is_written_holds_and_is_answered_with_its_revision(value: Any, meant: AppliedControl) -> None:
    assert after(value) == Decision(meant)


def test_a_drain_without_an_epoch_is_bound_to_the_life_that_sees_it_before_it_takes_effect() -> None:
    """1. the value says only drain: nothing is applied, the same value with our epoch is to be written
    2. that value, once it stands, is for us and for no other life
    """
    first = after({"drain": True, "weight": 2})
    assert first.applied == NOTHING
    assert first.bound is not None
    assert json.loads(first.bound) == {"drain": True, "weight": 2, "epoch": EPOCH}
    assert after(first.bound).applied.draining
    assert not after(first.bound, epoch=EPOCH + 7).applied.draining


def test_a_drain_for_another_life_is_ignored_and_says_so_while_the_rest_of_the_key_holds() -> None:
    applied = after({"drain": True, "epoch": 39, "cordon": True}).applied
    assert (applied.draining, applied.cordoned, applied.revision) == (False, True, 50)
    assert applied.error == "revision 50: the drain is for epoch 39, this is epoch 40"


def test_a_process_that_drains_goes_on_to_whatever_becomes_of_the_key_and_of_its_epoch() -> None:
    draining = AppliedControl(draining=True, revision=45)
    assert decide(None, EPOCH, draining).applied.draining
    assert after({"cordon": False}, draining).applied.draining
    again = after({"drain": True, "epoch": EPOCH}, draining, epoch=EPOCH + 9)
    assert again.applied.draining
    assert again.applied.error == ""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"", "not JSON"),
        (b"cordon", "not JSON"),
        (b'{"cordon": tru', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([], "no JSON object"),
        ("drain", "no JSON object"),
        ({"cordn": True}, '"cordn" is not known; known are: cordon, weight, drain, epoch'),
        ({"cordon": "yes"}, "true or false"),
        ({"cordon": 1}, "true or false"),
        ({"cordon": None}, "true or false"),
        ({"drain": "now"}, "true or false"),
        ({"weight": -0.1}, "from 0 to 1000"),
        ({"weight": 1001}, "from 0 to 1000"),
        ({"weight": "0.5"}, "from 0 to 1000"),
        ({"weight": True}, "from 0 to 1000"),
        ({"weight": None}, "from 0 to 1000"),
        (b'{"weight": NaN}', "not JSON"),
        ({"drain": True, "epoch": "40"}, "whole number"),
        ({"drain": True, "epoch": 0}, "whole number"),
        ({"drain": True, "epoch": 1 << 60}, "whole number"),
        ({"drain": True, "epoch": None}, "whole number"),
        ({"epoch": 40}, "goes with"),
        ({"drain": False, "epoch": 40}, "goes with"),
    ],
)
def test_a_bad_value_is_answered_and_leaves_in_force_what_was(value: Any, told: str) -> None:
    before = AppliedControl(cordoned=True, weight=0.25, revision=44)
    decision = after(value, before)
    assert decision.bound is None
    assert decision.applied.error.startswith("revision 50: ")
    assert told in decision.applied.error
    assert (decision.applied.cordoned, decision.applied.weight, decision.applied.revision) == (True, 0.25, 44)


def test_a_good_value_after_a_bad_one_clears_the_error() -> None:
    bad = after({"weight": "heavy"}).applied
    assert decide(written({"weight": 2}, 60), EPOCH, bad).applied == AppliedControl(weight=2.0, revision=60)


def test_what_stays_of_a_key_when_its_drain_is_done() -> None:
    assert without_drain(b'{"drain": true, "epoch": 40}') is None
    assert without_drain(b'{"schema": 1, "drain": true}') is None
    kept = without_drain(b'{"drain": true, "epoch": 40, "cordon": true}')
    assert kept is not None
    assert json.loads(kept) == {"cordon": True}
    assert without_drain(b"junk") is None


def test_which_value_a_replica_has_answered() -> None:
    assert answered_revision(0, "") == 0
    assert answered_revision(50, "") == 50
    assert answered_revision(44, after({"cordon": 1}).applied.error) == 50
    assert answered_revision(44, "revision x: y") == 44
    assert answered_revision(44, "can't be read") == 44


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NEAR_MISSES = st.dictionaries(st.sampled_from(["cordon", "weight", "drain", "epoch", "schema", "Drain"]), JSON)


@given(st.binary(max_size=200) | (JSON | NEAR_MISSES).map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_answered_and_never_raise(value: bytes) -> None:
    """Whatever stands in the key: it is applied with its revision, or bound, or answered with a reason."""
    decision = decide(written(value), EPOCH, NOTHING)
    applied = decision.applied
    assert decision.bound is not None or applied.error.startswith("revision 50: ") or applied.revision == 50
    assert len(applied.error) <= 1000
    if applied.error and not applied.revision:
        assert not applied.cordoned
        assert applied.weight is None
        assert not applied.draining
    if decision.bound is not None:
        assert parse(decision.bound).epoch == EPOCH
    without_drain(value)


@given(st.text(max_size=40), st.integers(0, 1 << 53))
def test_any_error_text_in_a_record_can_be_read(error: str, revision: int) -> None:
    assert answered_revision(revision, error) >= revision


@pytest.mark.parametrize(
    ("value", "revoked"),
    [(b'{"revoked": true}', True), (b'{"revoked": false}', False), (b"{}", False), (b'{"schema": 1}', False)],
)
def test_a_hubs_key_revokes_it_or_does_not(value: bytes, revoked: bool) -> None:
    assert parse_hub("h", value) == HubControlSpec("h", revoked)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"{revoked", 'right would be, for example, {"revoked": true}'),
        (b"true", "true is no JSON object"),
        (b'{"revoked": 1}', "revoked is 1; right would be true or false"),
        (b'{"revoke": true}', '"revoke" is not known for a hub; known is: revoked'),
        (b"\xff", "not JSON"),
    ],
)
def test_a_hubs_key_that_makes_no_sense_is_told_with_what_would(value: bytes, told: str) -> None:
    with pytest.raises(ControlError) as raised:
        parse_hub("h", value)
    assert told in str(raised.value)


@pytest.mark.parametrize(("length", "shown"), [(78, "x" * 78 + '"'), (79, "x" * 76 + "...")])
def test_a_wrong_value_is_shown_up_to_eighty_characters(length: int, shown: str) -> None:
    assert _shown("x" * length) == f'"{shown}'

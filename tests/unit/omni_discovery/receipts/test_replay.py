"""A pick made again from a receipt: the same choice, or which input is lacking."""

from __future__ import annotations

import msgspec
import pytest

from omni_discovery.receipts.receipt import Candidate, Picking
from omni_discovery.receipts.replay import replay


def picking(policy: str, draws: list[float], *candidates: Candidate, chosen: str = "1/0") -> Picking:
    return Picking(policy=policy, chosen=chosen, known=len(candidates), candidates=[*candidates], draws=draws)


def candidate(replica_id: int, **fields: float) -> Candidate:
    told = Candidate(replica=f"1/{replica_id}", position=replica_id)
    return msgspec.structs.replace(told, **fields)


@pytest.mark.parametrize(("draw", "choice"), [(0.1, "1/0"), (0.5, "1/1"), (0.9, "1/2")])
def test_chance_is_not_drawn_again_but_taken_from_the_receipt(draw: float, choice: str) -> None:
    assert replay(picking("random", [draw], *map(candidate, range(3)))).choice == choice


def test_who_was_left_out_is_not_chosen_and_the_least_loaded_is() -> None:
    others = [candidate(0, load=3), candidate(1, load=1)]
    idle_but_out = msgspec.structs.replace(candidate(2), out="cordoned", tier=-1)
    assert replay(picking("least-load", [], *others, idle_but_out)).choice == "1/1"


def test_those_of_the_first_tier_go_first() -> None:
    far = msgspec.structs.replace(candidate(0), tier=1)
    assert replay(picking("least-load", [], far, candidate(1, load=4))).choice == "1/1"


def test_a_policy_that_is_not_shipped_and_chance_that_was_not_kept_are_named() -> None:
    assert replay(picking("mine", [], candidate(0))).lacks == (
        "the state of the policy 'mine', which is not one that is shipped"
    )
    assert replay(picking("random", [], candidate(0), candidate(1))).lacks == (
        "chance: the policy drew 0 times then, and now wants more"
    )


def test_a_receipt_goes_through_json_and_back_with_the_same_choice() -> None:
    told = picking("power-of-two", [0.7, 0.2], *(candidate(each, load=each) for each in range(5)))
    again = msgspec.json.decode(msgspec.json.encode(told), type=Picking)
    assert again == told
    assert replay(again) == replay(told)


def test_a_pick_that_found_nobody_has_nothing_to_choose() -> None:
    assert replay(picking("random", [], candidate(0), chosen="")).note == "nobody could be picked: it waited"

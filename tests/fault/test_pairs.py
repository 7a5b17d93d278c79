"""Two faults at once, as ``python -m tests.fault --two`` makes them."""

from __future__ import annotations

import time
from typing import cast

import pytest

from tests.fault.__main__ import hubs_for
from tests.fault.faults import Fault, all_faults
from tests.fault.judge import Promise
from tests.fault.pairs import PAIRS, Pair, all_pairs, fault_of, together
from tests.fault.site import Site

NO_SITE = cast("Site", None)


def recorded(name: str, said: list[str], lasts_s: float, **more: object) -> Fault:
    return Fault(
        prepare=lambda site: said.append(f"prepare {name}"),
        break_it=lambda site: said.append(f"break {name}"),
        heal=lambda site: said.append(f"heal {name}"),
        restore=lambda site: said.append(f"restore {name}"),
        lasts_s=lasts_s,
        **more,  # type: ignore[arg-type]  # fields of Fault, as the tests below name them
    )


def test_the_second_comes_while_the_first_lasts_and_each_is_healed_in_its_own_time() -> None:
    said: list[str] = []
    known = {"one": (recorded("one", said, 0.4), ""), "two": (recorded("two", said, 0.1), "")}
    both = fault_of(Pair("one", "two", after_s=0.1), known)
    both.prepare(NO_SITE)
    began_s = time.monotonic()
    both.break_it(NO_SITE)
    assert time.monotonic() - began_s >= 0.4
    both.restore(NO_SITE)
    assert said[:4] == ["prepare one", "prepare two", "break one", "break two"]
    assert sorted(said[4:6]) == ["heal one", "heal two"]
    assert said[6:] == ["restore two", "restore one"]


def test_one_that_can_not_be_made_fails_the_run_and_the_other_is_healed() -> None:
    said: list[str] = []

    def fail(site: Site) -> None:
        raise AssertionError("it can not be made")

    known = {"one": (recorded("one", said, 0.1), ""), "two": (Fault(break_it=fail), "")}
    with pytest.raises(AssertionError, match="can not be made"):
        fault_of(Pair("one", "two"), known).break_it(NO_SITE)
    assert said == ["break one", "heal one"]


def test_one_stall_may_come_behind_the_other() -> None:
    silent, taken = Promise(stall_s=4.5), Promise(stall_s=2.0, stall_alone_s=17.0, takes_a_hub=True)
    assert together(silent, taken) == Promise(stall_s=6.5, stall_alone_s=17.0, takes_a_hub=True)
    assert together(silent, taken, more_s=10.0).stall_s == 16.5
    assert together(silent, Promise(stall_s=None)).stall_s is None
    assert not together(silent, silent).takes_a_hub


def test_every_pair_is_of_two_faults_that_there_are() -> None:
    """A pair that names an unknown fault raises; both stories and all names differ."""
    pairs = all_pairs()
    assert len(pairs) == len(PAIRS) >= 12
    assert all(pair.first != pair.second for pair in PAIRS)
    assert not set(pairs) & set(all_faults())


def test_pairs_are_run_with_a_hub_to_spare() -> None:
    assert hubs_for(["replica-killed"]) == (1, 3)
    assert hubs_for(["replica-killed", PAIRS[0].name]) == (3,)


def test_what_cannot_be_made_here_says_why() -> None:
    known = {
        "one": (Fault(break_it=lambda site: None), ""),
        "two": (Fault(break_it=print, why_not=lambda site: "no"), ""),
    }
    assert fault_of(Pair("one", "two"), known).why_not(NO_SITE) == "no"

"""What a replica says and does while its connectors lack what carries hand-offs."""

from __future__ import annotations

from typing import Any

import pytest

from stage_runtime.config import PayloadError
from stage_runtime.connectors import OmniConnectorBase
from stage_runtime.engine_loop.jobs import Work
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.replica.readiness import ReadinessCheck
from stage_runtime.server.credits import NO_LOST_SLOTS, LostSlots


class Store(OmniConnectorBase):
    """Stores while its service is there. ``reason``: why it is not."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.asked = 0
        self.is_closed = False

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        self.last_error = self.reason
        return not self.reason, 1, {}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        return {}, 1

    def cleanup(self, request_id: str) -> None:
        pass

    def health(self) -> dict[str, Any]:
        self.asked += 1
        if self.reason == "raises":
            raise RuntimeError("somebody else's connector")
        return {"status": "unhealthy", "reason": self.reason} if self.reason else {"status": "healthy", "puts": 1}

    def close(self) -> None:
        self.is_closed = True


class World:
    """A replica's main thread, its clock and its record."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_s = 0.0
        self.record: list[dict[str, Any]] = []
        self.naps = 0
        self.lost = NO_LOST_SLOTS
        self.payloads = Payloads(0, {(0, 1): Edge("Store", store)}, lambda: self.now_s)
        self.readiness = ReadinessCheck(
            self.payloads, lambda **said: self.record.append(said), lambda: self.now_s, self.sleep, lambda: self.lost
        )

    def sleep(self, seconds: float) -> None:
        assert self.readiness.is_waiting
        self.now_s += seconds
        self.naps += 1
        if self.naps == 3:
            self.store.reason = ""

    def hand_over(self) -> None:
        asked = Work("r", "hub/r", "r", 0, {"prompt": "one"}, {}, (), (1,), 0.0, 60.0)
        if self.store.reason:
            with pytest.raises(PayloadError):
                self.payloads.hand_over(asked, {"a": 1}, (1,))
        else:
            self.payloads.hand_over(asked, {"a": 1}, (1,))


def test_it_waits_until_the_service_is_there_and_says_so_once() -> None:
    world = World(Store("no master at m:1"))
    world.readiness.wait_ready()
    told = "stage 0 can't hand over to 1: no master at m:1"
    assert world.record == [{"reason": told, "phase": "waiting"}, {"reason": ""}]
    assert (world.naps, world.readiness.is_waiting) == (3, False)


def test_a_replica_that_lacks_nothing_says_nothing_and_asks_once() -> None:
    """Also where a connector of others can't be asked."""
    for store in (Store(), Store("raises")):
        world = World(store)
        world.readiness.wait_ready()
        world.hand_over() if not store.reason else None
        for _ in range(10):
            world.now_s += 10
            world.readiness.check_again()
        assert (world.record, world.naps, store.asked) == ([], 0, 1)


def test_a_service_that_goes_is_told_with_the_first_failed_hand_off_until_it_is_back() -> None:
    """1. nothing fails: nobody is asked; 2. hand-offs fail: asked every 5 s at most; 3. it is back: told, too"""
    world = World(Store())
    world.readiness.wait_ready()
    world.store.reason = "gone"
    world.readiness.check_again()
    assert (world.record, world.store.asked) == ([], 1)
    for _ in range(40):
        world.hand_over()
        world.readiness.check_again()
        world.now_s += 0.25
    assert world.record == [{"reason": "stage 0 can't hand over to 1: gone"}]
    assert world.store.asked == 3
    world.store.reason = ""
    world.now_s += 5
    world.readiness.check_again()
    assert world.record[1:] == [{"reason": ""}]


def test_a_failure_that_was_the_requests_own_is_not_told() -> None:
    world = World(Store("full"))
    world.hand_over()
    world.store.reason = ""
    world.readiness.check_again()
    assert (world.record, world.store.asked) == ([], 1)


def test_lost_slots_are_told_beside_a_connector_that_is_out_of_reach_and_each_ends_by_itself() -> None:
    world = World(Store())
    world.readiness.wait_ready()
    world.lost = LostSlots(2, "2 slots serve nobody")
    for _ in range(3):
        world.readiness.check_again()
    assert world.record == [{"reason": "2 slots serve nobody", "lost_slots": 2}]
    assert world.store.asked == 1, "no hand-off has failed"
    world.store.reason = "gone"
    world.hand_over()
    world.now_s += 5
    world.readiness.check_again()
    assert world.record[1:] == [{"reason": "stage 0 can't hand over to 1: gone; 2 slots serve nobody"}]
    world.lost, world.store.reason = NO_LOST_SLOTS, ""
    world.now_s += 4.9
    world.readiness.check_again()
    assert len(world.record) == 2
    world.now_s += 0.1
    world.readiness.check_again()
    assert world.record[2:] == [{"reason": "", "lost_slots": 0}]


def test_connectors_are_closed_whatever_their_health_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for store in (Store("raises"), Store()):
        World(store).payloads.close()
        assert store.is_closed
    assert "payload.closed edge=0-1 connector=Store puts=1" in caplog.text

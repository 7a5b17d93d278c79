"""Correlator: which replicas have still to answer which collective call, and what the others said. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """What one replica answered, or in its place why it did not; ``error`` begins with the error's type."""

    stage_id: int
    replica_id: int
    ok: bool
    #: Plain values, as msgpack has them.
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One replica that is called. ``session`` is what its answer will come by."""

    stage_id: int
    replica_id: int
    session: Hashable


@dataclass(slots=True)
class _Call:
    call_id: str
    #: By session, who has still to answer.
    awaited: dict[Hashable, Target]
    results: list[ReplicaResult] = field(default_factory=list)


class Correlator:
    """Every target of a call gets exactly one result; a call is done once all have theirs."""

    def __init__(self) -> None:
        self._serial = 0
        #: By their ids on the wire, which are never used twice.
        self._calls: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call_id: str, targets: Sequence[Target]) -> str:
        """A call begins; return its id on the wire. Raise RuntimeError if one of that ``call_id`` is open."""
        if any(call.call_id == call_id for call in self._calls.values()):
            raise RuntimeError(f"a collective call with the id {call_id!r} is already open")
        self._serial += 1
        wire_id = f"{call_id}~{self._serial}"
        self._calls[wire_id] = _Call(call_id, {target.session: target for target in targets})
        return wire_id

    def settle(self, wire_id: str, session: Hashable, *, ok: bool = False, result: Any = None, error: str = "") -> bool:
        """One target's result; False, and nothing changes, if none is awaited from there any more."""
        call = self._calls.get(wire_id)
        target = None if call is None else call.awaited.pop(session, None)
        if call is None or target is None:
            return False
        call.results.append(ReplicaResult(target.stage_id, target.replica_id, ok, result, error))
        return True

    def lose(self, session: Hashable, error: str) -> None:
        """Nothing will be answered there any more."""
        for wire_id in self._calls:
            self.settle(wire_id, session, error=error)

    def expire(self, wire_id: str, error: str) -> None:
        """Who has not answered has not, and the call is done. Calls that are done already are left alone."""
        call = self._calls.get(wire_id)
        for session in [] if call is None else list(call.awaited):
            self.settle(wire_id, session, error=error)

    def open(self) -> list[str]:
        """The ids on the wire of all calls that are not done, or whose results were not taken."""
        return list(self._calls)

    def take_done(self) -> list[tuple[str, list[ReplicaResult]]]:
        """The calls that are done, each once: id on the wire and results, by stage and replica."""
        done = [wire_id for wire_id, call in self._calls.items() if not call.awaited]
        return [(wire_id, sorted(self._calls.pop(wire_id).results, key=_place)) for wire_id in done]


def _place(result: ReplicaResult) -> tuple[int, int]:
    return result.stage_id, result.replica_id

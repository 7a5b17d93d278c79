"""What an operator's control key means for one life of a replica, or for a hub.

A replica's key is written by hand: ``{"cordon": true}``, ``{"weight": 0.5}``, ``{"drain": true}``, or several of them
in one object. ``cordon`` and ``weight`` hold while the key stands, for whoever has the id; ``drain`` is for one life. A
hub's key says ``{"revoked": true}``, and holds while it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from omni_discovery.kv import KeyValue
from omni_discovery.records.schema import MOST_WEIGHT

_MOST_EPOCH: Final = 1 << 53
_KNOWN: Final = ("cordon", "weight", "drain", "epoch")


class ControlError(ValueError):
    """A control value can't be understood; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A control value as it was read. ``epoch`` names the life to drain; None means the first that sees it."""

    cordon: bool = False
    weight: float | None = None
    drain: bool = False
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class HubWish:
    """A hub's control value as it was read. Replicas take nothing from a revoked hub and tell it nothing."""

    hub_id: str
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class InForce:
    """What holds for a replica, and what it answers in its record."""

    cordoned: bool = False
    #: None leaves the replica's own weight as it is.
    weight: float | None = None
    #: Whether this life is to finish and go. Once it is, nothing takes that back.
    draining: bool = False
    #: The revision of the value that was applied last; 0 while there is none.
    revision: int = 0
    #: Why a value, or a part of it, was not applied; names its revision.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """``bound`` is what to write in the value's place, by compare-and-swap, before anything is applied; else None."""

    in_force: InForce
    bound: bytes | None = None


def decide(current: KeyValue | None, epoch: int, before: InForce) -> Decision:
    """Say what a control key, or its absence, means for the life ``epoch`` in which ``before`` was in force.

    Never raises. A value that can't be read leaves in force what was, and says so. An unbound drain is bound to this
    life; a process that drains already goes on to, whatever the key says and whatever its epoch has become.
    """
    if current is None:
        return Decision(InForce(draining=before.draining))
    try:
        wish = parse(current.value)
    except ControlError as error:
        return Decision(replace(before, error=_answer(current.mod_revision, str(error))))
    after = InForce(wish.cordon, wish.weight, before.draining, current.mod_revision)
    if not wish.drain or before.draining:
        return Decision(after)
    if wish.epoch is None:
        return Decision(before, bound=_with_epoch(current.value, epoch))
    if wish.epoch != epoch:
        reason = f"the drain is for epoch {wish.epoch}, this is epoch {epoch}"
        return Decision(replace(after, error=_answer(current.mod_revision, reason)))
    return Decision(replace(after, draining=True))


def parse(value: bytes) -> Wish:
    """Read a control value. Raise ControlError."""
    fields = _fields(value)
    for name in fields:
        if name not in _KNOWN and name != "schema":
            raise ControlError(f"{_shown(name)} is not known; known are: {', '.join(_KNOWN)}")
    wish = Wish(_flag(fields, "cordon"), _weight(fields), _flag(fields, "drain"), _epoch(fields))
    if wish.epoch is not None and not wish.drain:
        raise ControlError('an epoch goes with {"drain": true} only')
    return wish


def parse_hub(hub_id: str, value: bytes) -> HubWish:
    """Read a hub's control value. Raise ControlError."""
    fields = _fields(value, '{"revoked": true}')
    for name in fields:
        if name not in ("revoked", "schema"):
            raise ControlError(f"{_shown(name)} is not known for a hub; known is: revoked")
    return HubWish(hub_id, _flag(fields, "revoked"))


def without_drain(value: bytes) -> bytes | None:
    """What is left of a control value when its drain is done: the rest of it, or None if there is no rest."""
    try:
        fields = _fields(value)
    except ControlError:
        return None
    left = {name: field for name, field in fields.items() if name not in ("drain", "epoch")}
    return msgspec.json.encode(left) if left.keys() - {"schema"} else None


def changed_value(current: bytes | None, changes: dict[str, Any]) -> bytes | None:
    """A control value with some of its parts changed, None taking one out; None if no part is left.

    Parts that others wrote stay, unless the value can't be read: then it has no effect and nothing is lost with it.
    """
    fields: dict[str, Any] = {}
    if current is not None:
        try:
            parse(current)
            fields = _fields(current)
        except ControlError:
            fields = {}
    fields = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    return msgspec.json.encode(fields) if fields.keys() - {"schema"} else None


def answered_revision(control_revision: int, control_error: str) -> int:
    """The newest control value that a replica has answered, applied or not."""
    first, _, rest = control_error.partition(" ")
    number = rest.partition(":")[0]
    named = int(number) if first == "revision" and number.isascii() and number.isdigit() and len(number) < 20 else 0
    return max(control_revision, named)


def _answer(revision: int, reason: str) -> str:
    return f"revision {revision}: {reason}"[:1000]


def _fields(value: bytes, example: str = '{"cordon": true}') -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ControlError(f"not JSON ({error}); right would be, for example, {example}") from error
    if not isinstance(fields, dict):
        raise ControlError(f"{_shown(fields)} is no JSON object; right would be, for example, {example}")
    return fields


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ControlError(f"{name} is {_shown(value)}; right would be true or false")
    return value


def _weight(fields: dict[str, Any]) -> float | None:
    if "weight" not in fields:
        return None
    weight = fields["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        raise ControlError(f"weight is {_shown(weight)}; right would be a number from 0 to {MOST_WEIGHT:g}")
    return float(weight)


def _epoch(fields: dict[str, Any]) -> int | None:
    if "epoch" not in fields:
        return None
    epoch = fields["epoch"]
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 < epoch < _MOST_EPOCH:
        raise ControlError(f"epoch is {_shown(epoch)}; right would be the replica's epoch, a whole number")
    return epoch


def _with_epoch(value: bytes, epoch: int) -> bytes:
    return msgspec.json.encode({**_fields(value), "epoch": epoch})


def _shown(value: object) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError, OverflowError):
        return "a value of another kind"
    return text if len(text) <= 80 else f"{text[:77]}..."

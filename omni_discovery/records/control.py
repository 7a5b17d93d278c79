"""Control keys: what an operator wants of one replica or one hub.

The value for a replica is ``{"cordon": true}``, ``{"weight": 0.5}``, ``{"drain": true}``, or several of them in one
object. ``cordon`` and ``weight`` apply while the key exists, to any replica of that id; ``drain`` is for one life. The
value for a hub is ``{"revoked": true}``, which applies while the key exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from omni_discovery.inputs.containers import decode_any
from omni_discovery.kv import KeyValue
from omni_discovery.records.schema import MOST_WEIGHT

_MOST_EPOCH: Final = 1 << 53
_KNOWN: Final = ("cordon", "weight", "drain", "epoch")


class ControlError(ValueError):
    """A control value is not valid; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class ControlSpec:
    """A replica's control value, decoded. ``epoch`` is the life to drain; None: the first that reads the value."""

    cordon: bool = False
    weight: float | None = None
    drain: bool = False
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class HubControlSpec:
    """A hub's control value, decoded. Replicas accept nothing from a revoked hub and send it nothing."""

    hub_id: str
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class AppliedControl:
    """The part of its control key that a replica has applied, as its record shows it."""

    cordoned: bool = False
    #: None: the replica keeps its own weight.
    weight: float | None = None
    #: Whether this life drains. A drain can't be taken back.
    draining: bool = False
    #: The revision of the value that was applied last; 0 while there is none.
    revision: int = 0
    #: Why a value, or a part of it, was not applied, with its revision; empty if it was.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The control to apply. ``bound``: the value to write first, by compare-and-swap; None if none is needed."""

    applied: AppliedControl
    bound: bytes | None = None


def decide(current: KeyValue | None, epoch: int, before: AppliedControl) -> Decision:
    """Decide what a control key, or its absence, means for the life ``epoch`` that has applied ``before``.

    Never raises. A value that can't be read changes nothing but ``error``. A drain without an epoch is bound to this
    life; a process that drains already goes on draining, whatever the key says and whatever its epoch has become.
    """
    if current is None:
        return Decision(AppliedControl(draining=before.draining))
    try:
        spec = parse(current.value)
    except ControlError as error:
        return Decision(replace(before, error=_answer(current.mod_revision, str(error))))
    after = AppliedControl(spec.cordon, spec.weight, before.draining, current.mod_revision)
    if not spec.drain or before.draining:
        return Decision(after)
    if spec.epoch is None:
        return Decision(before, bound=_with_epoch(current.value, epoch))
    if spec.epoch != epoch:
        reason = f"the drain is for epoch {spec.epoch}, this is epoch {epoch}"
        return Decision(replace(after, error=_answer(current.mod_revision, reason)))
    return Decision(replace(after, draining=True))


def parse(value: bytes) -> ControlSpec:
    """Decode a replica's control value. Raise ControlError."""
    fields = _fields(value)
    for name in fields:
        if name not in _KNOWN and name != "schema":
            raise ControlError(f"{_shown(name)} is not known; known are: {', '.join(_KNOWN)}")
    spec = ControlSpec(_flag(fields, "cordon"), _weight(fields), _flag(fields, "drain"), _epoch(fields))
    if spec.epoch is not None and not spec.drain:
        raise ControlError('an epoch goes with {"drain": true} only')
    return spec


def parse_hub(hub_id: str, value: bytes) -> HubControlSpec:
    """Decode a hub's control value. Raise ControlError."""
    fields = _fields(value, '{"revoked": true}')
    for name in fields:
        if name not in ("revoked", "schema"):
            raise ControlError(f"{_shown(name)} is not known for a hub; known is: revoked")
    return HubControlSpec(hub_id, _flag(fields, "revoked"))


def without_drain(value: bytes) -> bytes | None:
    """A control value without its drain; None if nothing else is in it, or it can't be read."""
    try:
        fields = _fields(value)
    except ControlError:
        return None
    left = {name: field for name, field in fields.items() if name not in ("drain", "epoch")}
    return msgspec.json.encode(left) if left.keys() - {"schema"} else None


def changed_value(current: bytes | None, changes: dict[str, Any]) -> bytes | None:
    """A control value with some of its fields changed, None removing one; return None if no field is left.

    Fields that others wrote stay, unless the value can't be read: then it had no effect.
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
        fields = decode_any(value)
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

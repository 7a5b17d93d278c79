"""Control methods of an engine, called in the engine's own thread between two steps.

An engine offers them as ``controls``, a mapping from name to callable; one without that attribute has none. The names
that hubs know are in ``STANDARD``; they mean the same with every engine that has them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.wire import MAX_CONTROL_BYTES, shortened
from stage_runtime.config import ControlRefusedError
from stage_runtime.engine_loop.jobs import SLEEP, Call, Called
from stage_runtime.engines.base import Engine

logger = logging.getLogger(__name__)

#: Every control method that an engine may offer.
STANDARD: Final = (
    "start_profile",
    "stop_profile",
    SLEEP,
    "wake_up",
    "is_sleeping",
    "add_lora",
    "remove_lora",
    "list_loras",
    "pin_lora",
    "reset_prefix_cache",
    "collective_rpc",
)

#: A call that takes longer counts as standing still, whatever its caller has the patience for.
_MAX_CALL_S: Final = 1800.0


class Controls:
    """Runs calls one after the other, in the order in which they came. ``is_idle``: no request is in the engine.

    A call for sleep waits until what runs has ended, and those that came behind it wait with it: nothing new is taken
    meanwhile, and its deadline bounds that. ``on_begin`` is told until when the engine may seem to stand still.
    """

    def __init__(
        self,
        engine: Engine,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
        on_begin: Callable[[float], None],
    ) -> None:
        self._on_begin = on_begin
        self._engine = engine
        self._is_idle = is_idle
        self._clock = clock
        self._waiting: deque[Call] = deque()

    def take(self, call: Call) -> list[Called]:
        """A call has come; what is to be said now."""
        self._waiting.append(call)
        return self.turn()

    def turn(self) -> list[Called]:
        """The engine has made a step; what is to be said now."""
        said: list[Called] = []
        while self._waiting:
            call = self._waiting[0]
            is_late = self._clock() >= call.deadline_s
            if call.method == SLEEP and not is_late and not self._is_idle():
                break
            self._waiting.popleft()
            said.append(_failed(call, _late(call)) if is_late else self._perform(call))
        return said

    def cancel(self, key: str) -> list[Called]:
        """Nobody waits for a call any more. Unknown ones, and those that have run, are fine.

        Those behind it are left to the next turn: they may be cancelled, too.
        """
        for call in self._waiting:
            if call.key == key:
                self._waiting.remove(call)
                return [_failed(call, "ControlRefusedError: nobody waits for it any more")]
        return []

    def _perform(self, call: Call) -> Called:
        self._on_begin(min(call.deadline_s, self._clock() + _MAX_CALL_S))
        return perform(self._engine, call)

    def fail_all(self, reason: str) -> list[Called]:
        """The engine is gone."""
        waiting, self._waiting = self._waiting, deque()
        return fail(waiting, reason)


def fail(calls: Iterable[Call], reason: str) -> list[Called]:
    """The answers to calls that will not run."""
    return [_failed(call, f"EngineDeadError: {reason}") for call in calls]


def perform(engine: Engine, call: Call) -> Called:
    """Call the method. Whatever it raises, returns or is given, only this call fails."""
    methods: Mapping[str, Callable[..., Any]] = getattr(engine, "controls", {})
    method = methods.get(call.method)
    if method is None:
        names = ", ".join(name for name in STANDARD if name in methods) or "none"
        reason = f"this engine has no control method {call.method!r}; there are: {names}"
        return _failed(call, f"ControlRefusedError: {reason}")
    try:
        result = _plain(method(*call.args, **call.kwargs))
    except Exception as error:
        logger.warning("engine.control_failed method=%s", call.method, exc_info=True)
        called = _failed(call, f"{type(error).__name__}: {error}")
    else:
        logger.info("engine.control method=%s", call.method)
        called = Called(call.key, ok=True, result=result)
    if call.method not in (SLEEP, "wake_up"):
        return called
    return msgspec.structs.replace(called, is_asleep=_is_asleep(methods))


def allowed_rpc(names: Sequence[str], find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """A ``collective_rpc`` that reaches only what the operator has named in ``engine_args.allow_rpc``."""

    def collective_rpc(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if name not in names:
            allowed = ", ".join(names) or "nothing"
            raise ControlRefusedError(f"engine_args.allow_rpc of this stage does not name {name!r}, but {allowed}")
        return find(name)(*args, **(kwargs or {}))

    return collective_rpc


def _plain(result: Any) -> msgspec.Raw:
    """The result as msgpack has it: nobody can change it any more, and it is known to fit."""
    encoded = msgspec.msgpack.encode(result)
    if len(encoded) > MAX_CONTROL_BYTES:
        raise ControlRefusedError(f"a result of {len(encoded)} bytes, where {MAX_CONTROL_BYTES} may be said")
    return msgspec.Raw(encoded)


def _is_asleep(methods: Mapping[str, Callable[..., Any]]) -> bool | None:
    # Also after a call that failed: it may have got half of the way.
    try:
        return bool(methods["is_sleeping"]()) if "is_sleeping" in methods else None
    except Exception:
        logger.exception("engine.control_failed method=is_sleeping")
        return None


def _failed(call: Call, error: str) -> Called:
    # What can't be written as UTF-8 can't be said.
    return Called(call.key, ok=False, error=shortened(error).encode("utf-8", "replace").decode())


def _late(call: Call) -> str:
    return f"DeadlineExceededError: the deadline passed before {call.method!r} could begin"

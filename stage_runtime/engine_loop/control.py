"""Control methods of an engine, called in the engine's own thread between two steps.

An engine offers them as ``controls``, a mapping from name to callable; an engine without that attribute has none. The
names that hubs know are in ``CONTROL_METHODS``, and mean the same with every engine that has them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from omni_discovery.log_once import LogOnce
from omni_discovery.wire import MAX_CONTROL_BYTES, shortened
from omni_discovery.wire.containers import MAX_CONTAINERS, has_too_many_containers
from stage_runtime.config import ControlRefusedError
from stage_runtime.engine_loop.jobs import SLEEP, Call, Called
from stage_runtime.engines.base import CONTROL_METHODS
from stage_runtime.engines.capabilities import Capabilities

logger = logging.getLogger(__name__)

#: A call that takes longer counts as a stalled engine, however long its caller would wait.
_MAX_CALL_S: Final = 1800.0
#: How often calls of one method get a line in the log: hubs may call without end.
_LOG_EVERY_S: Final = 1.0


class Controls:
    """Runs control calls one after the other, in the order of their arrival.

    ``is_idle`` says whether no request is in the engine. A call for sleep waits until the running requests have ended,
    and the calls behind it wait with it; its deadline bounds the wait, and no request is accepted meanwhile.
    ``on_begin`` is called before each call, with the moment until which the engine may seem to stand still.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
        on_begin: Callable[[float], None],
    ) -> None:
        self._on_begin = on_begin
        self._capabilities = capabilities
        self._is_idle = is_idle
        self._clock = clock
        self._waiting: deque[Call] = deque()
        self._log_once = LogOnce(clock)

    def accept_call(self, call: Call) -> list[Called]:
        """Queue a call, and run what can run now; the answers of the calls that ended."""
        self._waiting.append(call)
        return self.run_due()

    def run_due(self) -> list[Called]:
        """Run the queued calls that can run now; their answers. Calls past their deadline fail without running."""
        answers: list[Called] = []
        while self._waiting:
            call = self._waiting[0]
            is_late = self._clock() >= call.deadline_s
            if call.method == SLEEP and not is_late and not self._is_idle():
                break
            self._waiting.popleft()
            answers.append(_failed(call, _late(call)) if is_late else self._perform(call))
        return answers

    def cancel_call(self, key: str) -> list[Called]:
        """Drop a queued call whose caller is gone; its answer. Unknown calls, and calls that have run, are ignored.

        The calls behind it are left to the next ``run_due``: they may be cancelled, too.
        """
        for call in self._waiting:
            if call.key == key:
                self._waiting.remove(call)
                return [_failed(call, "ControlRefusedError: nobody waits for it any more")]
        return []

    def _perform(self, call: Call) -> Called:
        self._on_begin(min(call.deadline_s, self._clock() + _MAX_CALL_S))
        return perform(self._capabilities, call, self._log_once)

    def fail_all(self, reason: str) -> list[Called]:
        """The engine is gone: fail every queued call."""
        waiting, self._waiting = self._waiting, deque()
        return fail(waiting, reason)


def fail(calls: Iterable[Call], reason: str) -> list[Called]:
    """The answers to calls that will not run because the engine is dead."""
    return [_failed(call, f"EngineDeadError: {reason}") for call in calls]


def perform(capabilities: Capabilities, call: Call, log_once: LogOnce) -> Called:
    """Call a control method of the engine. Whatever it raises or returns, only this call fails."""
    methods = capabilities.controls()
    method = methods.get(call.method)
    if method is None:
        names = ", ".join(name for name in CONTROL_METHODS if name in methods) or "none"
        reason = f"this engine has no control method {call.method!r}; there are: {names}"
        return _failed(call, f"ControlRefusedError: {reason}")
    try:
        result = _plain(method(*call.args, **call.kwargs))
    except Exception as error:
        if log_once.should(("failed", call.method), _LOG_EVERY_S):
            logger.warning("engine.control_failed method=%s", call.method, exc_info=True)
        called = _failed(call, f"{type(error).__name__}: {error}")
    else:
        if log_once.should(call.method, _LOG_EVERY_S):
            logger.info("engine.control method=%s", call.method)
        called = Called(call.key, ok=True, result=result)
    if call.method not in (SLEEP, "wake_up"):
        return called
    return msgspec.structs.replace(called, is_asleep=_is_asleep(methods))


def _plain(result: Any) -> msgspec.Raw:
    """The result as msgpack: immutable from here on, and known to fit. Raise ControlRefusedError beyond the limit."""
    encoded = msgspec.msgpack.encode(result)
    if len(encoded) > MAX_CONTROL_BYTES:
        raise ControlRefusedError(f"a result of {len(encoded)} bytes, where {MAX_CONTROL_BYTES} may be said")
    if has_too_many_containers(encoded):
        raise ControlRefusedError(f"a result of more than {MAX_CONTAINERS} lists and mappings: return less at once")
    return msgspec.Raw(encoded)


def _is_asleep(methods: Mapping[str, Callable[..., Any]]) -> bool | None:
    # Also after a failed call: it may have changed the state before it raised.
    try:
        return bool(methods["is_sleeping"]()) if "is_sleeping" in methods else None
    except Exception:
        logger.exception("engine.control_failed method=is_sleeping")
        return None


def _failed(call: Call, error: str) -> Called:
    # Lone surrogates can't be encoded as UTF-8.
    return Called(call.key, ok=False, error=shortened(error).encode("utf-8", "replace").decode())


def _late(call: Call) -> str:
    return f"DeadlineExceededError: the deadline passed before {call.method!r} could begin"

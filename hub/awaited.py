"""What one replica still has to answer: the dispatches it has not taken or refused, and the aborts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from hub.config import HubConfig

_Key = tuple[str, int]


class AwaitedDispatches:
    """Lives on the loop. ``on_silence(request_id, attempt, is_final)`` comes twice for a dispatch without an answer.

    First after ``accept_timeout_s``, when another replica might take it, then after ``accept_limit_s``, when it is
    given up.
    """

    def __init__(self, config: HubConfig, on_silence: Callable[[str, int, bool], None]) -> None:
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        #: When each was sent, on the loop's clock.
        self._sent_at_s: dict[_Key, float] = {}
        self._first = _Line(config.accept_timeout_s, self._silent_at_first)
        self._final = _Line(config.accept_limit_s, self._silent_to_the_end)

    def sent(self, key: _Key) -> None:
        """A dispatch has left."""
        now_s = self._loop.time()
        self._sent_at_s[key] = now_s
        self._first.add(now_s, key)

    def answered(self, key: _Key) -> None:
        """The replica has spoken of it. Unknown ones are fine."""
        self._sent_at_s.pop(key, None)

    def forget(self, request_id: str) -> None:
        """Nobody waits for the request's dispatches any more."""
        for key in [key for key in self._sent_at_s if key[0] == request_id]:
            del self._sent_at_s[key]

    def clear(self) -> None:
        """Nobody waits for any."""
        self._sent_at_s.clear()
        self._first.clear()
        self._final.clear()

    def _silent_at_first(self, sent_at_s: float, key: _Key) -> None:
        if self._sent_at_s.get(key) == sent_at_s:
            self._final.add(sent_at_s, key)
            self._on_silence(*key, False)

    def _silent_to_the_end(self, sent_at_s: float, key: _Key) -> None:
        if self._sent_at_s.get(key) == sent_at_s:
            del self._sent_at_s[key]
            self._on_silence(*key, True)


class _Line:
    """Calls ``on_due(sent_at_s, key)`` when so long has passed. All wait equally long, so one timer serves them."""

    def __init__(self, length_s: float, on_due: Callable[[float, _Key], None]) -> None:
        self._length_s = length_s
        self._on_due = on_due
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, _Key]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sent_at_s: float, key: _Key) -> None:
        """Wait with this one, too."""
        self._waiting.append((sent_at_s, key))
        if self._timer is None:
            self._timer = self._loop.call_at(sent_at_s + self._length_s, self._look)

    def clear(self) -> None:
        """Wait for none."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._waiting and self._waiting[0][0] + self._length_s <= now_s:
            self._on_due(*self._waiting.popleft())
        if self._waiting and self._timer is None:
            # Not sooner than the clock can tell apart.
            due_s = max(now_s + 0.001, self._waiting[0][0] + self._length_s)
            self._timer = self._loop.call_at(due_s, self._look)


class AwaitedAborts:
    """Aborts that the replica has not acknowledged, by request, with the attempt up to which it is to stop."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        #: Those of them that nobody waits for any more; said all the same, should the replica come back.
        self._given_up: set[str] = set()

    def __bool__(self) -> bool:
        return len(self._attempts) > len(self._given_up)

    def ask(self, request_id: str, attempt: int) -> None:
        """The request is to stop."""
        self._attempts[request_id] = max(attempt, self._attempts.get(request_id, -1))
        self._given_up.discard(request_id)

    def acknowledged(self, request_id: str, attempt: int) -> bool:
        """The replica has answered; whether that is news and all that was asked."""
        if self._attempts.get(request_id, attempt + 1) > attempt:
            return False
        del self._attempts[request_id]
        was_awaited = request_id not in self._given_up
        self._given_up.discard(request_id)
        return was_awaited

    def open(self) -> list[tuple[str, int]]:
        """What is still to be acknowledged, in the order in which it was asked."""
        return list(self._attempts.items())

    def give_up(self) -> list[str]:
        """There is nobody left to ask: wait for none any more, and say which those are."""
        request_ids = [request_id for request_id in self._attempts if request_id not in self._given_up]
        self._given_up.update(request_ids)
        return request_ids

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
    given up. One timer serves all: each of the two lengths is the same for every dispatch, so both queues are in order.
    """

    def __init__(self, config: HubConfig, on_silence: Callable[[str, int, bool], None]) -> None:
        self._timeout_s = config.accept_timeout_s
        self._limit_s = config.accept_limit_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        #: When each was sent, on the loop's clock.
        self._sent_at_s: dict[_Key, float] = {}
        self._first: deque[tuple[float, _Key]] = deque()
        self._final: deque[tuple[float, _Key]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, key: _Key) -> None:
        """A dispatch has left."""
        now_s = self._loop.time()
        self._sent_at_s[key] = now_s
        self._first.append((now_s, key))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for queue, length_s, is_final in ((self._first, self._timeout_s, False), (self._final, self._limit_s, True)):
            while queue and queue[0][0] + length_s <= now_s:
                sent_at_s, key = queue.popleft()
                if self._sent_at_s.get(key) != sent_at_s:
                    continue
                if is_final:
                    del self._sent_at_s[key]
                else:
                    self._final.append((sent_at_s, key))
                self._on_silence(*key, is_final)
        self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        for queue in (self._first, self._final):
            while queue and self._sent_at_s.get(queue[0][1]) != queue[0][0]:
                queue.popleft()
        due_s = [
            queue[0][0] + length_s
            for queue, length_s in ((self._first, self._timeout_s), (self._final, self._limit_s))
            if queue
        ]
        if due_s and self._timer is None:
            self._timer = self._loop.call_later(max(0.001, min(due_s) - now_s), self._look)


class AwaitedAborts:
    """Aborts that the replica has not acknowledged, by request, with the attempt up to which it is to stop."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def ask(self, request_id: str, attempt: int) -> None:
        """The request is to stop."""
        self._attempts[request_id] = max(attempt, self._attempts.get(request_id, -1))

    def acknowledged(self, request_id: str, attempt: int) -> bool:
        """The replica has answered; whether that is news and all that was asked."""
        if self._attempts.get(request_id, attempt + 1) > attempt:
            return False
        del self._attempts[request_id]
        return True

    def open(self) -> list[tuple[str, int]]:
        """What is still to be acknowledged, in the order in which it was asked."""
        return list(self._attempts.items())

    def give_up(self) -> list[str]:
        """There is nobody left to ask: forget all, and say which."""
        request_ids = list(self._attempts)
        self._attempts.clear()
        return request_ids

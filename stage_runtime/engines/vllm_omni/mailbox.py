"""What goes between vLLM-Omni's threads and the engine's: payloads of earlier stages in, payloads for later stages out.

vLLM-Omni makes several connector objects for one stage, in its scheduler and in its model runner, each used by threads
of its own. All of them share the stage's one mailbox. Payloads are copied on their way: the reader of one writes into
it, and the writer of one may go on using its tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Sent:
    """One payload for the next stage: all of a request's (number 0), or its piece of that number.

    ``flaw`` says why it can't be handed over; then there is no payload.
    """

    name: str
    number: int
    payload: Mapping[str, Any]
    flaw: str = ""


class Mailbox:
    """The payloads of one stage's requests, by the names that the engine gave them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Payloads that vLLM-Omni has not fetched yet, by its keys.
        self._inbox: dict[str, Any] = {}
        self._outbox: deque[Sent] = deque()

    def put(self, key: str, payload: Mapping[str, Any]) -> None:
        """Take a payload for the next stage. Never raises: vLLM-Omni would only log it, and the request would hang."""
        name, _, number = key.rsplit("_", 2)
        try:
            sent = Sent(name, int(number), copied(payload))
        except (TypeError, RuntimeError) as error:
            sent = Sent(name, int(number), {}, flaw=f"{type(error).__name__}: {error}")
        with self._lock:
            self._outbox.append(sent)

    def get(self, key: str) -> Any:
        """The payload that vLLM-Omni asks for, its own to keep; None if it is not there yet."""
        with self._lock:
            return self._inbox.pop(key, None)

    def offer(self, name: str, from_stage: int, number: int, payload: Mapping[str, Any]) -> None:
        """Have a payload of an earlier stage ready. Raise TypeError for one that holds anything but plain values."""
        mine = copied(payload)
        with self._lock:
            self._inbox[f"{name}_{from_stage}_{number}"] = mine

    def sent(self) -> list[Sent]:
        """The payloads for the next stage since the last call, in order."""
        with self._lock:
            found = list(self._outbox)
            self._outbox.clear()
        return found

    @property
    def has_unread(self) -> bool:
        """Whether vLLM-Omni has yet to fetch something."""
        with self._lock:
            return bool(self._inbox)

    def unread(self, name: str) -> int:
        """How many payloads of a request vLLM-Omni has yet to fetch."""
        prefix = f"{name}_"
        with self._lock:
            return sum(key.startswith(prefix) for key in self._inbox)

    def forget(self, name: str) -> None:
        """Drop what is left of a request that is over."""
        prefix = f"{name}_"
        with self._lock:
            for key in [key for key in self._inbox if key.startswith(prefix)]:
                del self._inbox[key]


#: Types whose values nobody can change.
_PLAIN: Final = frozenset((int, float, bool, str))


def copied(value: Any) -> Any:
    """A deep copy of plain values, arrays and tensors, the latter on the CPU and with their dtype.

    Raise TypeError for anything else: it could not be handed over.
    """
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= _PLAIN:
            return list(value)
        return [copied(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):
        return value.detach().cpu().contiguous().clone()
    raise TypeError(f"a {type(value).__name__} can't be handed over")

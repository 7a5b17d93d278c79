"""The control methods of the echo engine: what they would change is only remembered."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stage_runtime.control import allowed_rpc


class EchoControls:
    """``delay_s`` is what each call takes, ``allow_rpc`` those of ``pid``, ``say`` and ``fail`` that may be called."""

    def __init__(self, allow_rpc: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._is_asleep = self._is_profiling = False
        #: Paths by adapter id.
        self._loras: dict[int, str] = {}
        self._rpcs: dict[str, Callable[..., Any]] = {"pid": os.getpid, "say": _say, "fail": _fail}
        found: dict[str, Callable[..., Any]] = {
            "start_profile": lambda _prefix=None: self._profile(True),
            "stop_profile": lambda: self._profile(False),
            "sleep": lambda level=1: self._sleep(level),
            "wake_up": self._wake_up,
            "is_sleeping": lambda: self._is_asleep,
            "add_lora": self._add_lora,
            "remove_lora": lambda lora_id: self._loras.pop(lora_id, None) is not None,
            "list_loras": lambda: sorted(self._loras),
            "collective_rpc": allowed_rpc(allow_rpc, self._rpcs.__getitem__),
        }
        #: See ControlEngine.
        self.methods: Mapping[str, Callable[..., Any]] = {
            name: method if name == "is_sleeping" else self._slowly(method) for name, method in found.items()
        }

    def _slowly(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._delay_s)
            return method(*args, **kwargs)

        return slow

    def _profile(self, on: bool) -> None:
        if on is self._is_profiling:
            raise RuntimeError("a profile is being made already" if on else "no profile is being made")
        self._is_profiling = on

    def _sleep(self, level: int) -> None:
        if level not in (0, 1, 2):
            raise ValueError(f"the level of sleep is 0, 1 or 2, not {level!r}")
        self._is_asleep = True

    def _wake_up(self, tags: Sequence[str] | None = None) -> None:
        if isinstance(tags, str):
            raise TypeError("the tags are a list")
        self._is_asleep = False

    def _add_lora(self, name: str, lora_id: int | None, path: str, _more: Mapping[str, Any] | None = None) -> bool:
        if not name or (lora_id is not None and lora_id < 1):
            raise ValueError("an adapter has a name and an id above 0")
        if lora_id is None:
            lora_id = max(self._loras, default=0) + 1
        is_new = lora_id not in self._loras
        self._loras[lora_id] = path
        return is_new


def _say(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


def _fail(reason: str = "it was told to") -> None:
    raise RuntimeError(reason)

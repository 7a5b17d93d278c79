"""The process that is a hub's Mooncake client. Its standard input is the socket to its hub.

A process of its own, since the library may wait for half a minute, ends its process by its own decisions, and opens a
port by which its peers may read and write its memory. It gives no memory to the store, and sees encrypted bytes only.
It ends with its hub.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import threading
from typing import Any, Final

import msgspec

from hub.jobs.mooncake.frames import StoreAnswer, StoreCall, receive, send
from hub.jobs.mooncake.names import MOST_OBJECT_BYTES

#: Where objects are on their way to and from the store.
_BUFFER_BYTES: Final = 16 << 20
#: Each object is kept by so many store processes, or by as many as there are.
_COPIES: Final = 2
#: The master may choose the memory of a store process that died lately.
_TRIES: Final = 3
#: Error codes of the library.
_FULL, _NOT_MOVED = -200, -800
_DIRECTLY: Final = "P2PHANDSHAKE"
_INPUT: Final = 0


class _Store:
    """The library's store, of one master."""

    def __init__(self, library: Any, master: str, own: str) -> None:
        self._master = master
        self._store = library.MooncakeDistributedStore()
        #: Not evicted: a job may be asked for until it expires.
        self._config = library.ReplicateConfig()
        self._config.with_hard_pin = True
        self._config.replica_num = _COPIES
        self.failed = self._store.setup(own, _DIRECTLY, 0, _BUFFER_BYTES, "tcp", "", master)

    def answer(self, call: StoreCall) -> StoreAnswer:
        match call.kind:
            case "put":
                return self._put(call.name, call.content)
            case "get":
                return self._get(call.name)
            case _:
                return self._remove(call.name)

    def _put(self, name: str, content: bytes) -> StoreAnswer:
        there = self._store.is_exist(name)
        if there < 0:
            return self._lost(there)
        if there:
            # An object is never overwritten: the call would succeed, and nothing be changed.
            self._store.remove(name, True)
        for _ in range(_TRIES):
            code = self._store.put(name, content, self._config)
            if code != _NOT_MOVED:
                break
        if code == _FULL:
            return StoreAnswer(error="it has no room: its store processes are gone, or give it too little memory")
        if code == _NOT_MOVED:
            return StoreAnswer(error="a store process does not answer")
        if code:
            return self._lost(code)
        # 0 is also the answer where another client was killed while it wrote an object of this name.
        there = self._store.is_exist(name)
        return StoreAnswer(there) if there >= 0 else self._lost(there)

    def _get(self, name: str) -> StoreAnswer:
        there = self._store.is_exist(name)
        if there < 0:
            return self._lost(there)
        if not there:
            return StoreAnswer()
        content = self._store.get_buffer(name)
        if content is None:
            return StoreAnswer(error="a store process does not answer")
        if content.size() > MOST_OBJECT_BYTES:
            return StoreAnswer(error="an object there is none that a hub has written")
        return StoreAnswer(1, bytes(memoryview(content)))

    def _remove(self, pattern: str) -> StoreAnswer:
        count = self._store.remove_by_regex(pattern, True)
        return StoreAnswer(count) if count >= 0 else self._lost(count)

    def _lost(self, code: int) -> StoreAnswer:
        return StoreAnswer(error=f"its master at {self._master} does not answer ({code})", is_lost=True)


def main() -> None:
    """Serve one hub until it is gone."""
    end = socket.socket(fileno=_INPUT)
    threading.Thread(target=_end_with_hub, args=(end.fileno(),), daemon=True).start()
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        send(end, StoreAnswer(error=str(error)))
        return
    send(end, StoreAnswer())
    store = None
    while True:
        try:
            call = msgspec.msgpack.decode(receive(end), type=StoreCall)
        except ConnectionError:
            return
        if call.kind == "connect":
            store = _Store(library, call.name, call.own)
            answer = StoreAnswer(error=f"it does not take this hub ({store.failed})", is_lost=True)
            send(end, answer if store.failed else StoreAnswer())
        elif store is not None:
            send(end, store.answer(call))


def _end_with_hub(descriptor: int) -> None:
    """End this process, whatever it is doing, when the hub's side of the socket is gone."""
    gone = select.poll()
    gone.register(descriptor, select.POLLHUP)
    gone.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
    # The library's own end takes seconds, and may fail.
    os._exit(0)

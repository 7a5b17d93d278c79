"""What an operator does to one replica from the dashboard: its control key, as omni cordon, weight and drain write it.

Under ``omni demo --keep``, its process is killed, too: by the demo, which the hub asks over a socket that it was given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from omni_discovery.commands.operate import (
    OperationFailedError,
    OperatorAction,
    Target,
    act,
    is_last_to_serve,
    must_be_registered,
)
from omni_discovery.commands.registry import ANSWER_S
from omni_discovery.errors import ConfigError, InvalidRequestError, RegistryDeniedError
from omni_discovery.records.schema import MOST_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_discovery.kv import KVCalls
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

_KILL_S: Final = 5.0
_LINE_BYTES: Final = 4096


class ActionName(StrEnum):
    """What can be done to a replica."""

    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    WEIGHT = "weight"
    KILL = "kill"


class ActionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of an action. ``epoch`` is the life that is meant."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    #: Of WEIGHT; None: its own weight again.
    weight: Annotated[float, msgspec.Meta(ge=0, le=MOST_WEIGHT)] | None = None
    #: Whether it is to be done though nobody else serves the stage.
    sure: bool = False


class NotSureError(InvalidRequestError):
    """The action leaves a stage without anybody: it has to be asked for once more."""

    def __init__(self, target: Target) -> None:
        text = f"no other replica of stage {target.stage_id} takes work: requests for it wait, and then get a 503"
        super().__init__(text, 409)


class ReplicaActions:
    """Carries actions out, one at a time. ``calls`` gives the registry, ``killer`` ends processes in a demo."""

    def __init__(self, calls: Callable[[], KVCalls], namespace: str, killer: DemoKiller | None = None) -> None:
        self._calls = calls
        self._namespace = namespace
        self._killer = killer
        self._lock = asyncio.Lock()

    @property
    def can_kill(self) -> bool:
        """Whether replicas can be killed: in a demo alone."""
        return self._killer is not None

    async def carry_out(self, stage_id: int, replica_id: int, name: ActionName, body: ActionBody) -> str:
        """Do it; return what was done, as a sentence. Raise OmniError."""
        target, kv = Target(self._namespace, stage_id, replica_id), self._calls()
        try:
            async with self._lock:
                before = await must_be_registered(kv, target)
                if before.epoch != body.epoch:
                    text = f"replica {target} is another process by now (epoch {before.epoch}): look again"
                    raise InvalidRequestError(text, 409)
                await self._check_last(kv, target, before, name, body)
                return await self._do(kv, target, before, name, body)
        except RegistryDeniedError as error:
            text = f"the etcd user of this hub may not do that ({error}): as an operator, omni {name} {target}"
            raise OperationFailedError(text) from error
        except ConfigError as error:
            raise InvalidRequestError(str(error), 404) from error

    async def _check_last(
        self, kv: KVCalls, target: Target, before: ReplicaInfo, name: ActionName, body: ActionBody
    ) -> None:
        takes_away = name in (ActionName.CORDON, ActionName.DRAIN) or (name is ActionName.WEIGHT and body.weight == 0)
        if takes_away and not body.sure and before.takes_new_work and await is_last_to_serve(kv, target):
            raise NotSureError(target)

    async def _do(self, kv: KVCalls, target: Target, before: ReplicaInfo, name: ActionName, body: ActionBody) -> str:
        if name is not ActionName.KILL:
            return await act(kv, target, before, OperatorAction(name), body.weight, ANSWER_S)
        if self._killer is None:
            raise InvalidRequestError("only a demo kills its replicas: omni demo --keep", 403)
        return await self._killer.kill(before)


class DemoKiller:
    """The hub's end of a socket to the demo that has started it: a line each way for each replica to kill."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError as error:
            raise ConfigError(f"--demo-fd {descriptor} is no socket: only omni demo gives it") from error
        # No child of the hub is to have it.
        os.set_inheritable(descriptor, False)
        self._socket.setblocking(False)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    async def kill(self, info: ReplicaInfo) -> str:
        """Have the process of a replica killed. Raise OperationFailedError if the demo does not do it."""
        loop = asyncio.get_running_loop()
        line = {"stage_id": info.stage_id, "replica_id": info.replica_id, "pid": info.pid}
        try:
            async with asyncio.timeout(_KILL_S):
                await loop.sock_sendall(self._socket, msgspec.json.encode(line) + b"\n")
                answer = b""
                while not answer.endswith(b"\n") and len(answer) < _LINE_BYTES:
                    more = await loop.sock_recv(self._socket, _LINE_BYTES)
                    if not more:
                        raise OperationFailedError("the demo is gone")
                    answer += more
        except (OSError, TimeoutError) as error:
            raise OperationFailedError(f"the demo does not answer: {error!r}") from error
        if problem := msgspec.json.decode(answer, type=dict[str, str]).get("error"):
            raise OperationFailedError(problem)
        return f"killed replica {info.name} (process {info.pid}) with SIGKILL"

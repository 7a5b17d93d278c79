"""WaitBoard: shows in the registry what this process waits for, so that ``omni doctor`` sees it from any machine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import os
import platform
import time
import uuid
from collections.abc import Sequence
from typing import Final

from omni_discovery.backoff import wait_for_event
from omni_discovery.clock import SystemClock
from omni_discovery.errors import RegistryError
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.log_once import LogOnce
from omni_discovery.loop_thread import LoopThread
from omni_discovery.records.keys import wait_key
from omni_discovery.records.waits import HAS_ENDED, WaitEntry, WaitKind, WaitRecord, encode_waits
from omni_discovery.stories import Wait

logger = logging.getLogger(__name__)

#: A wait that is over sooner is not shown.
_SHOWN_AFTER_S: Final = 1.0
#: A key that is not written again is gone after that: its process has ended, or does not reach etcd.
_TTL_S: Final = 15.0
_WRITE_EVERY_S: Final = 5.0
_CALL_S: Final = 4.0
#: How long an ending process waits until its key is removed.
_CLOSE_S: Final = 1.0
#: Why a supervisor has ended is shown for so long, and an ending one takes so long at most to write it.
_LAST_WORDS_TTL_S: Final = 3600.0
_LAST_WORDS_S: Final = 2.0
_MOST_REASON: Final = 1000


class WaitBoard:
    """Writes one leased key while the process waits, and removes it afterwards. Used by one thread; never raises.

    Its thread is started by the first wait. What etcd does not take, since it can't be reached or the user may not
    write there, is seen only on this machine.
    """

    def __init__(self, endpoints: str, namespace: str, security: RegistrySecurity | None = None) -> None:
        self._endpoints = endpoints
        self._security = security
        self._key = wait_key(namespace, uuid.uuid4().hex)
        self._thread: LoopThread | None = None
        #: The three below belong to the thread.
        self._waits: Sequence[Wait] = ()
        self._wake: asyncio.Event | None = None
        self._writing: asyncio.Task[None] | None = None
        self._log_once = LogOnce()

    def show(self, waits: Sequence[Wait]) -> None:
        """These are the waits from now on; none: nothing is shown. Returns at once."""
        if self._thread is None:
            if not waits:
                return
            try:
                self._thread = LoopThread("omni-waits")
            except (OSError, RuntimeError) as error:
                # Without a descriptor or a thread left for it. The next change of the waits tries again.
                if self._log_once.should():
                    logger.info("waits.not_shown key=%s reason=%s: seen only on this machine", self._key, error)
                return
        with contextlib.suppress(RuntimeError):
            self._thread.call(self._change, tuple(waits))

    def close(self) -> None:
        """Remove the key, for which etcd has a second, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError, RuntimeError):
            thread.run(self._end(), _CLOSE_S)
        thread.close(_CLOSE_S)
        self._waits, self._wake, self._writing = (), None, None

    def _change(self, waits: Sequence[Wait]) -> None:
        self._waits = waits
        if self._wake is None:
            self._wake = asyncio.Event()
            self._writing = asyncio.create_task(self._write_all(self._wake), name="waits")
        self._wake.set()

    async def _end(self) -> None:
        self._waits = ()
        if self._wake is not None and self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_all(self, wake: asyncio.Event) -> None:
        """Keep the key as the waits are, until this is cancelled."""
        kv = EtcdKV(self._endpoints, security=self._security, try_timeout_s=_CALL_S / 2, call_timeout_s=_CALL_S)
        is_shown, clock = False, SystemClock()
        try:
            while True:
                pause_s: float | None = None
                if self._waits:
                    pause_s = _SHOWN_AFTER_S - (time.time() - min(wait.since_s for wait in self._waits))
                    # A clock that was set back must not hide a wait.
                    pause_s = min(pause_s, _SHOWN_AFTER_S)
                wake.clear()
                try:
                    if pause_s is not None and pause_s <= 0:
                        is_shown, pause_s = True, _WRITE_EVERY_S
                        await self._write(kv)
                    elif is_shown and not self._waits:
                        await kv.delete(self._key)
                        is_shown = False
                except RegistryError as error:
                    pause_s = _WRITE_EVERY_S
                    if self._log_once.should():
                        logger.info("waits.not_shown key=%s reason=%s: seen only on this machine", self._key, error)
                await wait_for_event(wake, clock, pause_s)
        finally:
            if is_shown:
                with contextlib.suppress(RegistryError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_S / 2):
                        await kv.delete(self._key)
            await kv.close()

    async def _write(self, kv: EtcdKV) -> None:
        """Write the key under a lease of its own: that of the last write then ends by itself, without the key."""
        entries = [
            WaitEntry(who=wait.who, reason=wait.reason, since=wait.since_s, kind=wait.kind, stage_id=wait.stage_id)
            for wait in self._waits
        ]
        record = WaitRecord(host=platform.node(), pid=os.getpid(), waits=entries)
        grant = await kv.grant(_TTL_S)
        await kv.put(self._key, encode_waits(record), grant.lease_id)


def leave_last_words(
    endpoints: str, namespace: str, stage_id: int, reason: str, security: RegistrySecurity | None = None
) -> None:
    """Show for an hour why the supervisor of a stage ends on this host: nothing else tells other machines.

    Blocks for two seconds at most, and never raises. The next one of this host and stage writes the same key.
    """
    try:
        asyncio.run(_leave_last_words(endpoints, namespace, stage_id, reason, security))
    except Exception as error:  # noqa: BLE001 - the process ends for another reason, which is the one to be seen
        logger.debug("waits.no_last_words stage=%d reason=%s", stage_id, error)


async def _leave_last_words(
    endpoints: str, namespace: str, stage_id: int, reason: str, security: RegistrySecurity | None
) -> None:
    host = platform.node()
    entry = WaitEntry(
        who=f"the supervisor of stage {stage_id}",
        reason=f"{HAS_ENDED}: {reason}"[:_MOST_REASON],
        since=time.time(),
        kind=WaitKind.REFUSED,
        stage_id=stage_id,
    )
    record = WaitRecord(host=host, pid=os.getpid(), waits=[entry])
    name = hashlib.sha256(f"{host}\0{stage_id}".encode()).hexdigest()[:32]
    async with asyncio.timeout(_LAST_WORDS_S):
        kv = EtcdKV(endpoints, security=security, try_timeout_s=_LAST_WORDS_S, call_timeout_s=0.1)
        try:
            grant = await kv.grant(_LAST_WORDS_TTL_S)
            await kv.put(wait_key(namespace, name), encode_waits(record), grant.lease_id)
        finally:
            await kv.close()

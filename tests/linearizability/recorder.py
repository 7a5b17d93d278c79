"""Records what running clients ask of etcd and hear from it, and makes of that one history for each key."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from omni_discovery.errors import LeaseNotFoundError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.kv import Claim, KeyValue, LeaseGrant, Listing
from omni_discovery.kv import Held as Condition
from tests.linearizability.models import Answer, Held, Write
from tests.linearizability.search import Operation

_Result = TypeVar("_Result")

#: Attempts of the call under way whose outcome nobody knows; set while a write is.
_UNANSWERED: ContextVar[list[str] | None] = ContextVar("unanswered", default=None)


class Recorder:
    """Operations of one kind of object, by its name. May be used from any thread."""

    def __init__(self) -> None:
        self._operations: dict[str, list[Operation]] = defaultdict(list)

    def add(self, subject: str, operation: Operation) -> None:
        """Note one operation on ``subject``."""
        self._operations[subject].append(operation)

    def histories(self) -> dict[str, list[Operation]]:
        """What was noted so far, by subject."""
        return {subject: list(operations) for subject, operations in list(self._operations.items())}

    async def record(
        self, subject: str, client: str, name: str, argument: Any, work: Awaitable[_Result]
    ) -> _Result | None:
        """Note a read or write of something made of several calls; of unknown outcome where one failed."""
        called_s = time.monotonic()
        try:
            result = await work
        except (RegistryUnavailableError, TimeoutError):
            if name != "read":
                self.add(subject, Operation(client, name, argument, called_s))
            return None
        self.add(subject, Operation(client, name, argument, called_s, time.monotonic(), result))
        return result


class RecordedKV:
    """One client's connection, as it is, and every call of it noted under the keys that it is about."""

    def __init__(self, kv: Any, client: str, log: KeyLog) -> None:
        self._kv = kv
        self._client = client
        self._log = log
        try_once = kv._try_once

        async def noted(method: Any, request: Any) -> Any:
            try:
                return await try_once(method, request)
            except RegistryUnavailableError as error:
                unanswered = _UNANSWERED.get()
                if unanswered is not None and error.may_have_run:
                    unanswered.append(str(error))
                raise

        kv._try_once = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See KVStore."""
        write = Write(value, lease_id)
        return await self._write(
            key, write, self._kv.put(key, value, lease_id), lambda revision: Answer(True, revision=revision)
        )

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        """See KVStore."""
        write = Write(value, lease_id, expected=0)
        return await self._write(key, write, self._kv.create(key, value, lease_id, also_read=also_read), _of_claim)

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Condition | None = None
    ) -> Claim:
        """See KVStore."""
        assert held is None, "the model of a key has no conditions on other keys"
        write = Write(value, lease_id, expected=mod_revision)
        return await self._write(key, write, self._kv.compare_and_put(key, value, mod_revision, lease_id), _of_claim)

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        """See KVStore."""
        write = Write(expected=mod_revision or None)
        return await self._write(key, write, self._kv.delete(key, mod_revision), Answer)

    async def get(self, key: str) -> KeyValue | None:
        """See KVStore."""
        called_s = time.monotonic()
        item: KeyValue | None = await self._kv.get(key)
        self._log.read(self._client, key, called_s, item)
        return item

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """See KVStore."""
        called_s = time.monotonic()
        listing: Listing = await self._kv.list(prefix, keys_only=keys_only)
        if not keys_only:
            self._log.read_all(self._client, prefix, called_s, listing)
        return listing

    async def list_key(self, key: str) -> Listing:
        """See KVStore."""
        called_s = time.monotonic()
        listing: Listing = await self._kv.list_key(key)
        self._log.read(self._client, key, called_s, listing.items[0] if listing.items else None)
        return listing

    async def grant(self, ttl_s: float) -> LeaseGrant:
        """See KVStore."""
        called_s = time.monotonic()
        grant: LeaseGrant = await self._kv.grant(ttl_s)
        self._log.renewed(grant.lease_id, called_s + grant.ttl_s)
        return grant

    async def keep_alive(self, lease_id: int) -> float:
        """See KVStore."""
        called_s = time.monotonic()
        ttl_s: float = await self._kv.keep_alive(lease_id)
        self._log.renewed(lease_id, called_s + ttl_s)
        return ttl_s

    async def revoke(self, lease_id: int) -> None:
        """See KVStore."""
        called_s, returned_s = time.monotonic(), None
        try:
            await self._kv.revoke(lease_id)
            returned_s = time.monotonic()
        finally:
            self._log.revoked(self._client, lease_id, called_s, returned_s)

    async def _write(
        self, key: str, write: Write, work: Awaitable[_Result], answer_of: Callable[[_Result], Answer]
    ) -> _Result:
        called_s = time.monotonic()
        unanswered: list[str] = []
        _UNANSWERED.set(unanswered)
        try:
            result = await work
        except (LeaseNotFoundError, RegistryRefusedError):
            raise
        except (RegistryUnavailableError, TimeoutError, asyncio.CancelledError) as error:
            # What says that it can't have run is taken at its word: the search finds out whether that is true.
            if getattr(error, "may_have_run", True):
                self._log.write(self._client, key, write, called_s, None, None)
            raise
        self._log.write(self._client, key, write, called_s, time.monotonic(), answer_of(result))
        if unanswered and write.expected == 0:
            # The network may deliver such an attempt at any time, and a key that is deleted meanwhile is made again.
            self._log.late_attempt(self._client, key, write, called_s)
        return result


class KeyLog:
    """What is known of each key. May be used from any thread."""

    def __init__(self) -> None:
        self._of_keys: dict[str, list[Operation]] = defaultdict(list)
        self._lists: list[tuple[str, float, float, str, dict[str, KeyValue]]] = []
        #: Until when etcd has promised each lease, and who has ended it.
        self._promised_s: dict[int, float] = {}
        self._revoked: list[tuple[str, int, float, float | None]] = []
        #: Creates that were sent again though the first attempt may have run.
        self.late_attempts = 0

    def write(
        self, client: str, key: str, write: Write, called_s: float, returned_s: float | None, answer: Answer | None
    ) -> None:
        """A write of one key."""
        self._of_keys[key].append(Operation(client, "write", write, called_s, returned_s, answer))

    def late_attempt(self, client: str, key: str, write: Write, called_s: float) -> None:
        """An attempt of a write that was made by another attempt of it, or could not be: it may take effect, too."""
        self.late_attempts += 1
        self.write(f"{client}, late", key, write, called_s, None, None)

    def read(self, client: str, key: str, called_s: float, item: KeyValue | None) -> None:
        """A read of one key."""
        self._of_keys[key].append(Operation(client, "read", None, called_s, time.monotonic(), _held(item)))

    def read_all(self, client: str, prefix: str, called_s: float, listing: Listing) -> None:
        """A read of all keys under a prefix."""
        self._lists.append((prefix, called_s, time.monotonic(), client, {item.key: item for item in listing.items}))

    def renewed(self, lease_id: int, until_s: float) -> None:
        """etcd has promised a lease until then."""
        self._promised_s[lease_id] = max(until_s, self._promised_s.get(lease_id, until_s))

    def revoked(self, client: str, lease_id: int, called_s: float, returned_s: float | None) -> None:
        """Somebody wanted a lease to end."""
        self._revoked.append((client, lease_id, called_s, returned_s))

    def histories(self, *, are_leases_kept: bool = True) -> dict[str, list[Operation]]:
        """One history for each key: its reads and writes, the lists it should be in, and the ends of its leases.

        ``are_leases_kept``: no lease ended while etcd had promised it.
        """
        # What a closed connection left behind may still be noted.
        found = {key: list(operations) for key, operations in list(self._of_keys.items())}
        lists = list(self._lists)
        for _, _, _, _, items in lists:
            for key in items:
                found.setdefault(key, [])
        for prefix, called_s, returned_s, client, items in lists:
            for key, operations in found.items():
                if key.startswith(prefix):
                    operations.append(Operation(client, "read", None, called_s, returned_s, _held(items.get(key))))
        for operations in found.values():
            operations.extend(self._ends(_leases_in(operations), self._promised_s if are_leases_kept else {}))
        return found

    def _ends(self, leases: set[int], promised_s: dict[int, float]) -> list[Operation]:
        ends = [
            Operation(client, "write", Write(ends=lease_id), called_s, returned_s, Answer(True))
            for client, lease_id, called_s, returned_s in list(self._revoked)
            if lease_id in leases
        ]
        # A lease ends by itself, but not while etcd has promised it; and perhaps never.
        return ends + [
            Operation("etcd", "write", Write(ends=lease_id), promised_s.get(lease_id, 0.0)) for lease_id in leases
        ]


def _leases_in(operations: list[Operation]) -> set[int]:
    leases = {each.argument.lease_id for each in operations if each.name == "write"}
    leases |= {each.result.lease_id for each in operations if each.name == "read" and each.result is not None}
    return leases - {0}


def _held(item: KeyValue | None) -> Held | None:
    return None if item is None else Held(item.value, item.create_revision, item.mod_revision, item.lease_id)


def _of_claim(claim: Claim) -> Answer:
    return Answer(claim.won, _held(claim.current), True)

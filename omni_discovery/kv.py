"""KVStore: the small part of etcd that the project needs, as a protocol.

``EtcdKV`` (etcd/store.py) is a client of a server, ``FakeKV`` (testing.py) lives in memory; both pass the same contract
suite. Keys are text, values bytes; what a namespace holds that is longer than any record (records/sizes.py) comes cut.
Every method may raise RegistryUnavailableError or RegistryRefusedError.
An instance belongs to the event loop that it was opened on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as the server holds it. ``create_revision`` is what the project calls the epoch of a record."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease as the server granted it: ``ttl_s`` may be longer than the requested TTL."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class LeaseTime:
    """How long a lease has left, and how long it has after a renewal; ``left_s`` is rounded down to whole seconds."""

    left_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """A condition of a write: ``key`` is there, and attached to this lease. It fails for lease 0."""

    key: str
    lease_id: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under a prefix at one revision, in key order. ``cluster_id`` differs between etcd histories."""

    revision: int
    cluster_id: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a create-only or compare-and-swap write.

    ``won``: our value was written; ``current`` is the key as it is now (None if it does not exist). Where an
    answer was lost on the way, ``current`` may be the key as our write left it, and of two that write the same value at
    the same moment, both without a lease, both may be told that they have won.
    """

    won: bool
    revision: int
    current: KeyValue | None
    #: The key that was read beside it, by the same transaction; None if none was to be read.
    also_read: Listing | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a prefix, cheap to read: the number of its keys, and the revision of the latest write."""

    count: int
    max_mod_revision: int


@dataclass(frozen=True, slots=True)
class FirstKeys:
    """The first keys under a prefix, with empty values, and the number of all; as cheap among many as among few."""

    items: tuple[KeyValue, ...]
    count: int


@dataclass(frozen=True, slots=True)
class PutEvent:
    """A key was written."""

    item: KeyValue


@dataclass(frozen=True, slots=True)
class DeleteEvent:
    """A key was deleted or its lease ended, at ``mod_revision``."""

    key: str
    mod_revision: int


WatchEvent = PutEvent | DeleteEvent


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events of one answer, in revision order; empty for a progress notification.

    Every event up to ``revision`` has been delivered. The first batch of every watch is empty: the watch is open.
    """

    revision: int
    events: Sequence[WatchEvent]


class KVCalls(Protocol):
    """The calls of a KVStore that concern keys and no lease or watch."""

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Write a key, attached to the lease if one is given; return the revision. Raise LeaseNotFoundError."""

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        """Write a key only if it does not exist; read the key ``also_read`` by the same transaction, won or not.

        Raise LeaseNotFoundError; RegistryDeniedError also if only the reading is denied. Then nothing is written.
        """

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        """Write a key only if it still is at ``mod_revision``, and with ``held`` only while that holds.

        Raise LeaseNotFoundError.
        """

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        """Delete a key, with ``mod_revision`` only if it still is at that revision; return whether it was deleted."""

    async def get(self, key: str) -> KeyValue | None:
        """Read one key; None if it does not exist."""

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """Read all keys under a prefix, however many, at one revision; with ``keys_only`` all values are empty."""

    async def summary(self, prefix: str) -> Summary:
        """Count the keys under a prefix, without reading their values."""


class KVStore(KVCalls, Protocol):
    """The interface of etcd for the registry's drivers: leases, transactions, lists, watches."""

    async def grant(self, ttl_s: float) -> LeaseGrant:
        """Create a lease of at least ``ttl_s`` seconds."""

    async def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; return its new TTL in seconds. Raise LeaseNotFoundError only if the server answers so."""

    async def lease_time(self, lease_id: int) -> LeaseTime | None:
        """How long a lease has left; None for one that is gone. It renews nothing."""

    async def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys. Does nothing for a lease that is gone."""

    async def first_keys(self, prefix: str, limit: int) -> FirstKeys:
        """Read the first ``limit`` keys under a prefix, without their values, and count all of them."""

    async def list_key(self, key: str) -> Listing:
        """Read one key: a listing of that key alone, or of none, with the revision at which it was read."""

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield all changes under a prefix from ``start_revision`` on.

        Ends only by an error: CompactedError (list again), RegistryUnavailableError (list again later) or
        RegistryRefusedError. Closing the generator ends the watch.
        """

    def watch_key(self, key: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield all changes of one key, and of no key that only begins like it. Else as ``watch``."""

    def move_on(self) -> None:
        """Use another endpoint from now on, if there is one: the present one answers, but is behind."""

    async def close(self) -> None:
        """Close the connection; calls and watches under way end by RegistryUnavailableError. Idempotent."""

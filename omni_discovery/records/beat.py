"""Beats: the key that a hub rewrites, to see the write come back on its own watch and so prove its view fresh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Annotated, Final

import msgspec

from omni_discovery.errors import RecordError, RegistryUnavailableError
from omni_discovery.kv import KeyValue, KVStore
from omni_discovery.records import keys
from omni_discovery.records.health import HubHealth
from omni_discovery.records.sizes import WallTime, check_value

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class BeatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON under ``beats/<hub_id>``."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = 1
    #: Number of the beat in one life of the hub.
    counter: _Count = 0
    #: The hub's picks are by a view of this revision.
    revision: _Count = 0
    #: Wall-clock seconds of the hub.
    written_at: WallTime = 0.0
    #: Fingerprint of the deploy document that the hub serves; empty if not known.
    pipeline: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: What the hub reports of requests and replicas; absent from a hub that does not report, as older ones.
    health: HubHealth | msgspec.UnsetType = msgspec.UNSET


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(BeatRecord)


def decode_beat(key: str, value: bytes) -> BeatRecord:
    """Decode a beat. Raise RecordError."""
    check_value(key, value)
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RecordError(key, str(error)) from error


def read_beats(items: Iterable[KeyValue], namespace: str, hubs: Collection[str]) -> dict[str, BeatRecord]:
    """The beats of these hubs among some keys of a namespace, by hub id. One that can't be read counts as none.

    No others are looked at: whoever may write beats may write any number of them.
    """
    beats = {}
    for item in items:
        key = keys.parse_key(namespace, item.key)
        if isinstance(key, keys.BeatKey) and key.hub_id in hubs:
            with suppress(RecordError):
                beats[key.hub_id] = decode_beat(item.key, item.value)
    return beats


class BeatReader:
    """Reads beats again and again, as a screen does: what was not written since is not decoded anew."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        #: The last item of each key, and what it says.
        self._known: dict[str, tuple[KeyValue, dict[str, BeatRecord]]] = {}

    def read(self, items: Iterable[KeyValue], hubs: Collection[str]) -> dict[str, BeatRecord]:
        """As ``read_beats``."""
        before, self._known = self._known, {}
        found: dict[str, BeatRecord] = {}
        for item in items:
            known, read = before.get(item.key, (None, {}))
            if known is not item or not read:
                read = read_beats((item,), self._namespace, hubs)
            self._known[item.key] = item, read
            found.update(read)
        return found


class Beat:
    """Writes one hub's beats under that hub's lease.

    ``serves`` returns the fingerprint of its deploy document, ``health`` its report, None for none.
    """

    def __init__(
        self,
        kv: KVStore,
        key: str,
        lease_id: Callable[[], int],
        serves: Callable[[], str] = lambda: "",
        health: Callable[[], HubHealth | None] = lambda: None,
    ) -> None:
        self.key = key
        self._kv = kv
        self._lease_id = lease_id
        self._serves = serves
        self._health = health
        self._sent = b""

    def is_echo(self, value: bytes) -> bool:
        """Whether ``value`` is that of the beat written last."""
        return value == self._sent

    async def write(self, counter: int, revision: int, at_s: float) -> None:
        """Write one beat; ``at_s`` is wall-clock time. Raise RegistryError, also while the hub holds no lease."""
        lease_id = self._lease_id()
        if not lease_id:
            raise RegistryUnavailableError("this hub holds no lease now")
        beat = BeatRecord(
            counter=counter,
            revision=revision,
            written_at=at_s,
            pipeline=self._serves(),
            health=self._health() or msgspec.UNSET,
        )
        self._sent = _encoder.encode(beat)
        await self._kv.put(self.key, self._sent, lease_id)

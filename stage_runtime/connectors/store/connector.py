"""The base of connectors whose producer stores the hand-offs itself."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from omni_discovery.errors import ConfigError
from stage_runtime.config import SerializationError
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.devices import check_device, to_device
from stage_runtime.connectors.errors import lacks_descriptors
from stage_runtime.connectors.serialization import deserialize, serialize_parts
from stage_runtime.connectors.settings import check_known, flag, number
from stage_runtime.connectors.store.memory import Lent, Loan
from stage_runtime.connectors.store.store import Kept, Store

logger = logging.getLogger(__name__)

#: How long a fetch waits for a descriptor where the metadata name no time-out, and how often it looks.
_DESCRIPTORS_S: Final = 5.0
_TRY_EVERY_S: Final = 0.05
#: What is read without a wait: twice what travels in metadata unless a document says otherwise.
_MOST_INLINE_BYTES: Final = 1 << 17


class StoringConnector(OmniConnectorBase):
    """Keeps hand-offs in a store. With ``by_key``, each is found by its key alone, and by the metadata of ``put``.

    Without it, hand-offs below ``shm_threshold_bytes`` travel inside the metadata and are stored nowhere, which is much
    cheaper: replicas do that, because the metadata always comes along. The constructor raises ConfigError for unknown
    or wrong settings.
    """

    #: The names that ``extra`` may hold.
    known_settings: ClassVar[frozenset[str]]
    #: Whether a key alone can find a hand-off at all.
    can_find_by_key: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        check_known(type(self).__name__, self.config, self.known_settings)
        self.stage_id = self.config.get("stage_id", -1)
        #: Where the tensors of fetched objects go.
        self.device = check_device(self.config.get("device", "cpu"))
        self.threshold = int(number(self.config, "shm_threshold_bytes", 65536))
        self.by_key = flag(self.config, "by_key", self.can_find_by_key)
        if self.by_key and not self.can_find_by_key:
            raise ConfigError(f"by_key is true, and a {type(self).__name__} finds hand-offs by their metadata only")
        self.namespace = str(self.config.get("namespace", ""))
        self._lock = threading.Lock()
        self._lent = Lent()
        self._puts = self._gets = self._failures = 0
        self._store = self._make_store()

    @abstractmethod
    def _make_store(self) -> Store:
        """The store of this connector; called once, by the constructor."""

    @abstractmethod
    def _describe(self, kept: Kept) -> dict[str, Any]:
        """The metadata by which ``_fetch`` finds a stored hand-off. Raise OSError if no consumer could reach it."""

    @abstractmethod
    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, Any] | None:
        """The memory of a fetched hand-off and its content for ``_open``; None if it is not stored any more.

        Raise TransferError.
        """

    def _open(self, content: Any) -> Any:
        """The object in the content of ``_fetch``. Raise SerializationError."""
        return deserialize(content)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """See OmniConnectorBase. An object that can't be stored or serialized returns ``(False, 0, None)``.

        So does, at once, one beyond the edge's limits: it does not wait for room, which only the caller can make.
        """
        try:
            parts = serialize_parts(data)
            size_bytes = sum(map(len, parts))
            if size_bytes < self.threshold and not self.by_key:
                metadata: dict[str, Any] = {"inline": b"".join(parts), "size": size_bytes}
                # Else what a burst of large ones has left would stay for as long as all are small.
                self._store.tidy()
            else:
                kept = self._store.put(edge_of(from_stage, to_stage, put_key), parts, size_bytes)
                metadata = self._described(kept)
        except (OSError, ConfigError, SerializationError) as error:
            return self._failed(from_stage, to_stage, error)
        with self._lock:
            self._puts += 1
        return True, size_bytes, metadata

    def _failed(self, from_stage: str, to_stage: str, error: Exception) -> tuple[bool, int, None]:
        with self._lock:
            self._failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
        logger.warning("connector.put_failed from=%s to=%s reason=%s", from_stage, to_stage, error)
        return False, 0, None

    def _described(self, kept: Kept) -> dict[str, Any]:
        try:
            return self._describe(kept)
        except BaseException:
            self._store.discard(kept)
            raise

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """See OmniConnectorBase. Metadata that are no mapping, or another transport's, are ignored: the key counts.

        Metadata may also be a mapping from keys to the metadata of each.
        """
        metadata = _metadata_of(get_key, metadata)
        inline = metadata.get("inline")
        if isinstance(inline, bytes):
            got = to_device(deserialize(inline), self.device), len(inline)
        else:
            fetched = self._fetch_late(edge_of(from_stage, to_stage, get_key), metadata)
            if fetched is None:
                return None
            loan, content = fetched
            got = to_device(self._open(content), self.device), len(content)
            self._lent.note_loan(got[0], loan)
        with self._lock:
            self._gets += 1
        return got

    def is_inline(self, metadata: Mapping[str, Any]) -> bool:
        """See OmniConnectorBase."""
        inline = metadata.get("inline")
        return isinstance(inline, bytes) and len(inline) <= _MOST_INLINE_BYTES

    def _fetch_late(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, Any] | None:
        """Fetch; try again until the time-out while there is no descriptor left: those of strangers come back soon."""
        timeout_s = metadata.get("timeout_s")
        deadline_s = time.monotonic() + (timeout_s if isinstance(timeout_s, int | float) else _DESCRIPTORS_S)
        while True:
            try:
                return self._fetch(edge, metadata)
            except OSError as error:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not lacks_descriptors(error):
                    raise
            time.sleep(_TRY_EVERY_S)
            if timeout_s is not None:
                metadata = {**metadata, "timeout_s": left_s}

    def release(self, obj: Any) -> None:
        """See OmniConnectorBase."""
        self._lent.release(obj)

    def cleanup(self, request_id: str, from_stage: str | None = None, to_stage: str | None = None) -> None:
        """See OmniConnectorBase. With both stages, drop only what was put on that edge under that very key."""
        if from_stage is not None and to_stage is not None:
            self._store.drop_edge(edge_of(from_stage, to_stage, request_id))
        else:
            self._store.cleanup(request_id)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. ``pending`` counts stored hand-offs, ``lent`` the fetched objects that still live.

        It is unhealthy while the hand-off that found no room last would find none.
        """
        with self._lock:
            counts = {"puts": self._puts, "gets": self._gets, "failures": self._failures}
        lack = self._store.lack_of_room()
        return {
            **({"status": "unhealthy", "reason": lack} if lack else {"status": "healthy"}),
            **counts,
            **self._store.counts(),
            "lent": len(self._lent),
            "last_error": self.last_error,
        }

    def close(self) -> None:
        """See OmniConnectorBase. Fetched objects stay valid."""
        self._store.close()


def edge_of(from_stage: object, to_stage: object, key: object) -> tuple[str, str, str]:
    """The place of a hand-off. Stages are texts here; whoever has their numbers means the same."""
    return str(from_stage), str(to_stage), str(key)


def _metadata_of(key: str, given: Any) -> dict[str, Any]:
    """The metadata for one key, not to be changed; empty for anything that is no mapping."""
    if type(given) is dict:
        # What nearly all give, and to ask a dict is a fraction of what it takes to ask whether it is a Mapping.
        of_key = given.get(key)
        if of_key is None:
            return given
    elif not isinstance(given, Mapping):
        return {}
    else:
        of_key = given.get(key)
    return dict(of_key if isinstance(of_key, Mapping) else given)

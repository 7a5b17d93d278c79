"""Hand-offs between this replica's stage and its neighbours, through the connector of each edge.

Used by the engine's thread; ``fetch`` by others, too. A stored hand-off is kept until the hub releases it, so that the
next stage can be run again; one that is never released is dropped after ``keep_s``. An exception of a connector fails
only the request that used it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import DEFAULT_WINDOW, ConnectorConfig, DeployConfig
from omni_discovery.deploy.trust.connector_settings import OF_REPLICA
from omni_discovery.errors import ConfigError
from omni_discovery.records.handoff_addresses import MOST_ADDRESSES, named_addresses, named_kv_hosts, shown
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.wire import PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.connectors.base import OmniConnectorBase, fetching_from
from stage_runtime.connectors.errors import TransferCancelledError, lacks_descriptors, lacks_room
from stage_runtime.connectors.factory import ConnectorSpec, OmniConnectorFactory
from stage_runtime.engine_loop.jobs import HandOffs, Work, owner_of

logger = logging.getLogger(__name__)

KEEP_S: Final = 900.0
#: Longest wait for all hand-offs of a request from other hosts.
_FETCH_TIMEOUT_S: Final = 5.0
#: Longest wait for the registry, where an address is not known.
_KNOWN_TIMEOUT_S: Final = 2.0
#: Counters of a connector's health that are logged when it is closed.
_COUNTS: Final = ("puts", "gets", "failures", "segments_made", "by_shared_memory", "by_network")


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge that ends or begins at this stage."""

    name: str
    connector: OmniConnectorBase
    #: How many pieces of one request may be on their way.
    window: int = DEFAULT_WINDOW


@dataclass(frozen=True, slots=True)
class _Kept:
    connector: OmniConnectorBase
    key: str
    put_at_s: float
    #: Of a request that comes in segments, for which one it was made.
    segment: int = 0


class _TimeLeft:
    """The time for all hand-offs of one request, and which stage's took most of it."""

    def __init__(self, clock: Callable[[], float], deadline_s: float) -> None:
        began_s = clock()
        self._clock = clock
        self._until_s = min(began_s + _FETCH_TIMEOUT_S, deadline_s)
        #: Whether the client's deadline leaves less time than producers have to have.
        self._is_short = deadline_s < began_s + _FETCH_TIMEOUT_S
        self._spent_s: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """What is left; never below 0."""
        return max(0.0, self._until_s - self._clock())

    @contextlib.contextmanager
    def counted_for(self, from_stage: int) -> Iterator[None]:
        """Count the time that passes meanwhile for a stage."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._spent_s[from_stage] = self._spent_s.get(from_stage, 0.0) + self._clock() - began_s

    def at_fault(self, ref: PayloadRef, error: Exception) -> int | None:
        """The stage whose replica has to answer for a hand-off that can't be read; None: nobody there."""
        if isinstance(error, MemoryError | TransferCancelledError) or lacks_descriptors(error) or lacks_room(error):
            return None
        if isinstance(error, TimeoutError):
            return None if self._is_short else max(self._spent_s, key=lambda stage: self._spent_s[stage])
        return ref.from_stage


class _ReadHandOffs(dict[str, dict[int, Mapping[str, Any]]]):
    """Hand-offs by role and stage; ``size_bytes``: how much was read, whatever the references say."""

    size_bytes: int = 0


def size_of(fetched: HandOffs) -> int:
    """How many bytes were read of what ``fetch`` returned."""
    return fetched.size_bytes if isinstance(fetched, _ReadHandOffs) else 0


class Payloads:
    """Stores, fetches and releases hand-offs. ``edges`` holds the connectors by (from stage, to stage).

    With ``producers``, hand-offs are fetched only where one of them hands over.
    """

    def __init__(
        self,
        stage_id: int,
        edges: Mapping[tuple[int, int], Edge],
        clock: Callable[[], float],
        keep_s: float = KEEP_S,
        producers: KnownProducers | None = None,
    ) -> None:
        self._stage_id = stage_id
        self._edges = edges
        self._clock = clock
        self._producers = producers
        self._keep_s = keep_s
        #: Stored and not released, by the owner of the request; oldest owner first.
        self._kept: dict[str, list[_Kept]] = {}
        #: How often a connector's ``cleanup`` raised.
        self.failed_cleanups = 0
        #: How often a hand-off could not be stored or fetched.
        self.failures = 0

    def is_at_hand(self, refs: Sequence[PayloadRef]) -> bool:
        """Whether ``fetch`` waits for nothing: small hand-offs travel in their references."""
        return all(
            (edge := self._edges.get((ref.from_stage, ref.to_stage))) is not None
            and edge.connector.is_inline(ref.metadata)
            and "kv_transfer_params" not in ref.metadata
            and not any(named_addresses(ref.metadata))
            for ref in refs
        )

    def fetch_at_hand(self, refs: Sequence[PayloadRef]) -> dict[str, dict[int, Mapping[str, Any]]] | PayloadError:
        """What ``fetch`` returns, or raises, for references with the hand-offs in them."""
        try:
            return self.fetch(refs, self._clock())
        except PayloadError as error:
            return error

    def fetch(self, refs: Sequence[PayloadRef], deadline_s: float) -> dict[str, dict[int, Mapping[str, Any]]]:
        """The hand-offs of earlier stages by role and stage. May wait for seconds; any thread may call it.

        ``deadline_s`` is the request's. Raise PayloadError if one is missing or damaged.
        """
        time_left = _TimeLeft(self._clock, deadline_s)
        found = _ReadHandOffs()
        for ref in refs:
            of_role = found.setdefault(ref.role, {})
            if ref.from_stage in of_role:
                raise PayloadError(f"two hand-offs of stage {ref.from_stage} are named where one is expected")
            of_role[ref.from_stage], size_bytes = self._fetch(ref, time_left)
            found.size_bytes += size_bytes
        return found

    def cancel_fetch(self, refs: Sequence[PayloadRef]) -> None:
        """End the fetches of these hand-offs in other threads soon, where the connector can."""
        for ref in refs:
            edge = self._edges.get((ref.from_stage, ref.to_stage))
            if edge is not None:
                edge.connector.cancel(ref.key)

    def _fetch(self, ref: PayloadRef, time_left: _TimeLeft) -> tuple[Mapping[str, Any], int]:
        """A hand-off, and how many bytes were read of it."""
        whose = f"the hand-off of stage {ref.from_stage}"
        edge = self._edges.get((ref.from_stage, ref.to_stage))
        if edge is None or ref.to_stage != self._stage_id:
            raise PayloadError(f"no edge from stage {ref.from_stage} to {ref.to_stage} ends at this replica")
        if ref.connector != edge.name:
            raise PayloadError(f"{whose} came by {ref.connector}, this replica has {edge.name}", ref.from_stage)
        size_bytes = ref.metadata.get("data_size")
        if isinstance(size_bytes, int) and size_bytes > ref.size_bytes:
            text = f"a hand-off of {size_bytes} bytes was announced as one of {ref.size_bytes}"
            raise PayloadError(text, ref.from_stage)
        metadata = {**ref.metadata, "timeout_s": time_left.seconds}
        # Connectors also take the metadata by key, one level down; what was checked above is what they get.
        metadata.pop(ref.key, None)
        producer = self._check_addresses(ref, metadata, time_left.seconds)
        try:
            with time_left.counted_for(ref.from_stage), fetching_from(producer):
                got = edge.connector.get(str(ref.from_stage), str(ref.to_stage), ref.key, metadata)
        except Exception as error:
            self.failures += 1
            raise PayloadError(f"{whose} can't be read: {_described(error)}", time_left.at_fault(ref, error)) from error
        if got is None:
            raise PayloadError(f"{whose} is not there any more", ref.from_stage)
        if not isinstance(got[0], Mapping):
            raise PayloadError(f"{whose} is no mapping", ref.from_stage)
        self._check_kv_hosts(ref, got[0], time_left.seconds)
        return got[0], got[1] or 0

    def _check_addresses(self, ref: PayloadRef, metadata: Mapping[str, Any], timeout_s: float) -> str:
        """The name of the producer; empty if it is not known, or there are no addresses.

        Raise PayloadError for a reference that leads elsewhere than to a registered producer.
        """
        producers, wait_s, producer = self._producers, min(timeout_s, _KNOWN_TIMEOUT_S), ""
        if producers is None:
            return producer
        for number, named in enumerate(named_addresses(metadata)):
            if number >= MOST_ADDRESSES:
                raise PayloadError(f"the hand-off of stage {ref.from_stage} is said to be at too many addresses")
            if not producers.hands_over_at(ref.from_stage, ref.to_stage, named, wait_s):
                raise PayloadError(
                    f"the hand-off of stage {ref.from_stage} is said to be at {shown(named)}, where no registered "
                    f"replica of that stage hands over"
                )
            producer = producers.owner_of(ref.from_stage, ref.to_stage, named)
        return producer

    def _check_kv_hosts(self, ref: PayloadRef, handoff: Mapping[str, Any], timeout_s: float) -> None:
        """The same for the KV cache that a prefill stage hands over."""
        producers, wait_s = self._producers, min(timeout_s, _KNOWN_TIMEOUT_S)
        if producers is None:
            return
        for host in named_kv_hosts(handoff.get("kv_transfer_params")):
            if not producers.has_kv_at(ref.from_stage, host, wait_s):
                raise PayloadError(
                    f"the KV cache of stage {ref.from_stage} is said to be at {str(host)[:255]!r}, which is no "
                    f"registered replica of that stage"
                )

    def windows(self, to_stages: Sequence[int]) -> dict[int, int]:
        """How many pieces of one request may be in flight to each stage."""
        edges = {stage: self._edges.get((self._stage_id, stage)) for stage in to_stages}
        return {stage: DEFAULT_WINDOW if edge is None else edge.window for stage, edge in edges.items()}

    def windows_from(self, from_stages: Sequence[int]) -> dict[int, int]:
        """How many pieces of a request may be in flight from each stage. Raise PayloadError where no edge is."""
        found: dict[int, int] = {}
        for stage in from_stages:
            edge = self._edges.get((stage, self._stage_id))
            if edge is None:
                raise PayloadError(f"no edge from stage {stage} ends at this replica")
            found[stage] = edge.window
        return found

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """Where the next stages fetch from this one, by edge, for the record. Raise OSError if it can't listen."""
        outward = {pair: edge for pair, edge in self._edges.items() if pair[0] == self._stage_id}
        found = {pair: (edge.name, edge.connector.endpoint()) for pair, edge in outward.items()}
        return {f"{pair[0]}-{pair[1]}": {"connector": name} | where for pair, (name, where) in found.items() if where}

    def trouble(self) -> str:
        """Why the first unhealthy connector is so, and the stages that it joins; empty if all are healthy.

        Raise ConfigError for one that can't become healthy without a change of its configuration.
        """
        for pair, edge in self._edges.items():
            try:
                health = edge.connector.health()
            except ConfigError:
                raise
            except Exception:
                logger.exception("payload.health_failed connector=%s", edge.name)
                continue
            if health.get("status") == "unhealthy":
                return f"stage {pair[0]} can't hand over to {pair[1]}: {health.get('reason') or edge.name}"
        return ""

    def hand_over(
        self,
        work: Work,
        handoff: Mapping[str, Any] | None,
        to_stages: Sequence[int],
        number: int | None = None,
    ) -> tuple[PayloadRef, ...]:
        """Store a hand-off for each of these next stages: all of it, or the piece of that number.

        Raise PayloadError if it can't be stored; then everything of the request's owner was released.
        """
        if handoff is None:
            return ()
        try:
            return tuple(self._put(work, to_stage, handoff, number) for to_stage in to_stages)
        except PayloadError:
            self.release(work.owner)
            raise
        except Exception as error:
            self.release(work.owner)
            raise PayloadError(f"the hand-off can't be stored: {_described(error)}") from error

    def release(self, owner: str) -> None:
        """Drop every hand-off of one request."""
        self._drop(owner, lambda _: True)

    def release_before(self, owner: str, segment: int) -> None:
        """Drop the hand-offs of a request's segments before ``segment``."""
        self._drop(owner, lambda kept: kept.segment < segment)

    def release_hub(self, hub_id: str) -> None:
        """Drop every hand-off of one hub's requests."""
        prefix = owner_of(hub_id, "")
        for owner in [each for each in self._kept if each.startswith(prefix)]:
            self.release(owner)

    def expire(self) -> None:
        """Drop the hand-offs that were kept longer than ``keep_s``."""
        oldest_allowed_s = self._clock() - self._keep_s
        while self._kept:
            owner, kept = next(iter(self._kept.items()))
            if kept[0].put_at_s > oldest_allowed_s:
                return
            self._drop(owner, lambda each: each.put_at_s <= oldest_allowed_s)

    def close(self) -> None:
        """Close all connectors, and log their counters. Idempotent."""
        for pair, edge in self._edges.items():
            try:
                _log_counters(pair, edge)
            except ConfigError:
                logger.debug("payload.never_worked connector=%s", edge.name)
            except Exception:
                logger.exception("payload.health_failed connector=%s", edge.name)
            try:
                edge.connector.close()
            except Exception:
                logger.exception("payload.close_failed connector=%s", edge.name)

    def _drop(self, owner: str, is_over: Callable[[_Kept], bool]) -> None:
        mine = self._kept.pop(owner, [])
        left = [kept for kept in mine if not is_over(kept)]
        if left:
            self._kept[owner] = left
        for kept in filter(is_over, mine):
            try:
                kept.connector.cleanup(kept.key)
            except Exception:
                self.failed_cleanups += 1
                logger.exception("payload.cleanup_failed key=%s", kept.key)

    def _put(self, work: Work, to_stage: int, handoff: Mapping[str, Any], number: int | None) -> PayloadRef:
        edge = self._edges.get((self._stage_id, to_stage))
        if edge is None:
            raise PayloadError(f"no edge leads from stage {self._stage_id} to {to_stage}")
        kept_key = _key(work)
        key = kept_key if number is None else f"{kept_key}_{number}"
        stored, size_bytes, metadata = edge.connector.put(str(self._stage_id), str(to_stage), key, handoff)
        if not stored:
            self.failures += 1
            raise PayloadError(
                f"{edge.name} could not store the hand-off for stage {to_stage}: {edge.connector.last_error}"
            )
        if not number:
            # The first piece stands for all: ``cleanup`` of a key drops every key that begins with it.
            kept = _Kept(edge.connector, kept_key, self._clock(), work.segment or 0)
            self._kept.setdefault(work.owner, []).append(kept)
        return PayloadRef(
            from_stage=self._stage_id,
            to_stage=to_stage,
            key=key,
            connector=edge.name,
            size_bytes=size_bytes,
            # The hand-off stays until the hub releases it: the next stage may have to run again elsewhere.
            metadata={**(metadata or {}), **_hub_metadata(handoff), "consume": False},
        )


def _hub_metadata(handoff: Mapping[str, Any]) -> dict[str, Any]:
    # The hub keeps with the request where a prefill left its KV cache; the hub fetches no hand-offs.
    return {name: handoff[name] for name in ("kv_transfer_params",) if name in handoff}


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _log_counters(pair: tuple[int, int], edge: Edge) -> None:
    counts = edge.connector.health()
    done = " ".join(f"{name}={counts[name]}" for name in _COUNTS if name in counts)
    logger.info("payload.closed edge=%d-%d connector=%s %s", *pair, edge.name, done)


def _key(work: Work) -> str:
    # The hash keeps equal request ids of two hubs apart.
    name = f"{work.key}/{work.segment}" if work.segment else work.key
    # Connectors find a key again by what an underscore parts, and a client may choose many.
    shown = work.request_id[:128].replace("_", "-")
    return f"{shown}_{hashlib.blake2b(name.encode('utf-8'), digest_size=8).hexdigest()}"


def build_edges(
    deploy: DeployConfig, stage_id: int, namespace: str, bind_host: str = "", advertise_host: str = ""
) -> dict[tuple[int, int], Edge]:
    """The connectors of all edges that begin or end at a stage. Raise ConfigError for one that can't be built."""
    pairs = [(before, stage_id) for before in deploy.inputs_of(stage_id)]
    pairs += [(stage_id, stage.stage_id) for stage in deploy.stages if stage_id in deploy.inputs_of(stage.stage_id)]
    edges: dict[tuple[int, int], Edge] = {}
    for pair in pairs:
        config = deploy.connector_of(*pair)
        try:
            place = OmniConnectorFactory.place(
                config.name,
                namespace=namespace,
                stage_id=stage_id,
                bind_host=bind_host,
                advertise_host=advertise_host,
            )
            extra = place | config.extra | _of_replica(place, config)
            connector = OmniConnectorFactory.create_connector(ConnectorSpec(config.name, extra))
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"edge {pair[0]} to {pair[1]}: {error}") from error
        edges[pair] = Edge(config.name, connector, deploy.window_of(*pair))
    return edges


def _of_replica(place: Mapping[str, Any], config: ConnectorConfig) -> dict[str, Any]:
    """What no document changes: whose hand-offs they are, and that none is found by its key alone."""
    mine = {name: value for name, value in place.items() if name in OF_REPLICA}
    for name, value in mine.items():
        if config.extra.get(name, value) != value:
            logger.warning("payload.setting_ignored connector=%s setting=%s: a replica sets it", config.name, name)
    return mine

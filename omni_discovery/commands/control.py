"""``omni cordon``, ``omni weight``, ``omni drain``: what ``etcdctl put`` does, and a wait for the replica's answer.

What an operator does to one replica: write its control key, wait for its answer, wait for a drain's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from omni_discovery.commands.main import add_registry_options, find_endpoints, quiet_logging, read_security
from omni_discovery.errors import ConfigError, OmniError, RecordError, RegistryUnavailableError
from omni_discovery.kv import KVStore
from omni_discovery.records import keys
from omni_discovery.records.control import ControlError, answered_revision, changed_value, parse
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus, decode_replica
from omni_discovery.registration.drain_acks import read_awaited

_ANSWER_S: Final = 5.0
_TARGET: Final = re.compile(r"(\d{1,9})/(\d{1,9})")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The flags that say which replica of which registry."""
    parser.add_argument("replica", metavar="STAGE/REPLICA", type=_target, help="as `omni replicas` shows it, e.g. 1/3")
    add_registry_options(parser)


def _target(text: str) -> tuple[int, int]:
    found = _TARGET.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no replica; right would be STAGE/REPLICA, for example 1/3")
    return int(found[1]), int(found[2])


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no weight; right would be a number from 0 to 1000")
    return weight


class CordonCommand:
    """``omni cordon 1/3``: it takes nothing new; what runs goes on."""

    summary = "let a replica take nothing new; what runs there goes on"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_target(parser)
        parser.add_argument("--undo", action="store_true", help="let it take work again")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        done = "takes work again" if arguments.undo else "is cordoned: it takes nothing new"
        return _set(arguments, {"cordon": None if arguments.undo else True}, done, arguments.undo)


class WeightCommand:
    """``omni weight 1/3 0.5``: half the share of one that weighs 1."""

    summary = "give a replica a larger or smaller share of the requests"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_target(parser)
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("weight", nargs="?", type=_weight, help="1 is usual, 0 is nothing at all")
        group.add_argument("--undo", action="store_true", help="its own weight again")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        done = "has its own weight again" if arguments.undo else f"weighs {arguments.weight:g}"
        return _set(arguments, {"weight": arguments.weight}, done, arguments.undo)


class DrainCommand:
    """``omni drain 1/3``: finish what runs, then go."""

    summary = "let a replica finish what it has, withdraw and end"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_target(parser)
        parser.add_argument(
            "--timeout",
            type=float,
            default=600.0,
            metavar="S",
            help="wait so long for the end; the drain goes on after that, too (default: %(default)g)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from omni_discovery.errors import ConfigError

        if not arguments.timeout > 0:
            raise ConfigError(f"--timeout is {arguments.timeout!r}; right would be more than 0 seconds")
        return with_registry(arguments, lambda kv: _drain(kv, _of(arguments), arguments.timeout))


def with_registry(arguments: argparse.Namespace, work: Callable[[KVStore], Any]) -> int:
    """Connect, do the work, disconnect; return the exit code. Raise RegistryError that names what to correct."""
    from omni_discovery.etcd.check import check_registry
    from omni_discovery.etcd.config import RegistryConfig
    from omni_discovery.etcd.store import EtcdKV

    quiet_logging()
    endpoints, security = find_endpoints(arguments), read_security(arguments)
    check_registry(RegistryConfig(endpoints, arguments.namespace, security), _ANSWER_S)

    async def connected() -> int:
        kv = EtcdKV(endpoints, security=security, call_timeout_s=4.0)
        try:
            return int(await work(kv))
        finally:
            await kv.close()

    return asyncio.run(connected())


def _of(arguments: argparse.Namespace) -> Target:
    from omni_discovery.records.keys import check_namespace
    # import-was-here

    return Target(check_namespace(arguments.namespace), *arguments.replica)


def _set(arguments: argparse.Namespace, changes: dict[str, Any], done: str, undo: bool) -> int:
    return with_registry(arguments, lambda kv: _write_and_wait(kv, _of(arguments), changes, done, undo))


async def _write_and_wait(kv: KVStore, target: Target, changes: dict[str, Any], done: str, undo: bool) -> int:
    # import-was-here

    # A key may be left by a replica that is gone; taking it away needs nobody's answer.
    if undo and await read_replica(kv, target) is None:
        await write_control(kv, target, changes)
        say(f"replica {target} is not registered; its key is cleared")
        return 0
    await must_be_registered(kv, target)
    began_s = time.monotonic()
    revision = await write_control(kv, target, changes)
    info = await wait_answered(kv, target, revision, _ANSWER_S)
    if info is None:
        say(f"replica {target} has left meanwhile; the key holds for whoever has that id next")
        return 1
    say(f"replica {target} {done} (answered in {time.monotonic() - began_s:.2f} s, {info.queue_length} in flight)")
    return 0


async def _drain(kv: KVStore, target: Target, timeout_s: float) -> int:
    # import-was-here

    before = await must_be_registered(kv, target)
    if before.takes_new_work and await is_last_to_serve(kv, target):
        text = "no other replica of stage {} takes work: requests for it wait until one does, and then get a 503"
        say(f"warning: {text.format(target.stage_id)}", error=True)
    began_s = time.monotonic()
    revision = await write_control(kv, target, {"drain": True, "epoch": before.epoch})
    # It may be done, and gone, before we read its answer.
    await wait_answered(kv, target, revision, min(_ANSWER_S, timeout_s))
    with _Progress(target, before.epoch) as progress:
        left_s = max(0.1, timeout_s - (time.monotonic() - began_s))
        end = await wait_drained(kv, target, before.epoch, left_s, progress.show)
    took = f"{time.monotonic() - began_s:.1f} s"
    match end:
        case DrainEnd.DRAINED:
            say(f"replica {target} (epoch {before.epoch}) has drained in {took}: it withdrew and ended")
            return 0
        case DrainEnd.DIED:
            say(f"replica {target} (epoch {before.epoch}) ended after {took} before its drain was done", error=True)
        case DrainEnd.TIMED_OUT:
            say(
                f"replica {target} still drains after {took}, {progress.in_flight} in flight; it goes on by itself: "
                "follow it with `omni replicas --watch`",
                error=True,
            )
    return 1


class _Progress:
    """What a drain waits for: a live line on a terminal, else a line for each change."""

    def __init__(self, target: Target, epoch: int) -> None:
        from rich.console import Console

        self.in_flight = -1
        self._shown: DrainStep | None = None
        self._title = f"draining {target} (epoch {epoch})"
        self._console = Console()
        self._status = self._console.status(f"{self._title}: asked") if self._console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, step: DrainStep) -> None:
        """How far it is now."""
        if step == self._shown:
            return
        self._shown, self.in_flight = step, step.in_flight
        text = f"{self._title}: {step.in_flight} in flight"
        if step.awaited:
            text += f", waits for hubs to know of it: {', '.join(sorted(step.awaited)[:8])}"
        if self._status is not None:
            self._status.update(text)
        else:
            say(text)


def say(text: str, *, error: bool = False) -> None:
    """Print one line of an answer, or of a complaint."""
    stream = sys.stderr if error else sys.stdout
    stream.write(f"omni: {text}\n" if error else f"{text}\n")
    stream.flush()


_POLL_S: Final = 0.1
_WRITE_TRIES: Final = 10


class OperationFailedError(OmniError):
    """The operator: what was asked for did not come about; the message says how far it came."""


class DrainEnd(StrEnum):
    """How a drain ended."""

    DRAINED = "drained"
    #: The life to drain is over, but it did not say that it was done.
    DIED = "died"
    TIMED_OUT = "timed-out"


@dataclass(frozen=True, slots=True)
class Target:
    """One replica of one namespace, as ``STAGE/REPLICA`` names it."""

    namespace: str
    stage_id: int
    replica_id: int

    def __str__(self) -> str:
        return f"{self.stage_id}/{self.replica_id}"

    @property
    def record_key(self) -> str:
        """Where its record is."""
        return keys.replica_key(self.namespace, self.stage_id, self.replica_id)

    @property
    def control_key(self) -> str:
        """Where its operator writes."""
        return keys.replica_control_key(self.namespace, self.stage_id, self.replica_id)


async def read_replica(kv: KVStore, target: Target) -> ReplicaInfo | None:
    """The replica as registered now; None if it is not, or if its record can't be read."""
    item = await kv.get(target.record_key)
    if item is None:
        return None
    try:
        record = decode_replica(item.key, target.stage_id, target.replica_id, item.value)
    except RecordError:
        return None
    return record.to_info(item.create_revision)


async def must_be_registered(kv: KVStore, target: Target) -> ReplicaInfo:
    """The replica as registered now. Raise ConfigError, naming those that are."""
    info = await read_replica(kv, target)
    if info is not None:
        return info
    listing = await kv.list(keys.replicas_prefix(target.namespace))
    found = [parsed for item in listing.items if (parsed := keys.parse_key(target.namespace, item.key)) is not None]
    names = [f"{key.stage_id}/{key.replica_id}" for key in found if isinstance(key, keys.ReplicaKey)]
    there = f"there are: {', '.join(names[:20])}" if names else "no replica is"
    raise ConfigError(f"no replica {target} is registered in namespace {target.namespace!r}; {there}")


async def is_last_to_serve(kv: KVStore, target: Target) -> bool:
    """Whether nobody else is registered who takes work of the target's stage."""
    for item in (await kv.list(keys.replicas_prefix(target.namespace, target.stage_id))).items:
        key = keys.parse_key(target.namespace, item.key)
        if not isinstance(key, keys.ReplicaKey):
            continue
        try:
            record = decode_replica(item.key, key.stage_id, key.replica_id, item.value)
        except RecordError:
            continue
        if key.replica_id != target.replica_id and record.to_info(item.create_revision).takes_new_work:
            return False
    return True


async def write_control(kv: KVStore, target: Target, changes: dict[str, Any]) -> int:
    """Change parts of the control key and leave the others; return its revision, 0 if no key is left."""
    for _ in range(_WRITE_TRIES):
        current = await kv.get(target.control_key)
        value = changed_value(current.value if current else None, changes)
        if value is None:
            if current is None or await kv.delete(target.control_key, current.mod_revision):
                return 0
            continue
        if current is None:
            claim = await kv.create(target.control_key, value)
        else:
            claim = await kv.compare_and_put(target.control_key, value, current.mod_revision)
        if claim.won and claim.current is not None:
            return claim.current.mod_revision
    raise OperationFailedError(f"others keep writing {target.control_key}: nothing was changed")


async def wait_answered(kv: KVStore, target: Target, revision: int, timeout_s: float) -> ReplicaInfo | None:
    """Wait until the replica has answered the control key of that revision, 0 for its absence; return its record.

    None if it left the registry meanwhile. Raise OperationFailedError if it refuses, or does not answer in time.
    """
    info = None
    try:
        async with asyncio.timeout(timeout_s):
            while (info := await read_replica(kv, target)) is not None:
                answered = answered_revision(info.control_revision, info.control_error)
                if answered >= revision > 0 or (revision == 0 and answered == 0):
                    break
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise OperationFailedError(
            f"replica {target} did not answer revision {revision} of {target.control_key} within {timeout_s:g} s; "
            "the key stands, and holds as soon as it does"
        ) from None
    if info is not None and info.control_error:
        raise OperationFailedError(f"replica {target} did not do it: {info.control_error}")
    return info


@dataclass(frozen=True, slots=True)
class DrainStep:
    """How far a drain is: what is in flight, and which hubs have not said yet that they know of it."""

    in_flight: int
    awaited: frozenset[str] = frozenset()


class _Following:
    """Reads what becomes of one life of a replica that is to drain."""

    def __init__(self, kv: KVStore, target: Target, epoch: int) -> None:
        self._kv = kv
        self._target = target
        self._epoch = epoch
        #: Since which revision the record is known to say ``draining``; 0 while it does not.
        self._draining_at = 0

    async def step(self) -> DrainStep | None:
        """How far it is; None when the life is over. Raise RegistryUnavailableError."""
        item = await self._kv.get(self._target.record_key)
        if item is None or item.create_revision != self._epoch:
            return None
        try:
            record = decode_replica(item.key, self._target.stage_id, self._target.replica_id, item.value)
        except RecordError:
            return DrainStep(0)
        if record.status is not ReplicaStatus.DRAINING:
            return DrainStep(record.queue_length)
        self._draining_at = self._draining_at or item.mod_revision
        return DrainStep(record.queue_length, await read_awaited(self._kv, self._target.namespace, self._draining_at))


async def wait_drained(
    kv: KVStore, target: Target, epoch: int, timeout_s: float, on_progress: Callable[[DrainStep], None]
) -> DrainEnd:
    """Wait until the life ``epoch`` of the replica is over; ``on_progress`` is told again and again how far it is."""
    following = _Following(kv, target, epoch)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                # The drain goes on without etcd, and so does the wait for its end.
                with contextlib.suppress(RegistryUnavailableError):
                    step = await following.step()
                    if step is None:
                        break
                    on_progress(step)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return DrainEnd.TIMED_OUT
    current = await kv.get(target.control_key)
    try:
        stands = current is not None and parse(current.value).epoch == epoch
    except ControlError:
        stands = False
    if not stands:
        return DrainEnd.DRAINED
    # It was killed: the key is for a life that is over, and nobody else will take it away.
    await write_control(kv, target, {"drain": None, "epoch": None})
    return DrainEnd.DIED

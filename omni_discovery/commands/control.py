"""``omni cordon``, ``omni weight``, ``omni drain``: what ``etcdctl put`` does, and a wait for the replica's answer."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.commands.output import say
from omni_discovery.commands.registry import ANSWER_S, add_registry_options, with_registry
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_discovery.commands.operate import DrainStep, Target
    from omni_discovery.kv import KVStore
    from omni_discovery.records.schema import ReplicaInfo

_TARGET: Final = re.compile(r"(\d{1,9})/(\d{1,9})")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a replica and its registry."""
    parser.add_argument("replica", metavar="STAGE/REPLICA", type=_target, help="as `omni replicas` shows it, e.g. 1/3")
    add_registry_options(parser)


def _target(text: str) -> tuple[int, int]:
    found = _TARGET.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no replica; right would be STAGE/REPLICA, for example 1/3")
    return int(found[1]), int(found[2])


def _weight(text: str) -> float:
    from omni_discovery.records.schema import MOST_WEIGHT

    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= MOST_WEIGHT:
        raise argparse.ArgumentTypeError(f"{text!r} is no weight; right would be a number from 0 to {MOST_WEIGHT:g}")
    return weight


class CordonCommand:
    """``omni cordon 1/3``: the replica gets no new requests; those that run go on."""

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
    """``omni weight 1/3 0.5``: the replica gets half the share of one that weighs 1."""

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
    """``omni drain 1/3``: the replica finishes the requests that run, withdraws and ends."""

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
        if not arguments.timeout > 0:
            raise ConfigError(f"--timeout is {arguments.timeout!r}; right would be more than 0 seconds")
        return with_registry(arguments, lambda kv: _drain(kv, _target_of(arguments), arguments.timeout))


def _target_of(arguments: argparse.Namespace) -> Target:
    from omni_discovery.commands.operate import Target
    from omni_discovery.records.keys import check_namespace

    return Target(check_namespace(arguments.namespace), *arguments.replica)


def _set(arguments: argparse.Namespace, changes: dict[str, Any], done: str, undo: bool) -> int:
    return with_registry(arguments, lambda kv: _write_and_wait(kv, _target_of(arguments), changes, done, undo))


async def _write_and_wait(kv: KVStore, target: Target, changes: dict[str, Any], done: str, undo: bool) -> int:
    """Change the control key, wait for the replica's answer and print it; return the exit code."""
    from omni_discovery.commands.operate import must_be_registered, read_replica, steer, write_control

    # The key may be left of a replica that is gone; then no answer to its removal will come.
    if undo and await read_replica(kv, target) is None:
        await write_control(kv, target, changes)
        say(f"replica {target} is not registered; its key is cleared")
        return 0
    before = await must_be_registered(kv, target)
    began_s = time.monotonic()
    info: ReplicaInfo | None
    if undo:
        info = await _undo(kv, target, before, changes)
    else:
        if changes in ({"cordon": True}, {"weight": 0.0}):
            await _warn_of_last(kv, target, before)
        info = await steer(kv, target, before, changes, ANSWER_S)
    if info is None:
        say(f"replica {target} has left meanwhile; its key is cleared")
        return 0
    say(f"replica {target} {done} (answered in {time.monotonic() - began_s:.2f} s, {info.queue_length} in flight)")
    return 0


async def _undo(kv: KVStore, target: Target, before: ReplicaInfo, changes: dict[str, Any]) -> ReplicaInfo | None:
    from omni_discovery.commands.operate import take_back_cordon, wait_answered, write_control

    revision = await write_control(kv, target, changes)
    if not before.control_revision and before.cordoned and "cordon" in changes:
        return await take_back_cordon(kv, target, ANSWER_S)
    return await wait_answered(kv, target, revision, ANSWER_S)


async def _warn_of_last(kv: KVStore, target: Target, before: ReplicaInfo) -> None:
    """Warn if nobody serves the stage without this replica."""
    from omni_discovery.commands.operate import is_last_to_serve

    if before.takes_new_work and await is_last_to_serve(kv, target):
        text = "no other replica of stage {} takes work: requests for it wait until one does, and then get a 503"
        say(f"warning: {text.format(target.stage_id)}", error=True)


async def _drain(kv: KVStore, target: Target, timeout_s: float) -> int:
    """Ask for the drain, show its progress and print its end; return the exit code."""
    from omni_discovery.commands.operate import (
        DrainEnd,
        must_be_registered,
        wait_answered,
        wait_drained,
        write_control,
    )

    before = await must_be_registered(kv, target)
    await _warn_of_last(kv, target, before)
    began_s = time.monotonic()
    with _Progress(target, before.epoch) as progress:
        revision = await write_control(kv, target, {"drain": True, "epoch": before.epoch})
        # The replica may have drained and left the registry before this reads its answer.
        await wait_answered(kv, target, revision, min(ANSWER_S, timeout_s))
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


#: What a drain waits for is said again so often, in seconds, where it does not change.
_REPEAT_S: Final = 10.0


class _Progress:
    """Shows what a drain waits for: one live line on a terminal, else a line for each change and each ten seconds."""

    def __init__(self, target: Target, epoch: int, now: Callable[[], float] = time.monotonic) -> None:
        from omni_discovery.commands.terminal import TextConsole

        self.in_flight = -1
        self._now = now
        self._began_s = self._shown_at_s = now()
        self._shown: DrainStep | None = None
        self._title = f"draining {target} (epoch {epoch})"
        self._console = TextConsole()
        self._status = self._console.status(f"{self._title}: asked") if self._console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, step: DrainStep) -> None:
        """Show how far the drain is, unless that was shown a moment ago."""
        now_s = self._now()
        if step == self._shown and self._status is None and now_s - self._shown_at_s < _REPEAT_S:
            return
        self._shown, self.in_flight, self._shown_at_s = step, step.in_flight, now_s
        text = f"{self._title}: {step.in_flight} in flight"
        if step.awaited:
            text += f", waits for hubs to know of it: {', '.join(sorted(step.awaited)[:8])}"
        if self._status is not None:
            self._status.update(f"{text} · {now_s - self._began_s:.0f} s")
        else:
            say(text)

"""What ``omni chaos`` does: one thing at a time, and nothing new before all is as it was."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from omni_discovery.commands.chaos.draw import Act, ChaosStep, draw, lacking, possible_steps, serving
from omni_discovery.commands.chaos.process import HeldProcess, UnsureProcessError, doubt_about, hold_process
from omni_discovery.commands.operate import OperationFailedError, Target, steer, undo
from omni_discovery.commands.output import say
from omni_discovery.commands.registry import ANSWER_S
from omni_discovery.errors import ConfigError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import KVStore
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo
from omni_discovery.view.table import ReplicaTable

_POLL_S: Final = 0.2
#: No key is ever at this revision: a delete on that condition changes nothing, and etcd asks who may do it.
_NEVER: Final = 1
#: Replicas of which it is told why they get no signal.
_MOST_TOLD: Final = 4
_SIGNALS: Final = {Act.KILL: signal.SIGKILL, Act.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Times:
    """How long it goes on, waits between two faults, holds a stop or a cordon, and waits for all to be back."""

    for_s: float
    pause_s: float
    hold_s: float
    recovery_s: float


class Chaos:
    """One run in one namespace."""

    def __init__(self, kv: KVStore, namespace: str, acts: Sequence[Act], times: Times) -> None:
        self._kv = kv
        self._namespace = namespace
        self._acts = acts
        self._times = times
        self._stop = asyncio.Event()
        self._done = 0
        #: Lives that were killed: their records stay until their leases end.
        self._dead: set[tuple[int, int, int]] = set()
        #: Replicas that may still be cordoned.
        self._cordoned: list[str] = []

    async def show(self) -> None:
        """Say what could be done to which replica."""
        found = await self._replicas()
        possible = possible_steps(found, self._acts, self._may_be_signalled)
        for step in possible:
            say(f"could {step.act} {_who(step.replica)}")
        if any(act.is_a_signal for act in self._acts):
            for info in found:
                if info.takes_new_work and (doubt := doubt_about(info, self._namespace)):
                    say(f"no signal to {_who(info)}: {doubt}")
        say(f"{len(possible)} things could be done in namespace {self._namespace!r}; add --yes to do some of them")

    async def run(self, seed: int | None) -> int:
        """Do it until the time is over or a signal comes; return the exit code. Raise ConfigError, RegistryError."""
        # SIGHUP: the end of a terminal would leave a replica stopped for ever.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        dice = random.Random(seed)
        end_s = time.monotonic() + self._times.for_s
        say(f"chaos in namespace {self._namespace!r} for {self._times.for_s:g} s, seed {seed}")
        before, missing = serving(await self._replicas()), ""
        while not missing and not self._stop.is_set():
            found = await self._replicas()
            possible = possible_steps(found, self._acts, self._may_be_signalled)
            if not possible:
                raise ConfigError(f"nothing can be done in namespace {self._namespace!r}: {self._why_not(found)}")
            await self._do(draw(possible, dice.randrange))
            missing = await self._wait_back(before)
            if time.monotonic() + self._times.pause_s >= end_s:
                break
            await self._wait(self._times.pause_s)
        return self._tell(missing)

    def _why_not(self, found: Sequence[ReplicaInfo]) -> str:
        if not any(count > 1 for count in serving(found).values()):
            return "no stage has two replicas that take work, and the last one of a stage is left alone"
        doubts = [f"{info.name}: {doubt_about(info, self._namespace)}" for info in found if info.takes_new_work]
        more = f"; and {len(doubts) - _MOST_TOLD} more" if len(doubts) > _MOST_TOLD else ""
        none = "no stage with two replicas that take work has one on this host which this user may signal"
        return f"{none}: {'; '.join(doubts[:_MOST_TOLD])}{more}"

    def _may_be_signalled(self, info: ReplicaInfo) -> bool:
        return not doubt_about(info, self._namespace)

    async def _replicas(self) -> list[ReplicaInfo]:
        table = ReplicaTable(self._namespace)
        table.replace(await self._kv.list(keys.replicas_prefix(self._namespace)), time.time())
        return list(table.snapshot().replicas.values())

    async def _do(self, step: ChaosStep) -> None:
        info = step.replica
        target = Target(self._namespace, info.stage_id, info.replica_id)
        # Who may not write there is no operator, and signals nobody either.
        await self._kv.delete(target.control_key, _NEVER)
        if step.act is Act.CORDON:
            self._done += 1
            await self._hold_cordoned(target, info)
            return
        try:
            with hold_process(info, self._namespace) as process:
                await self._send(step, process)
        except UnsureProcessError as error:
            self._note(f"left alone, it came not to {step.act}: {_who(info)}: {error}")

    async def _send(self, step: ChaosStep, process: HeldProcess) -> None:
        info = step.replica
        if not process.send(_SIGNALS[step.act]):
            self._note(f"has ended before it came to {step.act}: {_who(info)}")
            return
        self._done += 1
        if step.act is Act.KILL:
            self._dead.add((info.stage_id, info.replica_id, info.epoch))
            self._note(f"killed {_who(info)}")
            return
        try:
            self._note(f"stopped {_who(info)}")
            await self._wait(self._times.hold_s)
        finally:
            process.send(signal.SIGCONT)
        self._note(f"let go on {_who(info)}")

    async def _hold_cordoned(self, target: Target, info: ReplicaInfo) -> None:
        try:
            await steer(self._kv, target, info, {"cordon": True}, ANSWER_S)
            self._note(f"cordoned {_who(info)}")
            await self._wait(self._times.hold_s)
            await undo(self._kv, target, info, {"cordon": None}, ANSWER_S)
        except (OperationFailedError, RegistryError) as error:
            self._cordoned.append(info.name)
            say(f"{_clock()} replica={info.name} may still be cordoned: {error}", error=True)
            return
        self._note(f"let take work again {_who(info)}")

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until a signal comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _wait_back(self, before: Mapping[int, int]) -> str:
        """Wait until each stage has as many replicas as before; what is missing in the end, empty if nothing."""
        began_s, told = time.monotonic(), "etcd did not answer"
        while time.monotonic() < began_s + self._times.recovery_s:
            with suppress(RegistryUnavailableError):
                gone = lacking(before, await self._replicas(), self._dead)
                if not gone:
                    self._note(f"as many serve as before, after {time.monotonic() - began_s:.1f} s")
                    return ""
                told = ", ".join(f"stage {stage_id} lacks {count}" for stage_id, count in gone.items())
            await asyncio.sleep(_POLL_S)
        return told

    def _note(self, text: str) -> None:
        say(f"{_clock()} {text}")

    def _tell(self, missing: str) -> int:
        if missing:
            say(f"{self._times.recovery_s:g} s later {missing} of what served before", error=True)
        if self._cordoned:
            say(f"to let them take work again: omni cordon --undo {' '.join(self._cordoned)}", error=True)
        are_back = not missing and not self._cordoned
        say(f"{self._done} done, {'all' if are_back else 'not all'} came back")
        return 0 if are_back else 1


def _who(info: ReplicaInfo) -> str:
    return f"replica={info.name} epoch={info.epoch} process {info.pid} on {info.host}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")

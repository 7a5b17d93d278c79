"""LostReplicas: which replicas left the registry without goodbye, or failed, and were not replaced. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.records.health import MOST_REASON, ReplicaTrouble, TroubleKind
from omni_discovery.records.schema import DRAINED_BY_OPERATOR, ReplicaInfo, ReplicaStatus, own_reason
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from omni_discovery.view.replica_map import ReplicaId

#: For so long a lost replica is reported, and so many at most are remembered.
_REMEMBERED_S: Final = 3600.0
_MOST: Final = 64

#: One life of a replica: stage, replica id, epoch.
_Life = tuple[int, int, int]


#: What is known of a replica that was up when its record vanished, by its session.
_ANSWERED: Final = (
    "its record vanished while it answered: its lease ended, as where its host does not reach etcd, or its key was"
    " deleted; it may have been stopped since"
)
_SILENT: Final = (
    "its session ended, then its lease: it died, was cut off, or was stopped while its host did not reach etcd"
)
_UNKNOWN: Final = "its record vanished while it was up, and it had no session here: whether it was stopped is not known"


@dataclass(frozen=True, slots=True)
class _Loss:
    info: ReplicaInfo
    at_s: float
    #: What is known of it but for what it said itself.
    known: str


class LostReplicas:
    """Follows the views of a hub. A replica that comes after a loss, in the same stage, takes the lost one's place.

    A supervisor starts the next process at once, while the record of a killed one stays until its lease ends: so a
    newcomer may also come before the loss, but not before the session of the lost one ended. Moments are monotonic.
    """

    def __init__(self) -> None:
        #: Replicas that are registered and lost their session, in that order.
        self._silent: dict[_Life, ReplicaInfo] = {}
        #: Replicas whose session stands.
        self._answering: set[_Life] = set()
        #: Of the silent ones, those for which a newcomer has come already.
        self._replaced: set[_Life] = set()
        self._lost: dict[_Life, _Loss] = {}

    def __repr__(self) -> str:
        return f"LostReplicas({len(self._lost)} lost, {len(self._silent)} silent)"

    def session_lost(self, info: ReplicaInfo) -> None:
        """The session with a registered replica has ended."""
        self._answering.discard(_life(info))
        self._silent[_life(info)] = info

    def session_up(self, info: ReplicaInfo) -> None:
        """The replica answers, or does so again."""
        self._answering.add(_life(info))
        self._silent.pop(_life(info), None)
        self._replaced.discard(_life(info))

    def follow_view(
        self, before: Mapping[ReplicaId, ReplicaInfo], after: Mapping[ReplicaId, ReplicaInfo], now_s: float
    ) -> None:
        """The registry changed from ``before`` to ``after``."""
        gone = [info for key, info in before.items() if key not in after or _life(after[key]) != _life(info)]
        come = [info for key, info in after.items() if key not in before or _life(before[key]) != _life(info)]
        at_address: dict[str, list[ReplicaInfo]] = {}
        for info in after.values():
            at_address.setdefault(info.input_addr, []).append(info)
        self.follow_changes(gone, come, after, lambda addr: at_address.get(addr, ()), now_s)

    def follow_changes(
        self,
        gone: Sequence[ReplicaInfo],
        come: Sequence[ReplicaInfo],
        after: Mapping[ReplicaId, ReplicaInfo],
        at_address: Callable[[str], Iterable[ReplicaInfo]],
        now_s: float,
    ) -> None:
        """These lives are gone from the registry, and those have come: now it is ``after``.

        ``at_address`` returns the records of that with an input address.
        """
        # The session of a process that registers again goes on.
        for addr in {info.input_addr for info in gone if _life(info) in self._answering}:
            self._answering |= {_life(info) for info in at_address(addr)}
        for info in gone:
            life = _life(info)
            known = _ANSWERED if life in self._answering else _SILENT if life in self._silent else _UNKNOWN
            was_replaced = life in self._replaced
            self._silent.pop(life, None)
            self._answering.discard(life)
            self._replaced.discard(life)
            if not was_replaced and not _said_goodbye(info):
                self._lost[life] = _Loss(info, now_s, known)
        # The session of a process whose record is gone may end later: nobody is to replace that.
        for life in [life for life in self._silent if life[:2] not in after or _life(after[life[:2]]) != life]:
            del self._silent[life]
        # Nobody is lost before the first view. A later one may be empty, too: all records may vanish together. Those
        # that come back go first, so that a stranger does not take the place of one of them.
        own = {(loss.info.stage_id, loss.info.input_addr) for loss in self._lost.values()}
        ids = {life[:2] for life in self._lost}
        returned = [info for info in come if (info.stage_id, info.input_addr) in own]
        others = [info for info in come if (info.stage_id, info.input_addr) not in own]
        others.sort(key=lambda info: _life(info)[:2] not in ids)
        losses = _Losses(self._lost)
        for info in (*returned, *others):
            self._take_place(info, losses)
        while len(self._lost) > _MOST:
            del self._lost[next(iter(self._lost))]

    def troubles(self, now_s: float, wall_s: float) -> Iterator[ReplicaTrouble]:
        """The losses of the last hour that nobody has replaced, the latest first."""
        for life, loss in reversed(list(self._lost.items())):
            if now_s - loss.at_s > _REMEMBERED_S:
                del self._lost[life]
                continue
            info = loss.info
            reason = own_reason(info.reason) or (loss.known if info.status is ReplicaStatus.UP else info.status)
            yield ReplicaTrouble(
                stage_id=info.stage_id,
                replica_id=info.replica_id,
                epoch=info.epoch,
                kind=TroubleKind.LOST,
                since=wall_s - (now_s - loss.at_s),
                reason=one_line(reason[:MOST_REASON]),
                host=info.host,
                pid=info.pid,
            )

    def _take_place(self, newcomer: ReplicaInfo, losses: _Losses) -> None:
        """Forget the loss that a newcomer makes good: of its own process, else of its id, else the stage's oldest."""
        life = losses.take_for(newcomer)
        if life is not None:
            loss = self._lost.pop(life)
            if loss.info.input_addr == newcomer.input_addr and loss.known == _ANSWERED:
                self._answering.add(_life(newcomer))
            return
        silent = (life for life in self._silent if life[0] == newcomer.stage_id and life not in self._replaced)
        if (life := next(silent, None)) is not None:
            self._replaced.add(life)


class _Losses:
    """The losses of one moment by what a newcomer may have in common with them, each to be taken once.

    Thousands may be lost and thousands come in one view: going through all for each would take minutes.
    """

    def __init__(self, lost: Mapping[_Life, _Loss]) -> None:
        self._of_stage: dict[int, dict[_Life, None]] = {}
        self._at_address: dict[tuple[int, str], dict[_Life, None]] = {}
        self._of_id: dict[tuple[int, int], dict[_Life, None]] = {}
        self._infos = {life: loss.info for life, loss in lost.items()}
        for life, info in self._infos.items():
            for group in self._groups(life, info):
                group[life] = None

    def take_for(self, newcomer: ReplicaInfo) -> _Life | None:
        """The loss that the newcomer makes good, which nobody else does after that; None if there is none."""
        groups = reversed(self._groups(_life(newcomer), newcomer))
        life = next((next(iter(group)) for group in groups if group), None)
        if life is not None:
            for group in self._groups(life, self._infos[life]):
                del group[life]
        return life

    def _groups(self, life: _Life, info: ReplicaInfo) -> tuple[dict[_Life, None], ...]:
        """All of its stage, those of its id, and those at its address."""
        return (
            self._of_stage.setdefault(life[0], {}),
            self._of_id.setdefault(life[:2], {}),
            self._at_address.setdefault((life[0], info.input_addr), {}),
        )


def _life(info: ReplicaInfo) -> _Life:
    return info.stage_id, info.replica_id, info.epoch


def _said_goodbye(info: ReplicaInfo) -> bool:
    """Whether it left as it was told to: a replica that fails writes why before it withdraws."""
    if info.status is ReplicaStatus.DRAINING:
        return True
    return info.status is ReplicaStatus.DOWN and own_reason(info.reason) in ("", DRAINED_BY_OPERATOR)

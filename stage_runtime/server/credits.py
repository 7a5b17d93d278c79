"""Flow control between hubs and a replica: its slots, lent to hubs as credits before their requests come.

A slot is running a request, lent to a hub as an unspent credit, or free. Events are recorded as they come;
``lend_and_recall`` then decides about all slots at once, once in each turn of the ZMQ thread, and returns the credits
to grant and to recall. Hubs are named by the routing ids of their connections. Pure.

What a hub says of its waiting requests is believed only as far as its deeds bear it out: one that waits spends its
credits at once. A hub that waits and lets credits lie is **doubted**, with all its connections and sessions: its
credits are recalled for others, and it gets one at a time, after all others that wait, until it has spent what it held.
Among the others the oldest request goes first, by its hub's word; but a hub that has held more than its share of the
slots, over the last seconds, goes after those that have not. Whatever hubs say, each that waits gets its share.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import ceil, exp, floor, inf
from typing import Final

#: A hub that has not answered a recall for so long loses the recalled credits.
RECALL_TIMEOUT_S: Final = 0.5
#: A hub that waits, and has not spent in so long what it held, is doubted.
IDLE_TIMEOUT_S: Final = 1.0
#: A request may have waited so long for other replicas before its hub asked this one; no hub's word counts for more.
HEAD_START_S: Final = 5.0
_MOST_DOUBTED: Final = 1000
_LEAST_MEAN: Final = 0.01
#: A hub that has held so many times its share goes after the others at once; one that has held more than its share
#: does when another hub has waited for a slot for so long, by this replica's own clock.
MOST_SHARES: Final = 1.5
PASSED_OVER_S: Final = 1.0
#: How many slots a hub has held is a mean in which a moment so long ago counts for a third.
SHARE_MEMORY_S: Final = 3.0
#: Credits that a doubted hub has left for so long, though it goes on asking, are of no use to anybody.
UNUSED_AFTER_S: Final = 5.0
#: Requests sent with credits that were void before they came are taken for so long, one for each such credit.
VOIDED_MEMORY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class GrantCredits:
    """Lend a hub so many more slots, under that session."""

    peer: str
    session: int
    credits: int


@dataclass(frozen=True, slots=True)
class RecallCredits:
    """Ask a hub for up to so many of its unspent credits."""

    peer: str
    session: int
    credits: int


@dataclass(frozen=True, slots=True)
class DoubtHub:
    """A hub says that it waits, and has let so many credits lie; tell the operator."""

    peer: str
    credits: int


@dataclass(frozen=True, slots=True)
class LostSlots:
    """How many slots serve nobody though requests wait, and why."""

    count: int = 0
    reason: str = ""


#: All slots can be used.
NO_LOST_SLOTS: Final = LostSlots()

CreditAction = GrantCredits | RecallCredits | DoubtHub


@dataclass(slots=True)
class _Account:
    session: int
    hub_id: str = ""
    #: Since when it asks without having been lent a slot.
    unserved_since_s: float = 0.0
    #: When its session began, or it last gave or lost credits unspent: no request of it counts as waiting for longer.
    queued_from_s: float = -inf
    unspent: int = 0
    #: How many requests wait in the hub for a credit of this replica, and since when the oldest of them waits.
    waiting: int = 0
    waiting_since_s: float = 0.0
    #: Since when the hub asks for credits, without a pause of IDLE_TIMEOUT_S, and when it asked last.
    asking_since_s: float = -inf
    asked_at_s: float = -inf
    #: How many credits it has spent or lost, and how many that must be by ``gone_by_s`` if it spends what it holds.
    gone: int = 0
    gone_due: int = 0
    gone_by_s: float = 0.0
    #: Credits that were lent for waiting requests and are about to be spent; counted so until ``pledged_until_s``.
    pledged: int = 0
    pledged_until_s: float = 0.0
    #: Credits in an unanswered recall, until when the answer counts, and what was lent since the recall was sent.
    recalled: int = 0
    answer_due_s: float = 0.0
    lent_since: int = 0
    #: Recalls that timed out: their answers, which may still come, return nothing.
    unanswered: int = 0


class CreditBook:
    """The slots of one replica. Requests on credit and unspent credits together never exceed the capacity."""

    def __init__(self, recall_timeout_s: float = RECALL_TIMEOUT_S) -> None:
        self._recall_timeout_s = recall_timeout_s
        self._accounts: dict[str, _Account] = {}
        self._capacity = 0
        self._unspent = 0
        self._running = 0
        self._running_of: defaultdict[str, int] = defaultdict(int)
        #: Requests that ended since the last settling, by hub: a slot that no hub waits for is lent to the same hub.
        self._ended: defaultdict[str, int] = defaultdict(int)
        self._wanting: set[str] = set()
        self._recalling: set[str] = set()
        #: Those with unspent credits: of many hubs few can hold any.
        self._holders: dict[str, None] = {}
        #: Hubs, by id, that said that they wait, and spent nothing; and since when.
        self._doubted: dict[str, float] = {}
        #: Credits of each hub, by id, that were forfeited or void of late, and until when it may still have sent
        #: requests with them.
        self._voided: dict[str, tuple[int, float]] = {}
        #: How many slots each hub has held of late, by id; how many each has held since the last
        #: settling, and when that was.
        self._mean_held: dict[str, float] = {}
        self._held_since: dict[str, int] = {}
        self._settled_at_s = -inf
        #: The last moment that a caller has named.
        self._now_s = -inf
        #: Whether nothing has changed since the last settling.
        self._is_settled = True

    def __repr__(self) -> str:
        return (
            f"CreditBook(capacity={self._capacity}, running={self._running}, unspent={self._unspent}, "
            f"hubs={len(self._accounts)}, wanting={len(self._wanting)}, recalling={len(self._recalling)})"
        )

    @property
    def unspent(self) -> int:
        """The unspent credits of all hubs."""
        return self._unspent

    @property
    def used(self) -> int:
        """Slots that run a request."""
        return self._running

    @property
    def free(self) -> int:
        """Slots that neither run a request nor are lent; below 0 where requests came without a credit."""
        return self._capacity - self._running - self._unspent

    def unspent_of(self, peer: str) -> int:
        """The unspent credits of one hub."""
        account = self._accounts.get(peer)
        return 0 if account is None else account.unspent

    def held(self) -> dict[str, int]:
        """The unspent credits of each hub's connection that holds any. May be called from any thread."""
        return {peer: account.unspent for peer, account in self._accounts.copy().items() if account.unspent}

    def unused(self, now_s: float) -> dict[str, int]:
        """The unspent credits, by hub id, of hubs that have asked for slots for long and leave those that they have."""
        found: defaultdict[str, int] = defaultdict(int)
        for account in self._accounts.values() if self._doubted else ():
            since_s = self._doubted.get(account.hub_id, inf)
            is_asking = now_s - account.asked_at_s <= IDLE_TIMEOUT_S
            if account.unspent and is_asking and now_s - since_s >= UNUSED_AFTER_S:
                found[account.hub_id] += account.unspent
        return dict(found)

    def lost_slots(self, requests: int, now_s: float) -> LostSlots:
        """The slots that serve nobody; ``requests`` is how many requests are there that take one."""
        unused, booked = self.unused(now_s), max(0, self._running - requests)
        reasons = [
            f"hub {hub_id} waits for slots and has used none of the {count} lent to it for over {UNUSED_AFTER_S:g} s"
            for hub_id, count in sorted(unused.items())
        ]
        reasons += [f"{booked} taken by requests that have ended"] if booked else []
        if not reasons:
            return NO_LOST_SLOTS
        count = sum(unused.values()) + booked
        slots = f"{count} of its {self._capacity} slots" if count <= self._capacity else f"{count} slots"
        return LostSlots(count, f"{slots} serve nobody: {'; '.join(reasons)}")

    def set_capacity(self, capacity: int) -> None:
        """Set how many slots there are; 0 while the replica takes no work."""
        if capacity != self._capacity:
            self._capacity = capacity
            self._is_settled = False

    def open_account(self, peer: str, session: int) -> None:
        """A hub begins a session; credits of its earlier one are void. Does nothing for the present session."""
        account = self._accounts.get(peer)
        if account is not None and account.session == session:
            return
        self.close_account(peer)
        self._accounts[peer] = _Account(session, peer.partition("/")[0], self._now_s)
        self._is_settled = False

    def close_account(self, peer: str) -> None:
        """A hub's session has ended, and its credits are void. Does nothing for unknown hubs."""
        account = self._accounts.pop(peer, None)
        if account is None:
            return
        self._unspent -= account.unspent
        self._holders.pop(peer, None)
        self._remember_voided(account.hub_id, account.unspent, self._now_s)
        self._wanting.discard(peer)
        self._recalling.discard(peer)
        self._is_settled = False

    def _remember_voided(self, hub_id: str, credits_: int, now_s: float) -> None:
        if not credits_:
            return
        self._voided = {each: (count, until_s) for each, (count, until_s) in self._voided.items() if until_s > now_s}
        # New sessions without end are no way to more than all slots.
        most = max(self._capacity, credits_)
        count = min(self._voided.get(hub_id, (0, 0.0))[0] + credits_, most)
        self._voided[hub_id] = count, now_s + VOIDED_MEMORY_S

    def use_voided(self, peer: str, now_s: float) -> bool:
        """Whether a hub may have sent a request with a credit that was lent to it and is void; uses that up."""
        hub_id = peer.partition("/")[0]
        count, until_s = self._voided.pop(hub_id, (0, 0.0))
        if now_s >= until_s or not count:
            return False
        if count > 1:
            self._voided[hub_id] = count - 1, until_s
        return True

    def record_demand(self, peer: str, session: int, waiting: int, oldest_wait_s: float, now_s: float) -> bool:
        """A hub has so many requests waiting for a credit. Return False for another session than its present one."""
        account = self._accounts.get(peer)
        if account is None or account.session != session:
            return False
        self._is_settled = False
        if waiting:
            self._note_asking(account, now_s)
        if account.hub_id in self._doubted:
            waiting = 0 if self._holds_any(account.hub_id) else min(waiting, 1)
        account.waiting = waiting
        # New sessions, and credits that come back unspent, are no way to the head of the queue.
        earliest_s = max(account.asking_since_s - HEAD_START_S, account.queued_from_s)
        account.waiting_since_s = max(now_s - oldest_wait_s, earliest_s)
        if waiting and peer not in self._wanting:
            self._wanting.add(peer)
            account.unserved_since_s = now_s
        elif not waiting:
            self._wanting.discard(peer)
            # What it was lent for requests that went elsewhere is of no use to it.
            account.pledged = 0
        return True

    def _holds_any(self, hub_id: str) -> bool:
        return any(account.unspent for account in self._accounts.values() if account.hub_id == hub_id)

    def _note_asking(self, account: _Account, now_s: float) -> None:
        # A hub that says "none" for a moment goes on asking: else it could put off its time for ever.
        if not account.waiting and now_s - account.asked_at_s > IDLE_TIMEOUT_S:
            account.asking_since_s = now_s
            self._expect_spent(account, now_s)
        account.asked_at_s = now_s

    @staticmethod
    def _expect_spent(account: _Account, now_s: float) -> None:
        account.gone_due, account.gone_by_s = account.gone + account.unspent, now_s + IDLE_TIMEOUT_S

    def take_back(self, peer: str, session: int, credits_: int) -> bool:
        """A hub has answered a recall. Return False for another session than its present one."""
        account = self._accounts.get(peer)
        if account is None or account.session != session:
            return False
        self._is_settled = False
        if account.unanswered:
            account.unanswered -= 1
            # What a hub gives back late it has sent no request with.
            for _ in range(min(credits_, self._voided.get(account.hub_id, (0, 0.0))[0])):
                self.use_voided(peer, self._now_s)
            return True
        left = account.unspent - min(credits_, account.unspent)
        if credits_ < account.recalled:
            # The hub gave back all credits that it held at the recall, so only those lent since then are left.
            left = min(left, account.lent_since)
        self._set_unspent(peer, account, left)
        account.recalled = 0
        self._recalling.discard(peer)
        return True

    def has_room_without_credit(self, peer: str) -> bool:
        """Whether a hub may begin a request that spends no credit: within its share, while other hubs want slots."""
        hub_id = peer.partition("/")[0]
        others = {account.hub_id for account in self._accounts.values()} - {hub_id}
        if not others or not self._capacity:
            return True
        held, waiting = self._held_by_hub(), self._waiting_hubs() - {hub_id}
        share = ceil(self._share({hub_id, *held, *waiting})) if waiting else self._capacity
        return held.get(hub_id, 0) < max(1, share)

    def begin_request(self, peer: str, *, credit: bool) -> bool:
        """A request was accepted. Return whether it has spent one of the hub's credits."""
        self._running += 1
        self._running_of[peer] += 1
        self._is_settled = False
        return credit and self.spend_credit(peer)

    def spend_credit(self, peer: str) -> bool:
        """A hub has spent a credit, whether its request was accepted or not. Return False if it had none."""
        account = self._accounts.get(peer)
        if account is None or not account.unspent:
            return False
        account.unspent -= 1
        if not account.unspent:
            self._holders.pop(peer, None)
        account.gone += 1
        if account.gone >= account.gone_due:
            self._doubted.pop(account.hub_id, None)
        account.pledged -= account.pledged > 0
        self._unspent -= 1
        self._is_settled = False
        return True

    def end_request(self, peer: str) -> None:
        """An accepted request has ended, or was parked: its slot is free."""
        self._running -= 1
        self._running_of[peer] -= 1
        if not self._running_of[peer]:
            del self._running_of[peer]
        self._ended[peer] += 1
        self._is_settled = False

    def lend_and_recall(self, now_s: float) -> list[CreditAction]:
        """Lend free slots, recall credits that other hubs wait for, take back credits whose recall was not answered."""
        self._now_s = now_s
        if self._recalling:
            self._forfeit(now_s)
        doubts = self._doubt_idle(now_s) if self._wanting else []
        if self._is_settled:
            return []
        self._is_settled = True
        self._measure_shares(now_s)
        lent: defaultdict[str, int] = defaultdict(int)
        if self.free > 0 and self._accounts:
            self._lend_to_waiting(lent, now_s)
            self._lend_back(lent)
            if self.free > 0:
                self._lend_evenly(lent)
        self._ended.clear()
        actions: list[CreditAction] = [
            *doubts,
            *(GrantCredits(peer, self._accounts[peer].session, credits_) for peer, credits_ in lent.items()),
        ]
        if self._wanting or self.free < 0:
            actions += self._recall_idle(now_s)
        self._held_since = self._held_by_hub()
        return actions

    # ---- shares

    def _measure_shares(self, now_s: float) -> None:
        """Take over what each hub has held since the last settling."""
        past = exp((self._settled_at_s - now_s) / SHARE_MEMORY_S)
        self._settled_at_s = now_s
        names = {*self._held_since, *self._mean_held}
        means = {
            name: self._mean_held.get(name, 0.0) * past + self._held_since.get(name, 0) * (1 - past) for name in names
        }
        self._mean_held = {name: mean for name, mean in means.items() if mean > _LEAST_MEAN}

    def _held_by_hub(self) -> dict[str, int]:
        held: defaultdict[str, int] = defaultdict(int)
        for peer, count in self._running_of.items():
            held[peer.partition("/")[0]] += count
        for peer in self._holders:
            account = self._accounts[peer]
            held[account.hub_id] += account.unspent
        return held

    def _waiting_hubs(self) -> set[str]:
        """Those that wait for slots which there are; what hubs that are doubted say is no reason to end requests."""
        if not self._capacity:
            return set()
        return {self._accounts[peer].hub_id for peer in self._wanting} - self._doubted.keys()

    def _share(self, hub_ids: set[str]) -> float:
        return self._capacity / max(len(hub_ids), 1)

    def excess(self) -> dict[str, int]:
        """The slots, by hub id, that hubs hold beyond their share while another hub waits for slots.

        Shares are rounded up, and each is at least one slot.
        """
        waiting = self._waiting_hubs()
        held = self._held_by_hub() if waiting else {}
        share = max(1, ceil(self._share({*held, *waiting})))
        return {hub: count - share for hub, count in held.items() if count > share and waiting - {hub}}

    def rounding_excess(self) -> dict[str, int]:
        """The slots that hubs hold beyond their share as it is, while another that waits has not even a whole one.

        With fewer slots than hubs, for example, each slot is one that another hub could have in its turn.
        """
        waiting = self._waiting_hubs()
        held = self._held_by_hub() if waiting else {}
        share = self._share({*held, *waiting})
        short = {hub for hub in waiting if held.get(hub, 0) < max(1, floor(share))}
        return {hub: ceil(count - share) for hub, count in held.items() if count > share and short - {hub}}

    def _most_held(self, now_s: float) -> float:
        """The mean of held slots beyond which a hub goes after the others."""
        wanting = [self._accounts[peer] for peer in self._wanting]
        share = self._capacity / max(len({*self._held_since, *(account.hub_id for account in wanting)}), 1)
        is_passed_over = any(
            now_s - account.unserved_since_s >= PASSED_OVER_S and self._mean_held.get(account.hub_id, 0.0) < share
            for account in wanting
        )
        return share if is_passed_over else share * MOST_SHARES

    # ---- lending

    def _lend(self, lent: defaultdict[str, int], peer: str, credits_: int) -> None:
        account = self._accounts[peer]
        account.unspent += credits_
        self._holders[peer] = None
        account.lent_since += credits_
        self._unspent += credits_
        lent[peer] += credits_

    def _doubt_idle(self, now_s: float) -> list[DoubtHub]:
        """Doubt the hubs that wait, and still hold what they held IDLE_TIMEOUT_S ago; return those not doubted yet."""
        doubts = []
        for peer in sorted(self._wanting):
            account = self._accounts[peer]
            if peer not in self._wanting:
                continue
            if account.gone >= account.gone_due:
                self._expect_spent(account, now_s)
            elif now_s >= account.gone_by_s:
                if account.hub_id not in self._doubted:
                    doubts.append(DoubtHub(peer, account.unspent))
                    if len(self._doubted) >= _MOST_DOUBTED:
                        del self._doubted[next(iter(self._doubted))]
                    self._doubted[account.hub_id] = now_s
                account.pledged = 0
                self._drop_demand(account.hub_id)
        return doubts

    def _drop_demand(self, hub_id: str) -> None:
        for peer in [each for each in self._wanting if self._accounts[each].hub_id == hub_id]:
            self._accounts[peer].waiting = 0
            self._wanting.discard(peer)
            self._is_settled = False

    def _lend_to_waiting(self, lent: defaultdict[str, int], now_s: float) -> None:
        while self._wanting and self.free > 0:
            most = self._most_held(now_s)
            peer = min(self._wanting, key=lambda each: self._turn(each, most))
            account = self._accounts[peer]
            account.unserved_since_s = now_s
            self._lend(lent, peer, 1)
            # Only the oldest wait is known: the others are assumed to be spread evenly behind it. A hub that says that
            # more wait than there are slots is not the oldest for ever.
            account.waiting_since_s += max(0.0, now_s - account.waiting_since_s) / self._wanted(account)
            account.waiting -= 1
            account.pledged, account.pledged_until_s = account.pledged + 1, now_s + self._recall_timeout_s
            if not account.waiting:
                self._wanting.discard(peer)
            if account.hub_id in self._doubted:
                self._drop_demand(account.hub_id)

    def _turn(self, peer: str, most_held: float) -> tuple[bool, bool, float, str]:
        account = self._accounts[peer]
        has_more = self._mean_held.get(account.hub_id, 0.0) > most_held
        return account.hub_id in self._doubted, has_more, account.waiting_since_s, peer

    def _is_lent_unasked(self, account: _Account) -> bool:
        return not account.unanswered and account.hub_id not in self._doubted

    def _lend_back(self, lent: defaultdict[str, int]) -> None:
        for peer, ended in self._ended.items():
            account = self._accounts.get(peer)
            if account is not None and self._is_lent_unasked(account) and self.free > 0:
                self._lend(lent, peer, min(ended, self.free))

    def _lend_evenly(self, lent: defaultdict[str, int]) -> None:
        # To the hub that holds the least, so that a new hub gets its share and all hubs hold about the same.
        answering = [peer for peer, account in self._accounts.items() if self._is_lent_unasked(account)]
        while answering and self.free > 0:
            self._lend(lent, min(answering, key=lambda peer: (self._held(peer), peer)), 1)

    def _wanted(self, account: _Account) -> int:
        """How many credits a hub asks for, of those that there can be."""
        return min(account.waiting, max(self._capacity, 1))

    def _held(self, peer: str) -> int:
        return self._accounts[peer].unspent + self._running_of.get(peer, 0)

    # ---- recalling

    def _recall_idle(self, now_s: float) -> list[RecallCredits]:
        asked = sum(self._accounts[peer].recalled for peer in self._recalling)
        if self.free < 0:
            # Fewer slots than there were: hubs that hold credits have to give some back.
            needed = -self.free - asked
            idle = {peer: account.unspent for peer, account in self._accounts.items()}
        else:
            needed = sum(self._wanted(self._accounts[peer]) for peer in self._wanting) - self.free - asked
            idle = {peer: self._idle(account, now_s) for peer, account in self._accounts.items()}
        idle = {peer: count for peer, count in idle.items() if count > 0 and not self._accounts[peer].recalled}
        taken: defaultdict[str, int] = defaultdict(int)
        while needed > 0 and idle:
            peer = max(idle, key=lambda each: (idle[each], each))
            taken[peer] += 1
            needed -= 1
            idle[peer] -= 1
            if not idle[peer]:
                del idle[peer]
        return [self._recall(peer, credits_, now_s) for peer, credits_ in taken.items()]

    def _idle(self, account: _Account, now_s: float) -> int:
        """How many credits of a hub are unused while others wait."""
        if account.waiting:
            return 0
        if not account.pledged or now_s >= account.pledged_until_s:
            return account.unspent
        # The pledge ends by time alone, without an event: settle again in the next turn.
        self._is_settled = False
        return account.unspent - account.pledged

    def _recall(self, peer: str, credits_: int, now_s: float) -> RecallCredits:
        account = self._accounts[peer]
        account.recalled, account.lent_since = credits_, 0
        account.answer_due_s = now_s + self._recall_timeout_s
        self._recalling.add(peer)
        return RecallCredits(peer, account.session, credits_)

    def _forfeit(self, now_s: float) -> None:
        for peer in [each for each in self._recalling if self._accounts[each].answer_due_s <= now_s]:
            account = self._accounts[peer]
            forfeited = min(account.recalled, account.unspent)
            self._set_unspent(peer, account, account.unspent - forfeited)
            self._remember_voided(account.hub_id, forfeited, now_s)
            account.recalled = 0
            account.unanswered += 1
            self._recalling.discard(peer)
            self._is_settled = False

    def _set_unspent(self, peer: str, account: _Account, unspent: int) -> None:
        if unspent < account.unspent:
            account.gone += account.unspent - unspent
            account.queued_from_s = self._now_s
            account.waiting_since_s = max(account.waiting_since_s, self._now_s)
        self._unspent += unspent - account.unspent
        account.unspent = unspent
        if not unspent:
            self._holders.pop(peer, None)

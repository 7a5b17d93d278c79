"""Changes that no test can notice, each with the reason: they change nothing that can be seen."""

from __future__ import annotations

from typing import Final

#: By file, function, and the statement before and after.
EQUIVALENT: Final[dict[tuple[str, str, str, str], str]] = {
    (
        "omni_discovery/wire/scan.py",
        "after_numbers",
        "return place if found is None else found.end()",
        "return found.end()",
    ): "the expression matches nothing too, so there always is a match; mypy can't know",
    (
        "omni_discovery/wire/scan.py",
        "after_scalars",
        "return place if found is None else found.end()",
        "return found.end()",
    ): "the expression matches nothing too, so there always is a match; mypy can't know",
    (
        "omni_discovery/records/sizes.py",
        "cut_value",
        "if len(value) <= MAX_VALUE_BYTES or not key.startswith(ROOT):",
        "if len(value) < MAX_VALUE_BYTES or not key.startswith(ROOT):",
    ): "a value of exactly that length is cut behind its end",
    (
        "hub/request/nesting.py",
        "_containers_in",
        "kinds = {kind for kind in set(map(type, children)) if kind in _EXACT or issubclass(kind, _CONTAINERS)}",
        "kinds = {kind for kind in set(map(type, children)) if issubclass(kind, _CONTAINERS)}",
    ): "the usual types are asked first for speed; they are subclasses, too",
    (
        "hub/pool/members.py",
        "SlowStart.__init__",
        "self._stepped_at_s = 0.0",
        "self._stepped_at_s = 1.0",
    ): "any moment before the first step will do, and a host's clock is past both",
    (
        "stage_runtime/engine_loop/backpressure.py",
        "Pauses._apply",
        "(self._set_aside.add if is_paused and is_aside is True else self._set_aside.discard)(key)",
        "(self._set_aside.add if is_aside is True else self._set_aside.discard)(key)",
    ): "whether a request that runs was put aside is not read until it is paused again, which asks anew",
    (
        "stage_runtime/engine_loop/pieces.py",
        "Pieces.feed_waiting",
        "keys = [key for key, flows in self._inflows.items() if any((flow.queued for flow in flows.values()))]",
        "keys = [key for key, flows in self._inflows.items() if True]",
    ): "a request without queued pieces is fed none; asked first for speed",
    (
        "stage_runtime/server/outbox.py",
        "_next_frames",
        "if len(waiting) == 1:",
        "if False:",
    ): "one message alone is joined to itself; a short cut",
    (
        "omni_discovery/balancing/weighted.py",
        "_Group.insert",
        "if len(self.keys) > 2 * self.count + 64:",
        "if True:",
    ): "how often empty buckets are dropped costs time, and changes no pick",
    (
        "omni_discovery/balancing/weighted.py",
        "TwoChoicesIndex._pick_weighted",
        "if second is not None and second is not first:",
        "if second is not first:",
    ): "where there is a first there is a second; mypy can't know",
    (
        "hub/pool/credits.py",
        "CreditRequester.__init__",
        "self._asked_for = 0",
        "self._asked_for = 1",
    ): "it is read only while requests are open, and set with them",
    (
        "hub/pool/members.py",
        "SlowStart.weigh",
        "weight *= 1.0 - (1.0 - _FIRST_PART) * min(1.0, left)",
        "weight *= 1.0 - (1.0 - _FIRST_PART) * min(2.0, left)",
    ): "what is left is no more than the whole length, unless the clock goes back",
    (
        "hub/pool/snapshots.py",
        "picking_of",
        "pairs = zip(candidates, places, strict=True)",
        "pairs = zip(candidates, places, strict=False)",
    ): "their lengths were compared in the line before",
    (
        "hub/pool/wait_queue.py",
        "WaitQueue.__init__",
        "self._tried_version = -1",
        "self._tried_version = -2",
    ): "any version that is none will do",
    (
        "omni_discovery/balancing/base.py",
        "Member.__init__",
        "self.position = -1",
        "self.position = -2",
    ): "an index sets it before it reads it",
    (
        "omni_discovery/balancing/base.py",
        "ListIndex.add",
        "member.index_state = None",
        "pass",
    ): "a list keeps no state, and other indices know their own from a stranger's",
    (
        "omni_discovery/balancing/prefix.py",
        "PrefixIndex._join",
        "if len(self._on_ring) > 2 * len(self._members) + _POINTS_OF_A_DIGEST:",
        "if len(self._on_ring) >= 2 * len(self._members) + _POINTS_OF_A_DIGEST:",
    ): "when places of those that are gone are dropped costs time, and changes no pick",
    (
        "omni_discovery/balancing/weighted.py",
        "StrideIndex.add",
        "self._number += 1",
        "self._number -= 1",
    ): "the numbers only have to differ",
    (
        "hub/request/replay.py",
        "Mark.is_of",
        "pairs = zip(self.samples, other.samples, strict=True)",
        "pairs = zip(self.samples, other.samples, strict=False)",
    ): "files of one size and one digest have as many samples",
    (
        "omni_discovery/view/mass_loss.py",
        "MassLossGuard._keep",
        "if not overdue:",
        "if False:",
    ): "where none is overdue there is no last one to be kept; it spares the questions",
    (
        "omni_discovery/wire/containers.py",
        "has_too_many_containers",
        "if len(packed) <= most:",
        "if len(packed) < most:",
    ): "so many bytes have no more parts than that, counted or not",
    (
        "omni_discovery/wire/session.py",
        "HubSession._open",
        "early, self._early_credits = (self._early_credits, 0)",
        "early, self._early_credits = (self._early_credits, 1)",
    ): "an open session does not read it, and the next one begins with none",
    (
        "hub/pool/hand_offs.py",
        "HandOffRecord.hand_off_read",
        "if self._read and now_s - self._failed_at_s > _FORGET_S:",
        "if now_s - self._failed_at_s > _FORGET_S:",
    ): "to forget nothing changes nothing",
    (
        "hub/pool/snapshots.py",
        "PickSnapshots.look",
        "if avoid:",
        "if True:",
    ): "the places are read only where replicas are avoided; to look them up costs time",
    (
        "hub/pool/wait_queue.py",
        "PriorityQueue.add",
        "if max(len(self._arrivals), len(self._heap)) > 2 * self.count + 64:",
        "if max(len(self._arrivals), len(self._heap)) > 2 * self.count - 64:",
    ): "how often those who were served are dropped costs time, and changes no order",
    (
        "hub/pool/core.py",
        "Pool._affine",
        "other = None if affinity_request_id is None else self._bindings.get(affinity_request_id)",
        "other = self._bindings.get(affinity_request_id)",
    ): "no request has None as its id; mypy can't know",
    (
        "hub/pool/core.py",
        "Pool.grant",
        "if self._waiters.count:",
        "if True:",
    ): "where nobody waits nobody is served; asked first for speed",
    (
        "hub/pool/credits.py",
        "_keep",
        "if entries:",
        "if True:",
    ): "nothing is taken out of an empty one; asked first for speed",
    (
        "hub/pool/credits.py",
        "CreditRequester.__init__",
        "self._asked_for = 0",
        "pass",
    ): "it is read only while requests are open, and set with them",
    (
        "hub/pool/credits.py",
        "CreditRequester.__init__",
        "self._asked_at_s = 0.0",
        "pass",
    ): "it is read only while requests are open, and set with them",
    (
        "hub/pool/credits.py",
        "CreditRequester.__init__",
        "self._asked_at_s = 0.0",
        "self._asked_at_s = 1.0",
    ): "it is read only while requests are open, and set with them",
    (
        "hub/pool/outliers.py",
        "Health.__init__",
        "self.ejected_at_s = self.until_s = 0.0",
        "pass",
    ): "both are read only of a replica that was ejected, which sets them",
    (
        "hub/pool/snapshots.py",
        "PickSnapshots.__init__",
        "self._places: tuple[int, ...] = ()",
        "pass",
    ): "a pick looks before it is noted, and a look sets what is read then",
    (
        "hub/pool/snapshots.py",
        "PickSnapshots.__init__",
        "self._rows: tuple[ReplicaRow, ...] = ()",
        "pass",
    ): "a pick looks before it is noted, and a look sets it",
    (
        "hub/pool/wait_queue.py",
        "WaitQueue.serve",
        "if picker.ejected_free_count and waiters.avoiding:",
        "if waiters.avoiding:",
    ): "who serves from the ejected asks the same again; asked first for speed",
    (
        "hub/pool/wait_queue.py",
        "PriorityQueue.__init__",
        "self._number = 0",
        "self._number = 1",
    ): "the numbers only have to rise",
    (
        "hub/request/nesting.py",
        "check_nesting",
        "if not level:",
        "if False:",
    ): "nothing is deeper than nothing; it spares empty rounds",
    (
        "stage_runtime/server/credits.py",
        "CreditBook.lend_and_recall",
        "if self._wanting or self.free < 0:",
        "if self._wanting or self.free <= 0:",
    ): "where no slot is missing and nobody wants one, none is asked back",
}

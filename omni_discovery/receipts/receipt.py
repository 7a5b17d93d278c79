"""Receipt: what a hub tells of one request, as JSON. It holds no prompt, no output and no text of an engine. Pure.

Moments are seconds since the hub received the request (``_s``), or wall-clock seconds (``_at``). Replicas are named
``<stage>/<replica id>``. Fields that have their default are left out.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Why a replica was chosen: by the policy; because the request, or the one it belongs to, was there already; or because
#: all others are to be avoided, and this one is only ejected.
BY_POLICY: Final = "policy"
BY_BINDING: Final = "bound"
LAST_RESORT: Final = "last resort"


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica at the moment of a pick. ``out`` says why it could not be picked; empty: it could."""

    replica: str
    epoch: int = 0
    #: The hub's estimate of its queue length, and what it reported last.
    load: int = 0
    reported: int = 0
    capacity: int = 1
    #: What of its weight counted: less in a slow start.
    weight: float = 1.0
    #: Credits of this hub; None where its session goes without.
    credits: int | None = None
    #: 0: picked from first (all replicas, or those with the labels that the hub prefers); -1: not at all.
    tier: int = 0
    is_local: bool = True
    #: Whether its next request is the probe after an ejection.
    is_probed: bool = False
    out: str = ""
    host: str = ""
    version: str = ""
    #: Where the policy's index had it: what the index sorts by, and its place among equals.
    key: float = 0.0
    position: int = -1


class Picking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of a pool: who could be picked, who could not, and who was. ``chosen`` empty: nobody, it waited."""

    how: str = BY_POLICY
    policy: str = ""
    chosen: str = ""
    chosen_epoch: int = 0
    #: All replicas of this version of the stage that the hub knows, and how many of them had a free slot.
    known: int = 0
    free: int = 0
    candidates: list[Candidate] = []
    #: How many more there were than the receipt holds.
    cut: int = 0
    #: What chance was drawn, and what else the policy's index went by.
    draws: list[float] = []
    basis: list[float] = []


class Delay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a stage's work did not leave at once, from when to when."""

    what: str
    from_s: float
    to_s: float | None = None


class StageAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt of one stage."""

    stage: int
    attempt: int
    #: When the stage was due.
    due_s: float | None = None
    replica: str = ""
    epoch: int = 0
    #: The revision of the registry that the hub's view had.
    view_revision: int = 0
    waits: list[Delay] = []
    sent_s: float | None = None
    accepted_s: float | None = None
    first_output_s: float | None = None
    #: Of the first output: text, image, audio, ...
    modality: str = ""
    first_piece_s: float | None = None
    ended_s: float | None = None
    #: done, failed, lost, rejected, unsent, aborted; empty: it runs.
    outcome: str = ""
    reason: str = ""
    is_retry: bool = False
    #: Whether it goes on behind what the client had seen, or makes that again and compares it.
    continues: bool = False
    repeats: bool = False
    picking: Picking | None = None


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hand-off between two stages, as the last attempts left it."""

    from_stage: int
    to_stage: int
    connector: str = ""
    pieces: int = 1
    size_bytes: int = 0
    #: How long the stage took to fetch it, by its replica.
    seconds: float | None = None


class Happening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of the request, by the hub's names for events."""

    at_s: float
    what: str
    stage: int | None = None
    attempt: int | None = None
    detail: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of one hub."""

    request_id: str
    #: The client's name for it, and a label of the client's that need not be unique (x-request-id).
    shown_id: str = ""
    label: str = ""
    #: The name of the API key, never the key.
    key: str = ""
    hub: str = ""
    #: The request that this one is a companion of, and its role there.
    parent_id: str = ""
    role: str = ""
    received_at: float = 0.0
    #: None: it is still under way.
    took_s: float | None = None
    #: ok, cancelled or failed; empty: it is still under way.
    outcome: str = ""
    #: The type of the error, without its text, and the stage that it is about.
    error: str = ""
    error_stage: int | None = None
    stages: list[int] = []
    final_stages: list[int] = []
    priority: int = 0
    #: The fingerprint of each stage in the deploy document that it goes by, in the order of ``stages``.
    fingerprints: list[str] = []
    attempts: list[StageAttempt] = []
    transfers: list[Transfer] = []
    events: list[Happening] = []
    timings_s: dict[str, float] = {}


class ReceiptLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a list of requests."""

    request_id: str
    shown_id: str = ""
    label: str = ""
    hub: str = ""
    received_at: float = 0.0
    took_s: float | None = None
    outcome: str = ""
    error: str = ""
    error_stage: int | None = None
    #: Why the last attempt that failed did.
    reason: str = ""
    #: Where it was sent, in that order; a replica stands twice if it was sent there twice.
    replicas: list[str] = []
    #: How long each of those worked, from the send to the end of its stage; None: it did not come to that.
    spans_s: list[float | None] = []


class WaitingWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage's work of a request that can't leave now, or an answer that is not read; and what it waits for."""

    request_id: str
    shown_id: str = ""
    label: str = ""
    #: None for an answer.
    stage: int | None = None
    attempt: int = 0
    since_s: float = 0.0
    what: str = ""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as one hub sees it now, and how it fared in the picks that the hub has kept."""

    now: Candidate
    hub: str = ""
    #: Requests of this hub that are there.
    in_flight: int = 0
    #: Of the last picks of its stage: how many chose it, and others though it was free; and the reasons why it could
    #: not be picked, each with its number.
    picks: int = 0
    chosen: int = 0
    passed_over: int = 0
    left_out: dict[str, int] = {}
    #: When it was chosen last, wall-clock; None: not in the picks that are kept.
    last_chosen_at: float | None = None
    #: Why it gets nothing, or less than others, and what to do; empty where nothing keeps it from being picked.
    why: list[str] = []

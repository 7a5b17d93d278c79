"""What a diagnosis is made of, and what it looks at. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from omni_discovery.kv import KeyValue
from omni_discovery.table import View


class Grade(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``advice`` is what to do, empty where there is nothing to do."""

    grade: Grade
    topic: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at: the view and the raw keys of one namespace, and the wall clock here."""

    namespace: str
    view: View
    items: Sequence[KeyValue]
    now_s: float
    #: How many replicas each namespace of this etcd has; None if we may not look.
    namespaces: Mapping[str, int] | None = None

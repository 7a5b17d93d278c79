"""The optional methods of an engine beyond ``Engine``, looked up once when the engine loop is built.

Engines are found by entry point and typed by shape: a third party's class need not derive from anything here. The
attributes are read through the protocols of ``base``, so mypy checks their names and signatures; a name in a
string would not be checked.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from omni_discovery.records.params import ParamBounds
from stage_runtime.engines.base import (
    CheckedEngine,
    CompanionEngine,
    ControlEngine,
    DescribedEngine,
    DeterministicEngine,
    KvEngine,
    MeasuredEngine,
    PartialImageEngine,
    PieceEngine,
    ResumingEngine,
    SegmentEngine,
    SpeakingEngine,
    StageRequest,
    ThreadedEngine,
    TypedEngine,
)

logger = logging.getLogger(__name__)

_Member = TypeVar("_Member")

#: Methods that an engine may have beside those of ``Engine``.
OPTIONAL_METHODS: Final = ("update", "feed", "wants", "keeps_pieces", "pause", "moved_at_s", "check", "metrics")
#: Attributes and properties that it may have.
OPTIONAL_ATTRIBUTES: Final = (
    *("controls", "deterministic", "gives_partial_images", "kv_hosts", "model_details", "not_resumable"),
    *("params", "takes_companions", "voices"),
)
#: From which likeness on, 0 to 1, a name counts as a misspelling of another.
_NEAR: Final = 0.8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional methods of one engine, bound; None for each that the engine does not have.

    The attributes may change while the engine loads, so the methods below read them at each call.
    """

    engine: object
    update: Callable[[StageRequest], None] | None
    feed: Callable[[str, int, Mapping[str, Any] | None, bool], None] | None
    wants: Callable[[str, int], bool] | None
    keeps_pieces: Callable[[str], bool] | None
    pause: Callable[[str, bool], bool | None] | None
    moved_at_s: Callable[[], float] | None
    check: Callable[[], None] | None
    metrics: Callable[[], Mapping[str, float]] | None

    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """The engine's control methods by name, see ``ControlEngine``; empty if it has none."""
        return _read(lambda: cast(ControlEngine, self.engine).controls) or {}

    def model_details(self) -> Mapping[str, Any]:
        """The details of the loaded model, see ``DescribedEngine``; empty if the engine has none."""
        return _read(lambda: cast(DescribedEngine, self.engine).model_details) or {}

    def kv_hosts(self) -> list[str]:
        """The hosts where its KV cache is fetched, see ``KvEngine``; empty if it names none."""
        return list(_read(lambda: cast(KvEngine, self.engine).kv_hosts) or ())

    def is_deterministic(self) -> bool:
        """Whether the engine says that its output is a function of a request's input and seed."""
        return _read(lambda: cast(DeterministicEngine, self.engine).deterministic) is True

    def gives_partial_images(self) -> bool:
        """Whether the engine can put out unfinished pictures."""
        return _read(lambda: cast(PartialImageEngine, self.engine).gives_partial_images) is True

    def params(self) -> Mapping[str, ParamBounds] | None:
        """The parameters that it takes, see ``TypedEngine``; None if it does not say."""
        return _read(lambda: cast(TypedEngine, self.engine).params)

    def voices(self) -> list[str]:
        """The voices that it can speak with, see ``SpeakingEngine``; empty if it names none."""
        return [str(each) for each in _read(lambda: cast(SpeakingEngine, self.engine).voices) or ()]

    def can_resume(self) -> bool:
        """Whether ``add`` accepts requests with ``resume`` at all."""
        return _read(lambda: cast(ResumingEngine, self.engine).not_resumable) is not None

    def takes_companions(self) -> bool:
        """Whether the engine uses the hand-offs of a request's companions."""
        return bool(_read(lambda: cast(CompanionEngine, self.engine).takes_companions))


def capabilities_of(engine: object) -> Capabilities:
    """Look up what an engine offers. A method that is missing, or is None, is not offered."""
    return Capabilities(
        engine,
        update=_read(lambda: cast(SegmentEngine, engine).update),
        feed=_read(lambda: cast(PieceEngine, engine).feed),
        wants=_read(lambda: cast(PieceEngine, engine).wants),
        keeps_pieces=_read(lambda: cast(PieceEngine, engine).keeps_pieces),
        pause=_read(lambda: cast(PieceEngine, engine).pause),
        moved_at_s=_read(lambda: cast(ThreadedEngine, engine).moved_at_s),
        check=_read(lambda: cast(CheckedEngine, engine).check),
        metrics=_read(lambda: cast(MeasuredEngine, engine).metrics),
    )


def misspelled_members(engine: object) -> list[str]:
    """One sentence for each public member of an engine that looks like an optional one which the engine lacks.

    Methods are compared with methods, attributes with attributes. Properties are not evaluated.
    """
    members = {name: inspect.getattr_static(engine, name, None) for name in dir(engine) if not name.startswith("_")}
    sentences: list[str] = []
    for name, member in members.items():
        is_method = inspect.isroutine(member)
        known = OPTIONAL_METHODS if is_method else OPTIONAL_ATTRIBUTES
        near = difflib.get_close_matches(name, [each for each in known if each not in members], n=1, cutoff=_NEAR)
        if near and name not in (*OPTIONAL_METHODS, *OPTIONAL_ATTRIBUTES):
            what, used = ("method", "called") if is_method else ("attribute", "read")
            sentences.append(f"{what} {name!r} is near {near[0]!r} and is never {used}")
    return sentences


def warn_of_misspelled(engine: object) -> None:
    """Log one warning for each member that ``misspelled_members`` finds."""
    for sentence in misspelled_members(engine):
        logger.warning("engine.misspelled engine=%s %s", type(engine).__name__, sentence)


def _read(read: Callable[[], _Member]) -> _Member | None:
    try:
        return read()
    except AttributeError:
        return None

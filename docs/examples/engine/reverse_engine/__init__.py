"""``engine: reverse``: answers with the words of the prompt, the last one first, one word per step."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, checked_args
from stage_runtime.engines.prompts import prompt_text


class ReverseArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The stage's ``engine_args``; an unknown or wrong one is refused with a message that names the right ones."""

    capacity: int = 4
    separator: str = " "


class ReverseEngine:
    """See stage_runtime.engines.base.Engine for what each member has to do."""

    modality = "text"
    takes_companions = False
    #: This engine can't continue an answer that another replica has begun.
    not_resumable: Mapping[str, str] | None = None

    def __init__(self, stage: StageConfig) -> None:
        self._args = checked_args(stage, ReverseArgs)
        self.capacity = self._args.capacity
        #: The words still to be put out, the next one last, by request key; oldest request first.
        self._words: dict[str, list[str]] = {}
        #: The last outputs of aborted requests, which the next step returns.
        self._aborted: list[EngineOutput] = []

    def load(self, report: Report) -> None:
        """A real engine loads its model here."""
        report("nothing to load", 1.0)

    def add(self, request: StageRequest) -> None:
        """Accept a request; only what is raised here is the client's fault."""
        if request.key in self._words:
            raise InvalidRequestError("the request is running already")
        self._words[request.key] = prompt_text(request.inputs).split()

    def abort(self, key: str) -> None:
        """Stop a request."""
        if self._words.pop(key, None) is not None:
            self._aborted.append(EngineOutput(key, finish_reason="abort"))

    def step(self) -> list[EngineOutput]:
        """Say one word of each request that runs; the others wait for a free slot."""
        outputs, self._aborted = self._aborted, []
        for key in list(self._words)[: self.capacity]:
            words = self._words[key]
            word = words.pop()
            if words:
                outputs.append(EngineOutput(key, text=word + self._args.separator))
            else:
                del self._words[key]
                outputs.append(EngineOutput(key, text=word, finish_reason="stop"))
        return outputs

    def has_unfinished(self) -> bool:
        """Whether step has something to do or to return."""
        return bool(self._words or self._aborted)

    def close(self) -> None:
        """Give everything back."""
        self._words.clear()

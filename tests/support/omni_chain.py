"""All stages of a tiny model of vLLM-Omni in one process, fed by hand."""

from __future__ import annotations

import io
import time
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from omni_discovery.deploy.document import StageConfig
from stage_runtime.connectors.serialization import deserialize, serialize
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine

WAIT_S: Final = 60.0


def finish(engine: Engine, *keys: str) -> dict[str, list[EngineOutput]]:
    """Step until these requests are over; their outputs."""
    said: dict[str, list[EngineOutput]] = {key: [] for key in keys}
    until_s = time.monotonic() + WAIT_S
    while not all(outputs and outputs[-1].finished for outputs in said.values()):
        assert time.monotonic() < until_s, f"no end: {said}"
        assert engine.has_unfinished(), f"nothing to do, and no end: {said}"
        for output in engine.step():
            said[output.key].append(output)
    return said


def idle(engine: Engine) -> None:
    """Step until there is nothing to do."""
    until_s = time.monotonic() + WAIT_S
    while engine.has_unfinished():
        assert time.monotonic() < until_s
        engine.step()


def sound(outputs: Sequence[EngineOutput]) -> np.ndarray[Any, Any]:
    """The samples of all WAV files, one behind the other."""
    assert outputs[-1].error is None, outputs[-1].error
    parts = []
    for output in outputs:
        if output.audio_wav is not None:
            with wave.open(io.BytesIO(output.audio_wav)) as file:
                assert (file.getframerate(), file.getnchannels()) == (24000, 1)
                parts.append(np.frombuffer(file.readframes(file.getnframes()), "<i2"))
    return np.concatenate(parts)


def through_a_connector(handoff: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """As the next stage gets it."""
    assert handoff is not None
    got: Mapping[str, Any] = deserialize(bytearray(serialize(handoff)))
    return got


@dataclass
class Answer:
    """What one request became: its text, the hand-off of each stage but the last, and the samples."""

    texts: list[str] = field(default_factory=list)
    handed: list[Mapping[str, Any]] = field(default_factory=list)
    samples: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, "<i2"))

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Chain:
    """The stages of a pipeline, each after the other."""

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self.engines = [create_engine(stage) for stage in stages]
        for engine in self.engines:
            engine.load(lambda *_: None)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def ask(
        self,
        requests: Mapping[str, Mapping[str, Any]],
        params: Sequence[Mapping[str, Any]],
        *,
        stages: int | None = None,
    ) -> dict[str, Answer]:
        """Answer requests together, given by key with their inputs; ``params`` by stage are those of all of them.

        ``stages`` is the number of stages that do their part.
        """
        answers = {key: Answer() for key in requests}
        for number, engine in enumerate(self.engines[:stages]):
            is_last = number == len(self.engines) - 1
            for key, inputs in requests.items():
                before = answers[key].handed
                engine.add(
                    StageRequest(
                        key,
                        key,
                        inputs={} if number else inputs,
                        params=params[number],
                        payloads={number - 1: before[-1]} if number else {},
                        next_stages=() if is_last else (number + 1,),
                    )
                )
            for key, outputs in finish(engine, *requests).items():
                assert outputs[-1].error is None, outputs[-1].error
                answers[key].texts += [output.text for output in outputs if output.text]
                if is_last:
                    answers[key].samples = sound(outputs)
                else:
                    answers[key].handed.append(through_a_connector(outputs[-1].handoff))
        return answers

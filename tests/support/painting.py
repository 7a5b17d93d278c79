"""The demo's painter behind a first stage that needs no model: it draws the digits of the prompt."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import msgspec

from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.painter.engine import DiffusionEngine
from tests.support.engines import DEMO

_PAINTER: Final = json.loads((DEMO / "painter" / "config.json").read_text())
PAINTING = f"""
model: painting
stages:
  - {{stage_id: 0, engine: torch, engine_args: {{target: "tests.support.painting:think", capacity: 8}}}}
  - {{stage_id: 1, engine: diffusion, model: {DEMO / "painter"}, engine_args: {{capacity: 4}}, final_output: image}}
"""


class Asked(msgspec.Struct):
    """A prompt as the content of a message, with or without pictures."""

    messages: list[dict[str, Any]]


def think(asked: Asked) -> dict[str, Any]:
    """Hand the prompt's digits over, as the demo's thinker would; pictures are looked at by nobody."""
    content = asked.messages[-1]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    digits = [_PAINTER["digit_token_ids"][int(each)] for each in text if each.isdecimal()]
    return {"token_ids": [_PAINTER["paint_token_id"], *digits]}


class StuckPainter(DiffusionEngine):
    """Hangs behind its first unfinished picture."""

    _is_stuck = False

    def step(self) -> list[EngineOutput]:
        """See Engine."""
        if self._is_stuck:
            time.sleep(600.0)
        outputs = super().step()
        self._is_stuck = any(output.partial_image is not None for output in outputs)
        return outputs

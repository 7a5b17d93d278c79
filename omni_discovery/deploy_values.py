"""What to tell people of a value in a deploy document that can't be one: where it is, and what would be right. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

#: What bounds an edge.
BOUND: Final = "a whole number from 1, or -1 for no bound"

_YES_OR_NO: Final = "true or false"
_WORDS: Final = "a word"
#: What would be right, by the name of the key.
_RIGHT: Final = {
    "final_output": "text, image, audio, embedding or none",
    "window_size": BOUND,
    "max_inflight": BOUND,
    "async_chunk": _YES_OR_NO,
    "connector": "the name of one in 'connectors', or a connector's own, as TcpConnector",
    "stage_id": "a whole number from 0",
    "from": "the id of a stage",
    "to": "the id of a stage",
    "input_from": "a list of stage ids, as [0]",
    "num_replicas": "a whole number from 1 to 1024",
    "devices": "a text like '0,1', empty for the CPU",
    "strategy": "PACK, SPREAD, STRICT_PACK or STRICT_SPREAD",
    "engine": "the name of an engine, as vllm or diffusion",
    "model": "a folder or a name, as text",
    "name": _WORDS,
    **dict.fromkeys(("num_cpus", "num_gpus"), "a number from 0"),
    **dict.fromkeys(
        ("engine_args", "default_sampling_params", "runtime", "ray", "extra", "connectors"),
        "a mapping of keys to values",
    ),
    **dict.fromkeys(("stages", "edges"), "a list"),
}
_PLACE: Final = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_LONGEST_VALUE: Final = 60


def wrong_value(told: str, document: Any) -> str:
    """What a decoder ``told`` of a document, in the document's own words; as it is where nothing better is known."""
    found = _PLACE.search(told)
    if found is None:
        return told
    steps: list[str | int] = [
        name if name else int(index) if index.isdigit() else index for name, index in _STEP.findall(found[1])
    ]
    try:
        place, value = _look_up(document, steps)
    except (KeyError, IndexError, TypeError):
        return told
    key = steps[-2] if steps[-2:-1] == ["input_from"] else steps[-1]
    if key not in _RIGHT or told.startswith("Object missing"):
        return f"{place}: {told[: found.start()]}"
    return f"{place} is {short_value(value)}; right would be {_RIGHT[str(key)]}"


def _look_up(document: Any, steps: list[str | int]) -> tuple[str, Any]:
    """A place in the words of people, and what stands there."""
    place, value = "", document
    for at, step in enumerate(steps):
        if step == "...":
            # Which of a mapping's values it is, the decoder does not say.
            break
        value = value[step]
        if isinstance(step, str):
            place += f".{step}" if at else step
        elif at == 1 and steps[0] == "stages" and isinstance(value, dict) and "stage_id" in value:
            place = f"stage {value['stage_id']}"
        elif at == 1 and steps[0] == "edges" and isinstance(value, dict) and {"from", "to"} <= value.keys():
            place = f"the edge {value['from']} to {value['to']}"
        else:
            place += f"[{step}]"
    return place, value


def short_value(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."

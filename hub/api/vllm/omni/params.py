"""Sampling parameters of vLLM-Omni's server as parameters of our stages.

The server starts from each stage's defaults and changes what its client asks for. Only the changes are sent: the
replicas have the defaults. A change that no stage takes is refused by its name. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from hub.api.errors import NotServedError

#: How the hub puts outputs together, or of vLLM's own use.
_OURS: Final = frozenset(
    {"output_kind", "detokenize", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
)
#: Repeats the seed: every stage draws all of its chance from one.
_SECOND_SEED: Final = "tts_local_seed"
#: What the server notes of every chat that is answered with text alone, for models which else write of a picture.
_TASK, _UNDERSTANDS = "ar_task_mode", "comprehension"
#: The size of a picture, which the stages that draw get as their own parameters.
_SIZES: Final = frozenset({"target_h", "target_w"})
#: Parameters of tokens by which an answer would no longer be one text.
_ONE_ANSWER: Final = ("n", "logprobs", "prompt_logprobs")
#: Names of a diffusion stage's parameters that ours have too.
_OF_PICTURES: Final = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "seed")
#: Said of another parameter, or of where the numbers are drawn, which a replica decides.
_IMPLIED: Final = frozenset(
    {"guidance_scale_provided", "guidance_scale_2_provided", "height_not_provided"}
) | frozenset({"width_not_provided", "generator_device", "lora_scale"})


def changed_params(asked: Any, usual: Any) -> dict[str, Any]:
    """What a stage's parameters say otherwise than its defaults, by our names. Raise NotServedError."""
    changes = {name: value for name, value, default in _pairs(asked, usual) if not _same(value, default)}
    return _of_pictures(changes) if is_dataclass(asked) else _of_tokens(changes, asked)


def _pairs(asked: Any, usual: Any) -> Iterator[tuple[str, Any, Any]]:
    names = [each.name for each in fields(asked)] if is_dataclass(asked) else asked.__struct_fields__
    for name in names:
        if not name.startswith("_"):
            yield name, getattr(asked, name), getattr(usual, name)


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    # An empty list or mapping says as little as none. Types first: an array has no truth value.
    if isinstance(value, dict | list) and not value:
        return not isinstance(default, dict | list) or not default
    return type(value) is type(default) and bool(value == default)


def _of_tokens(changes: Mapping[str, Any], asked: Any) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in changes.items():
        if name in _OURS:
            continue
        if name in _ONE_ANSWER:
            raise NotServedError(f"{name} can't be asked here; --api vllm serves it for a text stage")
        if name == "extra_args":
            _check_extra(value or {}, asked.seed)
        elif value is None:
            raise NotServedError(f"{name}: the stage's default can't be taken away; give a value")
        elif not isinstance(value, str | int | float | list | dict):
            raise NotServedError(f"{name} can't be asked of these stages; --api vllm serves it for a text stage")
        else:
            params[name] = value
    return params


def _check_extra(extra: Mapping[str, Any], seed: int | None) -> None:
    """Raise NotServedError for an extra argument of a model that no stage takes."""
    noted = {_SECOND_SEED: seed, _TASK: _UNDERSTANDS}
    for name, value in extra.items():
        if name not in _SIZES and (name not in noted or noted[name] != value):
            raise NotServedError(f"{name} can't be asked of a stage; leave it out")


def _of_pictures(changes: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in changes.items():
        if name in _IMPLIED:
            continue
        if name == "num_outputs_per_prompt":
            raise NotServedError("n: one request makes one picture here; send several requests")
        if name not in _OF_PICTURES or value is None:
            raise NotServedError(f"{name} can't be asked of a stage; leave it out")
        params[name] = value
    return params

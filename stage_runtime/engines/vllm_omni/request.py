"""Makes requests of vLLM's engine core: of a client's input in the first stage, of hand-offs in every later one.

Every request gets a seed, the client's or one made of its id, for all that is drawn at random: a second replica then
makes the same tokens and the same sound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.seeds import seed_of
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.media.items import BESIDE, has_items
from stage_runtime.engines.prompts import read_prompt
from stage_runtime.engines.sampling import checked, token_sampling
from stage_runtime.engines.vllm.core_request import build_engine_core_request_from_tokens
from stage_runtime.engines.vllm.sampling_params import check_chosen_tokens, sampling_params
from stage_runtime.engines.vllm_omni.handoff import Source
from stage_runtime.engines.vllm_omni.load import LoadedStage
from stage_runtime.engines.vllm_omni.speech import PARAMETERS, most_tokens, only_one, prompt_of, read_speech, task_of
from stage_runtime.engines.vllm_omni.talker import THINKERS, Talker, talker_of

#: The sampling parameters that a request may set: the others were not tried, or need vLLM's own front end.
_SETTABLE: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
)
#: What may come as the input of a request; ``omni_discovery`` knows others, for other engines.
_INPUTS: Final = frozenset(
    ("prompt", "messages", "prompt_token_ids", "additional_information", "mm_processor_kwargs", *BESIDE)
)
_PROCESSING: Final = "mm_processor_kwargs"
#: Pictures, sound and videos as vLLM has them in ``multi_modal_data``.
Items = Mapping[str, Any] | None
#: The stage of vLLM-Omni's pipelines whose prompt is a speech.
_SPEAKER: Final = "qwen3_tts"
_DETOKENIZE: Final = "detokenize"
#: What begins a turn of a chat in the text of Qwen's models.
_TURN: Final = "<|im_start|>"


class Processing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may say of the processing of its items, as vLLM names it."""

    #: Whether the sound of its videos is heard too.
    use_audio_in_video: bool = False


def read_params(request: StageRequest, loaded: LoadedStage) -> Any:
    """The SamplingParams of a request. Raise InvalidRequestError for one that is wrong, or can't be set here."""
    named = {name: value for name, value in request.params.items() if name not in PARAMETERS}
    if not loaded.is_first and len(named) < len(request.params):
        told = next(name for name in PARAMETERS if name in request.params)
        raise InvalidRequestError(f"{told}: the pipeline's first stage takes it; give it among that one's parameters")
    if isinstance(named.get(_DETOKENIZE), bool):
        # As vLLM-Omni's own clients write it for talkers; a stage here shows text if the document says so.
        del named[_DETOKENIZE]
    asked = {name: value for name, value in token_sampling(named).items() if value is not None}
    if loaded.metadata.model_stage == _SPEAKER and (most := most_tokens(request.inputs)) is not None:
        asked["max_tokens"] = min(most, asked.get("max_tokens", most))
    if strange := sorted(asked.keys() - _SETTABLE):
        raise InvalidRequestError(f"{strange[0]}: engine 'vllm-omni' does not take it; it takes {_listed(_SETTABLE)}")
    seed = asked.pop("seed", seed_of(request.request_id))
    if "stop_token_ids" in asked:
        # The pipeline's own end a talker; without them it would speak on.
        asked["stop_token_ids"] = sorted({*(loaded.defaults.get("stop_token_ids") or ()), *asked["stop_token_ids"]})
    params = sampling_params({**loaded.defaults, **asked})
    check_chosen_tokens(sampling_params(asked), int(loaded.vllm_config.model_config.get_vocab_size()))
    _fix_seed(params, seed)
    return params


def _listed(names: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _fix_seed(params: Any, seed: int) -> None:
    from vllm_omni.worker.sampling_utils import apply_fixed_seed_to_sampling_params

    # The second seed is for what a talker's predictor draws: without it that would come from the process's own state.
    apply_fixed_seed_to_sampling_params(params, seed, seed_talker_mtp=True)


def check_inputs(request: StageRequest, loaded: LoadedStage) -> None:
    """Raise InvalidRequestError for inputs of a request in the first stage that it does not take."""
    if strange := sorted(name for name in request.inputs.keys() - _INPUTS if request.inputs[name] is not None):
        raise InvalidRequestError(f"{strange[0]}: engine 'vllm-omni' does not take it; it takes {_listed(_INPUTS)}")
    if not loaded.item_kinds and (has_items(request.inputs) or request.inputs.get(_PROCESSING) is not None):
        raise InvalidRequestError("this stage's model takes neither pictures nor sound nor videos")


def read_processing(inputs: Mapping[str, Any]) -> Processing:
    """What a client says of how its items are processed. Raise InvalidRequestError."""
    try:
        return checked(inputs.get(_PROCESSING) or {}, Processing)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{_PROCESSING}: {error}") from error


def first_prompt(request: StageRequest, loaded: LoadedStage, tokenizer: Any, items: Items) -> dict[str, Any]:
    """The prompt of a request in the first stage, without its ``items``. Raise InvalidRequestError."""
    if loaded.metadata.model_stage == _SPEAKER:
        talker = loaded.hf_config.talker_config
        speech = read_speech(request.inputs, request.params, talker, task_of(loaded.hf_config))
        prompt = prompt_of(speech, tokenizer.encode, talker)
    else:
        prompt = _thinkers_prompt(request, loaded, tokenizer, items)
    check_length(len(prompt["prompt_token_ids"]), loaded)
    return prompt


def _thinkers_prompt(request: StageRequest, loaded: LoadedStage, tokenizer: Any, items: Items) -> dict[str, Any]:
    talker = talker_of(loaded.kind, loaded.hf_config)
    inputs = as_chat(request.inputs, items) if loaded.kind in THINKERS else request.inputs
    token_ids = read_prompt(tokenizer, inputs, items=items or (), template=loaded.chat_template)
    told = read_voice(request, talker)
    if talker is not None and request.next_stages:
        talker.check_prompt(token_ids)
    return {"prompt_token_ids": token_ids, **({"additional_information": told} if told else {})}


def as_chat(inputs: Mapping[str, Any], items: Items = None) -> Mapping[str, Any]:
    """The inputs, a ``prompt`` that begins no turn of a chat as the user's message, behind the items beside it."""
    prompt = inputs.get("prompt")
    if not isinstance(prompt, str) or not prompt or _TURN in prompt or inputs.get("messages") is not None:
        return inputs
    beside = [{"type": kind} for kind, found in (items or {}).items() for _ in found]
    content = [*beside, {"type": "text", "text": prompt}] if beside else prompt
    return {**inputs, "prompt": None, "messages": [{"role": "user", "content": content}]}


def read_voice(request: StageRequest, talker: Talker | None) -> dict[str, Any]:
    """What the talker is told besides the hidden states, as vLLM-Omni writes it. Raise InvalidRequestError."""
    told = request.inputs.get("additional_information") or {}
    if not isinstance(told, Mapping):
        raise InvalidRequestError("additional_information is a mapping")
    given = {name: request.params[name] for name in PARAMETERS if request.params.get(name) is not None}
    given |= {str(name): only_one(name, value) for name, value in told.items()}
    known = {} if talker is None else {"speaker"}
    if unfit := sorted(given.keys() - known):
        raise InvalidRequestError(f"{unfit[0]}: this model does not take it")
    return {"speaker": [talker.voice(given["speaker"])]} if talker is not None and given else {}


def check_length(tokens: int, loaded: LoadedStage) -> None:
    """Raise InvalidRequestError for an empty prompt, and for one that leaves no room for an answer."""
    longest = int(loaded.vllm_config.model_config.max_model_len)
    if not 0 < tokens < longest:
        raise InvalidRequestError(
            f"the prompt has {tokens} tokens; this stage takes up to {longest - 1}. Make it shorter"
        )


def first_request(name: str, prompt: Mapping[str, Any], params: Any, loaded: LoadedStage, *, hands_over: bool) -> Any:
    """The core's request of the first stage, from a prompt with its items. Raise InvalidRequestError."""
    from vllm.exceptions import VLLMValidationError
    from vllm_omni.engine.async_engine_utils import apply_omni_final_stage_metadata, upgrade_to_omni_request

    try:
        made = loaded.inputs.process_inputs(
            request_id=name,
            prompt=dict(prompt),
            params=params,
            supported_tasks=("generate",),
            arrival_time=time.time(),
        )
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise InvalidRequestError(str(error)) from error
    # A stage that is the request's last one makes nothing for the next.
    final = loaded.last_stage if hands_over else loaded.metadata.stage_id
    told = {name: value for name, value in prompt.items() if name not in ("multi_modal_data", _PROCESSING)}
    return apply_omni_final_stage_metadata(upgrade_to_omni_request(made, told), final)


def later_request(name: str, source: Source, params: Any, loaded: LoadedStage, *, in_pieces: bool) -> Any:
    """The core's request of a later stage; its payload comes by the connector. Whatever vLLM-Omni raises goes on."""
    from vllm_omni.engine import OmniEngineCoreRequest
    from vllm_omni.engine.async_engine_utils import upgrade_to_omni_request

    prompt = _placeholders(source, loaded) if in_pieces else _from_whole(name, source, loaded)
    places = len(prompt["prompt_token_ids"])
    own = params.clone()
    # Of a prompt that is too long, there is none; whoever asks says so.
    room = max(1, int(loaded.vllm_config.model_config.max_model_len) - places)
    own.max_tokens = room if own.max_tokens is None else own.max_tokens
    # A request that may not end before its context does would stand still there.
    own.min_tokens = min(own.min_tokens, room)
    # Without the model's config: these are places, or codes, and none of them is a token of its vocabulary.
    made = build_engine_core_request_from_tokens(name, {"prompt_token_ids": prompt["prompt_token_ids"]}, own)
    upgraded = upgrade_to_omni_request(made, prompt)
    return upgraded if upgraded is not made else OmniEngineCoreRequest.from_request(made)


def _from_whole(name: str, source: Source, loaded: LoadedStage) -> dict[str, Any]:
    convert = loaded.metadata.custom_process_input_func
    made = []
    if convert is not None:
        needs_items = loaded.metadata.requires_multimodal_data
        made = convert([source.as_output(name)], source.prompt(), needs_items)
    prompt = dict(made[0]) if made else {}
    # One place is enough where the pipeline says nothing of it: the payload resizes the prompt.
    return {**prompt, "prompt_token_ids": list(prompt.get("prompt_token_ids") or [0])}


def _placeholders(source: Source, loaded: LoadedStage) -> dict[str, Any]:
    from vllm_omni.distributed.omni_connectors.adapter import compute_talker_prompt_ids_length

    wanted = getattr(loaded.hf_config, "async_chunk_prewarm_prompt_len", None)
    if wanted is None or int(wanted) <= 1:
        try:
            wanted = compute_talker_prompt_ids_length(source.prompt_token_ids)
        except (IndexError, ValueError):
            # It reads the roles of a chat, and this prompt is none.
            wanted = len(source.prompt_token_ids)
    return {**source.prompt(), "prompt_token_ids": [0] * max(1, int(wanted))}


def source_of(prompt: Mapping[str, Any], token_ids: Sequence[int] = (), text: str = "") -> dict[str, Any]:
    """The ``source`` of a hand-off, as plain values."""
    source = Source(
        prompt_token_ids=list(prompt["prompt_token_ids"]),
        token_ids=list(token_ids),
        text=text,
        additional_information=prompt.get("additional_information"),
    )
    built: dict[str, Any] = msgspec.to_builtins(source)
    return built

"""Loads vLLM: checks a stage's ``engine_args``, builds the LLMEngine, and reads the model's limits from it.

vLLM's process group, even of a single rank, uses a rendezvous file in the temporary folder and leaves it there;
``rendezvous_removed`` removes it.
"""

from __future__ import annotations

import contextlib
import difflib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.base import check_model_folder, checked_args
from stage_runtime.engines.errors import lacks_memory
from stage_runtime.engines.files import check_model_files
from stage_runtime.engines.process_group import seal_single_rank_groups
from stage_runtime.engines.tokens import BoundedTokenizer

#: How many requests vLLM runs at once by default, without ``max_num_seqs``.
_USUAL_CAPACITY: Final = 256
#: What makes answers of a form unless the document says otherwise. Each of its tokens takes milliseconds, where a form
#: of a hundred bytes holds the engine of vLLM's own choice for minutes.
_FORMS_BY: Final = "guidance"


def take_allow_rpc(stage: StageConfig, given: dict[str, Any]) -> tuple[str, ...]:
    """Remove ``allow_rpc``, which vLLM does not know, from a stage's arguments, and return it. Raise ConfigError."""
    return checked_args(stage, tuple[str, ...], given.pop("allow_rpc", ()), "engine_args.allow_rpc")


def take_share_prefix_cache(stage: StageConfig, given: dict[str, Any]) -> bool:
    """The same for ``share_prefix_cache``: whether prompts of several API keys share the prefix cache."""
    return checked_args(stage, bool, given.pop("share_prefix_cache", False), "engine_args.share_prefix_cache")


def take_allow_grammars(stage: StageConfig, given: dict[str, Any]) -> bool:
    """The same for ``allow_grammars``: whether clients may write grammars, of which no bound of ours is one of time.

    They may, too, where the operator has chosen what makes answers of a form, which is for trusted clients.
    """
    allowed = checked_args(stage, bool, given.pop("allow_grammars", False), "engine_args.allow_grammars")
    return allowed or _chosen_backend(given) not in {"", _FORMS_BY}


def usual_capacity(given: Mapping[str, Any]) -> int:
    """How many requests vLLM will run at once, as far as the arguments tell; known exactly once it has loaded."""
    return int(given.get("max_num_seqs", _USUAL_CAPACITY))


def check_model(stage: StageConfig) -> None:
    """Raise ConfigError if the stage's model is a local folder that lacks files or has damaged ones."""
    if check_model_folder(stage):
        check_model_files(stage, Path(stage.model).expanduser())


def engine_args_of(stage: StageConfig, given: Mapping[str, Any], kind: Any) -> Any:
    """The EngineArgs, of class ``kind``, for a stage. Raise ConfigError that names an argument unknown to this vLLM."""
    known = set(kind.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"stage {stage.stage_id}: vLLM has no engine_args.{name}{hint}")
    # vLLM's spans are made of its stats: tracing without them would end it with the first request.
    quiet = {"disable_log_stats": not given.get("otlp_traces_endpoint"), "use_tqdm_on_load": False}
    ours = {"model": stage.model, **{name: value for name, value in quiet.items() if name in known}}
    forms = given.get("structured_outputs_config")
    # A stage that takes embeddings has one more token than its model, and llguidance would refuse to be loaded.
    is_ours = "structured_outputs_config" in known and not given.get("enable_prompt_embeds")
    if is_ours and isinstance(forms, Mapping | None):
        given = {**given, "structured_outputs_config": {"backend": _FORMS_BY, **(forms or {})}}
    try:
        return kind(**{**ours, **given})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stage {stage.stage_id}: engine_args: {essence(error)}") from error


def may_have_forms(given: Mapping[str, Any]) -> bool:
    """Whether clients may ask for answers of a form: by llguidance, or by what the operator has chosen instead.

    A stage that takes embeddings can't have llguidance, and vLLM's own choice, xgrammar, has no bound in a step.
    """
    return not given.get("enable_prompt_embeds") or bool(_chosen_backend(given))


def _chosen_backend(given: Mapping[str, Any]) -> str:
    """What the document has chosen to make answers of a form; empty if it leaves that to others."""
    forms = given.get("structured_outputs_config")
    backend = forms.get("backend") if isinstance(forms, Mapping) else getattr(forms, "backend", None)
    return "" if backend in {None, "auto"} else str(backend)


def load_llm(stage: StageConfig, given: Mapping[str, Any]) -> Any:
    """A loaded LLMEngine, all of it in this process. Raise ConfigError where the operator must act.

    Other errors, lack of memory among them, are raised as vLLM raises them.
    """
    from vllm import EngineArgs, LLMEngine

    arguments = engine_args_of(stage, given, EngineArgs)
    seal_single_rank_groups()
    try:
        llm = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    except (ValueError, OSError) as error:
        if lacks_memory(error):
            # Worth another attempt: another process that holds the memory may be about to end.
            raise
        if isinstance(error, ValueError):
            raise ConfigError(f"stage {stage.stage_id}: vLLM refuses model or engine_args: {essence(error)}") from error
        if check_model_folder(stage):
            raise ConfigError(f"stage {stage.stage_id}: {stage.model}: {essence(error)}") from error
        raise
    if llm.vllm_config.model_config.runner_type == "pooling" and given.get("runner") != "pooling":
        raise ConfigError(f"stage {stage.stage_id}: this model pools, as vLLM has it: set final_output: embedding")
    return llm


@dataclass(frozen=True, slots=True)
class Model:
    """The model's limits that requests are checked against; read from vLLM once it has loaded."""

    tokenizer: Any
    max_model_len: int
    vocab_size: int
    #: Tokens that end an answer unless the request ignores them.
    eos_token_ids: frozenset[int]
    has_logits_processors: bool = False
    #: Size of a token's prompt embeds, and their dtype; 0: the model takes none.
    embeds_size: int = 0
    dtype: Any = None
    #: Tokens in a block of the prefix cache; 0: there is no prefix cache.
    block_size: int = 0
    #: Whether the model takes pictures, sound or other items beside its prompt; vLLM checks which kinds.
    takes_items: bool = False
    #: The least number of tokens of an answer: 0 if the stage pools.
    least_answer: int = 1
    #: Whether answers may be asked to have a form, see ``may_have_forms``.
    makes_forms: bool = True
    #: Whether prompts of several API keys share the prefix cache.
    shares_cache: bool = False
    #: Encodes what clients and earlier stages send.
    bounded: BoundedTokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounded", BoundedTokenizer(self.tokenizer, self.max_model_len))


def describe_model(llm: Any, tokenizer: Any, given: Mapping[str, Any], *, shares_cache: bool = False) -> Model:
    """The model of a loaded LLMEngine; ``given`` are the stage's engine_args, without those of this project."""
    config, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    # As vLLM itself finds the tokens that end an answer.
    more = config.try_get_generation_config().get("eos_token_id")
    eos = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return Model(
        tokenizer=tokenizer,
        max_model_len=int(config.max_model_len),
        vocab_size=int(config.get_vocab_size()),
        eos_token_ids=frozenset(int(each) for each in eos if each is not None),
        has_logits_processors=bool(given.get("logits_processors")),
        embeds_size=int(config.get_inputs_embeds_size()) if config.enable_prompt_embeds else 0,
        dtype=config.dtype,
        block_size=int(cache.block_size) if cache.enable_prefix_caching else 0,
        takes_items=bool(config.is_multimodal_model),
        makes_forms=may_have_forms(given),
        shares_cache=shares_cache,
    )


def details_of(llm: Any) -> dict[str, str]:
    """The details of a loaded LLMEngine, see DescribedEngine."""
    config = llm.vllm_config.model_config
    dtype, commit = str(config.dtype).removeprefix("torch."), getattr(config.hf_config, "_commit_hash", None)
    return {"dtype": dtype, "revision": str(config.revision or commit or "")}


def id_of_token(tokenizer: Any, token: str, where: str) -> int | None:
    """The id of a token that the operator named, None for the empty one. Raise ConfigError if it is not one token."""
    if not token:
        return None
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ConfigError(f"{where}: {token!r} is not one token of the model")
    return int(token_id)


_PREFIX: Final = "vllm_dist_"


@contextmanager
def rendezvous_removed() -> Iterator[None]:
    """Remove this process's rendezvous file when the block is over. A killed process leaves its file."""
    file = _rendezvous_file()
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()


def _rendezvous_file() -> Path | None:
    """The rendezvous file of this process's default group; None if it is not one of vLLM's."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    file = Path(getattr(store, "path", ""))
    is_vllms = file.name.startswith(_PREFIX) and file.parent == Path(tempfile.gettempdir())
    return file if is_vllms else None

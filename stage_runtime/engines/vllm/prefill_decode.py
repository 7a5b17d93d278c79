"""Prefill and decode of one model in two stages, over vLLM's own KV connectors.

The prefill stage reads the prompt and shows nothing to the client. It hands over the prompt's token ids and the
parameters by which vLLM's connector finds the KV cache of this request on this replica. The decode stage generates
every token of the answer, the first one, too: so sampling, seeds, penalties and grammars mean what they mean in one
stage, and no token is shown twice or left out.

KV that was fetched once is gone from its prefill replica, and it covers the prompt alone. So only the first attempt of
the decode stage fetches it; an attempt that repeats or resumes computes the prompt itself: the same tokens, only later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.engine_args import DECODE, PREFILL
from omni_discovery.errors import ConfigError
from omni_discovery.log_once import LogOnce
from stage_runtime.config import PayloadError
from stage_runtime.engines.base import StageRequest

logger = logging.getLogger(__name__)

#: Between two checks of whether the KV was fetched.
_PAUSE_S: Final = 0.002
#: vLLM's name for the side of the transfer that a stage is on.
_KV_ROLES: Final = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
#: vLLM would fail a request whose KV does not come; the stage can as well read the prompt itself.
_DEFAULTS: Final = {PREFILL: {}, DECODE: {"kv_load_failure_policy": "recompute"}}

_NIXL: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
#: The parameters by which each connector finds the KV; without them it would silently fetch nothing.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": (*_NIXL, "tp_size"),
    "MooncakeConnector": ("remote_engine_id", "remote_bootstrap_addr", "transfer_id"),
}
_TEXTS: Final = frozenset(
    ("remote_engine_id", "remote_request_id", "remote_host", "remote_bootstrap_addr", "transfer_id", "transfer_mode")
)
_LONGEST_TEXT: Final = 1024
#: The least and the most of whole numbers.
_NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "remote_port": (1, 65_535),
    "tp_size": (1, 4096),
    "dcp_size": (1, 4096),
    "pp_size": (1, 4096),
    "remote_block_size": (1, 1 << 20),
    "remote_num_tokens": (0, 1 << 31),
}
_MOST_BLOCK: Final = 1 << 31
#: The sides of a transfer. A decode stage fetches, and hands nothing back.
_SIDES: Final = {"do_remote_prefill": True, "do_remote_decode": False}
_BLOCKS: Final = "remote_block_ids"
_EXPIRY: Final = "remote_blocks_expiry_time"
#: Kinds of vLLM's caches that keep a whole prompt, and the end of one.
_WHOLE: Final = frozenset(("FullAttentionSpec", "MLAAttentionSpec"))
_WINDOWS: Final = frozenset(("SlidingWindowSpec", "SlidingWindowMLASpec"))


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of a decode replica's KV cache: tokens in a block, and the most blocks that are transferred; 0: all.

    Of a window, those of its tokens. ``block`` 0: only vLLM can tell how many a prompt has.
    """

    block: int = 0
    most: int = 0

    def blocks_of(self, prompt: int) -> int:
        """How many blocks a prompt of so many tokens has here, if that is known."""
        whole = -(-prompt // self.block) if self.block else 0
        return min(whole, self.most) if self.most else whole


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a decode replica, by group; empty: not to be told."""

    groups: tuple[KvGroup, ...] = ()
    #: Whether blocks are named by group.
    is_grouped: bool = False


class PrefillDecode:
    """A stage's side of the split, from ``engine_args.pd`` and ``engine_args.kv_transfer_config``."""

    def __init__(self, stage: StageConfig, args: dict[str, Any]) -> None:
        """Take both out of ``args``. Raise ConfigError if they don't fit together."""
        self._where = f"stage {stage.stage_id}: engine_args"
        self.role: str | None = args.pop("pd", None)
        transfer = args.pop("kv_transfer_config", None)
        if not isinstance(transfer, dict | None):
            raise ConfigError(f"{self._where}.kv_transfer_config must be a mapping, as vLLM has it")
        #: vLLM's KVTransferConfig as a mapping; empty: no KV is transferred.
        self.transfer: dict[str, Any] = transfer or {}
        self.connector = str(self.transfer.get("kv_connector") or "")
        #: Parameters by which decode replicas find this one, the same for all its requests.
        self._own: dict[str, Any] = {}
        self._kv_hosts: list[str] = []
        self._cache = KvCache()
        #: Tokens that a request may have; 0: not known yet.
        self._longest = 0
        self._log_once = LogOnce()
        if self.role is None:
            return
        if self.role not in _KV_ROLES:
            raise ConfigError(f"{self._where}.pd must be {PREFILL!r} or {DECODE!r}, not {self.role!r}")
        if not self.connector:
            raise ConfigError(f"{self._where}.pd: {self.role} needs a kv_transfer_config with a kv_connector")
        kv_role = self.transfer.get("kv_role", _KV_ROLES[self.role])
        if kv_role not in (_KV_ROLES[self.role], "kv_both"):
            raise ConfigError(f"{self._where}: a {self.role} stage can't have the kv_role {kv_role!r}")
        self.transfer = {**_DEFAULTS[self.role], **self.transfer, "kv_role": kv_role}
        if self.role == PREFILL and stage.final_output != "none":
            raise ConfigError(f"stage {stage.stage_id}: a prefill stage shows nothing; leave final_output out")

    @property
    def kv_hosts(self) -> list[str]:
        """Where decode replicas fetch the KV of this one, beside its own address; known once vLLM has loaded."""
        return list(self._kv_hosts)

    @property
    def is_prefill(self) -> bool:
        """Whether the stage prefills for another stage."""
        return self.role == PREFILL

    def engine_args(self) -> dict[str, Any]:
        """The engine arguments of vLLM for it. Raise ConfigError if vLLM refuses them."""
        if not self.transfer:
            return {}
        from vllm.config import KVTransferConfig

        try:
            return {"kv_transfer_config": KVTransferConfig(**self.transfer)}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._where}.kv_transfer_config: {error}") from error

    def loaded(self, llm: Any) -> None:
        """Called once vLLM has loaded: finds out how decode replicas reach this one, or what this one fetches."""
        self._longest = int(llm.vllm_config.model_config.max_model_len)
        if self.role == DECODE:
            self._cache = _cache_of(llm)
        if not self.is_prefill:
            return
        vllm_config = llm.vllm_config
        from vllm import envs

        self._own = {"remote_engine_id": str(vllm_config.kv_transfer_config.engine_id)}
        if self.connector == "MooncakeConnector":
            from vllm.utils.network_utils import get_ip

            host = get_ip()
            self._kv_hosts = [host]
            shown = f"[{host}]" if ":" in host else host
            self._own["remote_bootstrap_addr"] = f"http://{shown}:{envs.VLLM_MOONCAKE_BOOTSTRAP_PORT}"
        elif self.connector.startswith("Nixl"):
            self._kv_hosts = [envs.VLLM_NIXL_SIDE_CHANNEL_HOST]

    def has_more(self, llm: Any) -> bool:
        """Whether vLLM has work without a request: a prefill is announced to the connector one step after its end."""
        return self.is_prefill and llm is not None and bool(llm.engine_core.engine_core.scheduler.has_requests())

    def wait_for_more(self, llm: Any) -> bool:
        """As ``has_more``, after 2 ms: the transfer needs none of this thread's time meanwhile."""
        if not self.has_more(llm):
            return False
        time.sleep(_PAUSE_S)
        return True

    def prompt_of(self, request: StageRequest) -> list[int] | None:
        """The token ids that the prefill stage read; None without one. Raise PayloadError for a damaged hand-off."""
        handed = self._handed_to(request)
        return None if handed is None else list(handed["prompt_token_ids"])

    def prepare(self, request: StageRequest, params: Any) -> None:
        """Set vLLM's parameters for the stage's side. Raise PayloadError if the hand-off can't be used."""
        if self.is_prefill:
            # The connectors keep the KV of a request that ended by its length, so nothing may end it sooner.
            params.max_tokens, params.min_tokens, params.ignore_eos = 1, 0, True
            params.stop, params.stop_token_ids, params.detokenize = [], [], False
            params.include_stop_str_in_output = False
            self._give(params, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": request.key})
            return
        handed = self._handed_to(request)
        if handed is None or request.attempt > 0 or request.resume is not None:
            return
        if not self._has_enough(handed):
            if self._log_once.should():
                text = (
                    "engine.kv_not_fetched at=%s: a prefill names too few blocks for its prompt, which is read here: %s"
                )
                logger.warning(text, self._where, "is its block_size another one?")
            return
        given = handed["kv_transfer_params"]
        # vLLM has its own defaults for numbers that are absent, and computes with those that are null.
        self._give(params, {name: each for name, each in given.items() if each is not None or name not in _NUMBERS})

    def hand_over(self, request: StageRequest, prompt_token_ids: Sequence[int], returned: Any) -> dict[str, Any]:
        """The hand-off to the decode stage; ``returned`` are the connector's parameters at the end of the prefill."""
        own = dict(returned) if isinstance(returned, Mapping) else {}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": request.key, **self._own, **own}
        return {"prompt_token_ids": list(prompt_token_ids), "kv_transfer_params": params}

    def _handed_to(self, request: StageRequest) -> Mapping[str, Any] | None:
        if self.role != DECODE or not request.payloads:
            return None
        handed = next((each for each in request.payloads.values() if "kv_transfer_params" in each), None)
        if handed is None:
            raise PayloadError("no stage before this one prefilled: the hand-off has no kv_transfer_params")
        params, prompt = handed["kv_transfer_params"], handed.get("prompt_token_ids")
        if not isinstance(params, Mapping) or not isinstance(prompt, list):
            raise PayloadError("the prefill's hand-off is damaged")
        if 0 < self._longest < len(prompt):
            raise PayloadError(f"the prefill's prompt has {len(prompt)} tokens; this stage takes up to {self._longest}")
        if not set(map(type, prompt)) <= {int}:
            raise PayloadError("the prefill's hand-off is damaged")
        _check_kv_params(params, self.connector, len(prompt), self._cache)
        return handed

    def _has_enough(self, handed: Mapping[str, Any]) -> bool:
        """Whether the blocks are as many as a prompt of these tokens has here; vLLM asserts it in the engine's step.

        A prefill whose blocks are larger has fewer, and only vLLM's handshake tells that: its KV is not fetched.
        """
        blocks, prompt = handed["kv_transfer_params"].get(_BLOCKS), len(handed["prompt_token_ids"])
        if blocks is None:
            return True
        rows = [blocks] if _is_flat(blocks) else blocks
        # As many as there are groups, see ``_check_blocks``.
        return all(len(row) >= group.blocks_of(prompt) for group, row in zip(self._cache.groups, rows, strict=False))

    @staticmethod
    def _give(params: Any, kv_transfer_params: dict[str, Any]) -> None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv_transfer_params}


def _cache_of(llm: Any) -> KvCache:
    """Which attributes have it differs between versions of vLLM."""
    scheduler = getattr(getattr(llm.engine_core, "engine_core", None), "scheduler", None)
    config = getattr(scheduler, "kv_cache_config", None)
    groups = getattr(config, "transfer_groups", None) or getattr(config, "kv_cache_groups", None) or ()
    found = tuple(_group_of(group.kv_cache_spec) for group in groups)
    contexts = getattr(llm.vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if contexts != 1 or not all(group.block for group in found):
        # Blocks of parallel contexts have more tokens; beside a state, vLLM takes blocks of other sizes.
        found = (KvGroup(),) * len(found)
    return KvCache(found, hasattr(config, "transfer_groups"))


def _group_of(spec: Any) -> KvGroup:
    kind, block = type(spec).__name__, int(getattr(spec, "block_size", 0))
    if kind in _WINDOWS:
        # A window need not begin with a block: vLLM sends one more.
        return KvGroup(block, -(-int(spec.sliding_window) // block) + 1)
    return KvGroup(block if kind in _WHOLE else 0)


def _check_kv_params(params: Mapping[str, Any], connector: str, prompt: int, own: KvCache) -> None:
    """Raise PayloadError for parameters that vLLM's connector would trip over; ``prompt`` is how many tokens it has.

    It takes them as they are, in the engine's step, which would end with every other request.
    """
    missing = [name for name in _NEEDED.get(connector, ()) if params.get(name) is None]
    if missing:
        raise PayloadError(f"the prefill's kv_transfer_params lack {', '.join(missing)}")
    for name, value in params.items():
        if not _is_good(name, value):
            raise PayloadError(f"the prefill's kv_transfer_params have {str(name)[:80]!r} as no prefill says it")
    if (blocks := params.get(_BLOCKS)) is not None:
        _check_blocks(blocks, prompt, own)


def _is_good(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or name.startswith("_"):
        # The connectors keep their own notes of a request under such names.
        return False
    if name in _SIDES:
        return value is _SIDES[name]
    if value is None or name == _BLOCKS:
        return True
    if name in _TEXTS:
        return isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT
    if name == _EXPIRY:
        return type(value) in (int, float)
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        return type(value) is int and least <= value <= most
    return isinstance(value, str | int | float)


def _is_flat(blocks: Any) -> bool:
    return isinstance(blocks, list | tuple) and all(type(each) is int for each in blocks)


def _check_blocks(blocks: Any, prompt: int, cache: KvCache) -> None:
    """They are in a list for each group of the cache; in older releases of vLLM, in one list."""
    if isinstance(blocks, list | tuple) and len(blocks) > max(prompt, len(cache.groups)):
        raise PayloadError(f"the prefill's remote_block_ids are not those of {prompt} tokens")
    rows = [blocks] if _is_flat(blocks) and not cache.is_grouped else blocks
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise PayloadError("the prefill's remote_block_ids are no lists of whole numbers")
    # A block has at least one token.
    if not any(rows) or max(map(len, rows)) > prompt:
        raise PayloadError(f"the prefill's remote_block_ids are not those of {prompt} tokens")
    if not all(type(each) is int and 0 <= each < _MOST_BLOCK for row in rows for each in row):
        raise PayloadError("the prefill's remote_block_ids are no lists of whole numbers")
    if cache.groups and len(rows) != len(cache.groups):
        raise PayloadError(
            f"the prefill's remote_block_ids are of {len(rows)} groups; this cache has {len(cache.groups)}"
        )

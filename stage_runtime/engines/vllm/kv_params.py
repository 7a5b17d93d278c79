"""What a prefill replica says of its KV cache, checked before vLLM's connector believes it. Pure.

The connectors take it as it is, in the engine's step: what does not fit would end the engine with every other request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stage_runtime.config import PayloadError

_NIXL: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
#: The parameters by which each connector finds the KV; without them it would silently fetch nothing.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
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


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a decode replica: in how many groups it is, and tokens in a block; 0: that is not known."""

    groups: int = 0
    block: int = 0


def check_kv_params(params: Mapping[str, Any], connector: str, prompt: int, own: KvCache) -> None:
    """Raise PayloadError for parameters that vLLM's connector would trip over; ``prompt`` is how many tokens it has."""
    missing = [name for name in _NEEDED.get(connector, ()) if params.get(name) is None]
    if missing:
        raise PayloadError(f"the prefill's kv_transfer_params lack {', '.join(missing)}")
    for name, value in params.items():
        if not _is_good(name, value):
            raise PayloadError(f"the prefill's kv_transfer_params have {str(name)[:80]!r} as no prefill says it")
    if (blocks := params.get(_BLOCKS)) is not None:
        # A prefill whose blocks are of another size says so.
        _check_blocks(blocks, prompt, replace(own, block=params.get("remote_block_size") or own.block))


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
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        return type(value) is int and least <= value <= most
    return isinstance(value, str | int | float)


def _check_blocks(blocks: Any, prompt: int, cache: KvCache) -> None:
    """They are in a list for each group of the cache; in older releases of vLLM, in one list."""
    is_flat = isinstance(blocks, Sequence) and all(type(each) is int for each in blocks)
    rows = [blocks] if is_flat else blocks
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise PayloadError("the prefill's remote_block_ids are no lists of whole numbers")
    # A block has at least one token.
    if not any(rows) or max(map(len, rows)) > prompt:
        raise PayloadError(f"the prefill's remote_block_ids are not those of {prompt} tokens")
    if not all(type(each) is int and 0 <= each < _MOST_BLOCK for row in rows for each in row):
        raise PayloadError("the prefill's remote_block_ids are no lists of whole numbers")
    if cache.groups and len(rows) != cache.groups:
        raise PayloadError(f"the prefill's remote_block_ids are of {len(rows)} groups; this cache has {cache.groups}")
    # Of several groups, some may keep the end of a prompt only.
    if len(rows) == 1 and cache.block and len(rows[0]) * cache.block < prompt:
        raise PayloadError(f"the prefill's remote_block_ids are not those of {prompt} tokens")

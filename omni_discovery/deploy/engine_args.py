"""What a deploy document alone tells of vLLM's arguments: devices of a replica, pairs of prefill and decode. Pure.

The arguments themselves are checked by the replica, whose vLLM knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from omni_discovery.deploy.document import StageConfig

#: The arguments of vLLM whose product is the number of devices of one replica, the size of its group.
GROUP_ARGS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
PREFILL, DECODE = "prefill", "decode"
#: The key in ``kv_connector_extra_config`` of the port on which vLLM's Mooncake connector is found.
BOOTSTRAP_PORT: Final = "mooncake_bootstrap_port"
#: What both stages of a pair must have in common in their ``kv_transfer_config``, if both say it.
_ALIKE: Final = ("kv_connector", "kv_buffer_device")


def group_size(stage: StageConfig) -> int:
    """Return the number of devices of one replica of a stage. Raise ConfigError for a wrong parallel size."""
    size = 1
    for name in GROUP_ARGS:
        value = stage.engine_args.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"stage {stage.stage_id}: engine_args.{name} is {value!r}; right would be 1 or more")
        size *= value
    copies = stage.engine_args.get("data_parallel_size", 1)
    if stage.engine in ("vllm", "vllm-omni") and copies != 1:
        raise ConfigError(
            f"stage {stage.stage_id}: engine_args.data_parallel_size is {copies!r}; a replica is one engine here: leave"
            f" it out and run {copies} replicas, by runtime: {{num_replicas: {copies}}} or --stage-id"
            f" {stage.stage_id} --omni-dp-size-local {copies}"
        )
    return size


def bootstrap_port(stage: StageConfig) -> int | None:
    """Return the port of ``mooncake_bootstrap_port``, None without one. Raise ConfigError for a wrong one."""
    transfer = stage.engine_args.get("kv_transfer_config")
    extra = transfer.get("kv_connector_extra_config") if isinstance(transfer, Mapping) else None
    port = extra.get(BOOTSTRAP_PORT) if isinstance(extra, Mapping) else None
    if port is None or (type(port) is int and 0 < port < 65536):
        return port
    raise ConfigError(
        f"stage {stage.stage_id}: kv_transfer_config.kv_connector_extra_config.{BOOTSTRAP_PORT} is {port!r}; right"
        " would be a port from 1 to 65535"
    )


class EngineProblem(NamedTuple):
    """What is wrong with a stage at a ``place`` in its ``engine_args``, and with ``other``, if it takes two for it."""

    stage_id: int
    place: str
    text: str
    other: int | None = None


def argument_problems(stage: StageConfig) -> Iterator[EngineProblem]:
    """Describe what is wrong with the arguments of one stage."""
    for check, place in ((group_size, ""), (bootstrap_port, "kv_transfer_config")):
        try:
            check(stage)
        except ConfigError as error:
            yield EngineProblem(stage.stage_id, place, str(error))


def pair_problems(stages: Collection[StageConfig], inputs: Mapping[int, Collection[int]]) -> Iterator[EngineProblem]:
    """Describe what pairs of prefill and decode have wrong together.

    ``inputs`` are the stages that each stage takes input from.
    """
    prefills = {stage.stage_id: stage for stage in stages if _role(stage) == PREFILL}
    fed = set()
    for stage in stages:
        if _role(stage) != DECODE:
            continue
        before = [prefills[each] for each in inputs[stage.stage_id] if each in prefills]
        fed |= {each.stage_id for each in before}
        if not before:
            text = "decodes (engine_args.pd), and no stage that it takes input from prefills: name that in input_from"
            yield EngineProblem(stage.stage_id, "pd", f"stage {stage.stage_id} {text}")
        for prefill in before:
            for place, text in _mismatches(prefill, stage):
                yield EngineProblem(stage.stage_id, place, text, prefill.stage_id)
    for stage_id in sorted(prefills.keys() - fed):
        text = f"stage {stage_id} prefills (engine_args.pd), and no stage with pd: decode takes input from it"
        yield EngineProblem(stage_id, "pd", text)


def _role(stage: StageConfig) -> object:
    return stage.engine_args.get("pd") if stage.engine == "vllm" else None


def _mismatches(prefill: StageConfig, decode: StageConfig) -> Iterator[tuple[str, str]]:
    """Describe what the two stages of a pair don't have in common, which vLLM notices with the first request."""
    both = [each.engine_args.get("kv_transfer_config") for each in (prefill, decode)]
    ours, theirs = (each if isinstance(each, Mapping) else {} for each in both)
    pairs = [(f"kv_transfer_config.{name}", ours.get(name), theirs.get(name)) for name in _ALIKE]
    tensor = "tensor_parallel_size"
    pairs.append((tensor, prefill.engine_args.get(tensor, 1), decode.engine_args.get(tensor, 1)))
    for name, of_prefill, of_decode in pairs:
        if None not in (of_prefill, of_decode) and of_prefill != of_decode:
            text = f"{of_prefill!r} in stage {prefill.stage_id} and {of_decode!r} in stage {decode.stage_id}"
            both_stages = f"stages {prefill.stage_id} and {decode.stage_id} prefill and decode together"
            yield name, f"{both_stages}, but engine_args.{name} is {text}; right would be the same"

"""Prefill and decode in two stages: what each stage tells vLLM, what travels, and what is refused.

The parameters of the connectors that need a GPU or a network of their own are recorded ones: what vLLM 0.32 returns at
the end of a prefill, and what it asks of a decode.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hub.request import events as ev
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.wire import Resume
from stage_runtime.config import PayloadError
from stage_runtime.connectors.serialization import deserialize, serialize
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm.prefill_decode import KvCache, KvGroup, PrefillDecode, _cache_of
from tests.support.request_walk import PAIR, Walk, done, heard

NIXL_SAID = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4, 5]],
    "remote_engine_id": "engine-of-the-prefill",
    "remote_request_id": "hub/r1/0-8f31",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 0,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def part(role: str | None, connector: str = "NixlConnector", **more: Any) -> PrefillDecode:
    """A stage's part; ``more`` goes into its kv_transfer_config."""
    args: dict[str, Any] = {"kv_transfer_config": {"kv_connector": connector, **more}}
    if role is not None:
        args["pd"] = role
    made = PrefillDecode(StageConfig(stage_id=1, engine="vllm", model="m"), args)
    assert args == {}, "vLLM's own arguments must not hold ours"
    return made


def sampling() -> Any:
    return SimpleNamespace(
        max_tokens=60, min_tokens=5, ignore_eos=False, stop=["x"], stop_token_ids=[2], detokenize=True, extra_args=None
    )


def after_prefill(connector: str, returned: Any, engine_id: str = "p-1") -> dict[str, Any]:
    """What a prefill replica hands over, as it comes out of a connector."""
    prefill = part("prefill", connector)
    prefill._own = {"remote_engine_id": engine_id}
    handed = prefill.hand_over(StageRequest("hub/r1/0", "r1"), [5, 6, 7], returned)
    read = deserialize(serialize(handed))
    assert isinstance(read, dict)
    return read


def decode_request(handed: Any, **more: Any) -> StageRequest:
    return StageRequest("hub/r1/0", "r1", payloads={0: handed}, **more)


def test_a_prefill_makes_one_token_that_nothing_ends_sooner() -> None:
    """1. whatever the request asks, the prefill stage makes one token, so that the connector keeps the KV
    2. the connector is told that the rest happens elsewhere, and by what name
    """
    params = sampling()
    part("prefill").prepare(StageRequest("hub/r1/0", "r1"), params)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (1, 0, True)
    assert (params.stop, params.stop_token_ids) == ([], [])
    assert params.extra_args["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "hub/r1/0",
    }


def test_what_vllm_returned_reaches_the_decode_stage_unchanged() -> None:
    handed = after_prefill("NixlConnector", NIXL_SAID)
    params = sampling()
    params.extra_args = {"mine": 1}
    decode = part("decode")
    assert decode.prompt_of(decode_request(handed)) == [5, 6, 7]
    decode.prepare(decode_request(handed), params)
    given = params.extra_args["kv_transfer_params"]
    assert {name: given[name] for name in NIXL_SAID} == NIXL_SAID
    assert params.extra_args["mine"] == 1
    assert (params.max_tokens, params.stop) == (60, ["x"]), "the answer is as long as it was asked"


def test_each_prefill_replica_says_itself_where_it_is() -> None:
    """A connector that returns nothing is found by its replica: two of them must not be mistaken for each other."""
    said = [after_prefill("ExampleConnector", None, engine_id)["kv_transfer_params"] for engine_id in ("p-1", "p-2")]
    assert [each["remote_engine_id"] for each in said] == ["p-1", "p-2"]
    assert all(each["do_remote_prefill"] is True for each in said)


@pytest.mark.parametrize("more", [{"attempt": 1}, {"resume": Resume(token_ids=(9,), text="a")}])
def test_only_the_first_attempt_takes_the_kv(more: dict[str, Any]) -> None:
    """What was read once is gone from its replica, and may be another request's by now."""
    params = sampling()
    decode, request = part("decode"), decode_request(after_prefill("NixlConnector", NIXL_SAID), **more)
    decode.prepare(request, params)
    assert params.extra_args is None
    assert decode.prompt_of(request) == [5, 6, 7]


@pytest.mark.parametrize(
    "name", ["remote_request_id", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
)
def test_a_parameter_that_is_missing_fails_the_request_and_is_named(name: str) -> None:
    handed = after_prefill("NixlConnector", {key: value for key, value in NIXL_SAID.items() if key != name}, "")
    handed["kv_transfer_params"].pop(name, None)
    with pytest.raises(PayloadError, match=name):
        part("decode").prepare(decode_request(handed), sampling())


@pytest.mark.parametrize(
    "handed",
    [
        {"token_ids": [1]},
        {"kv_transfer_params": None, "prompt_token_ids": [1]},
        {"kv_transfer_params": dict(NIXL_SAID)},
        {"kv_transfer_params": dict(NIXL_SAID), "prompt_token_ids": ["5"]},
        {"kv_transfer_params": [], "prompt_token_ids": [5]},
    ],
)
def test_a_hand_off_that_no_prefill_made_fails_the_request(handed: Any) -> None:
    with pytest.raises(PayloadError):
        part("decode").prepare(decode_request(handed), sampling())


@pytest.mark.attack("Z43")
@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[3, 4, 5], [6]]},
        {"remote_block_ids": [[3, 4, 5, 6]]},
        {"remote_block_ids": [3, 4, 5]},
        {"remote_blocks_expiry_time": "soon"},
        {"remote_block_ids": [[3, -1, 5]]},
        {"remote_block_ids": [["3"]]},
        {"remote_block_ids": "345"},
        {"remote_block_ids": 3},
        {"do_remote_decode": True},
        {"do_remote_prefill": False},
        {"remote_engine_id": {"a": 1}},
        {"remote_request_id": "r" * 2000},
        {"remote_host": ["h"]},
        {"remote_port": "5600"},
        {"remote_port": 70_000},
        {"tp_size": 0},
        {"remote_num_tokens": -1},
        {"_remote_blocks_processed": True},
        {"what_is_new": [1]},
    ],
    ids=str,
)
def test_what_the_connectors_would_trip_over_fails_the_request_alone(wrong: dict[str, Any]) -> None:
    """They assert it in the step of the engine, which then ends with every request in it."""
    decode, handed = part("decode"), after_prefill("NixlConnector", NIXL_SAID)
    decode._cache = KvCache((KvGroup(1),), is_grouped=True)
    decode.prepare(decode_request(handed), sampling())
    handed["kv_transfer_params"] |= wrong
    with pytest.raises(PayloadError, match=r"the prefill's (kv_transfer_params|remote_block_ids)"):
        decode.prepare(decode_request(handed), sampling())


@pytest.mark.attack("Z43")
@pytest.mark.parametrize("tp_size", [None, "absent"])
def test_pushed_kv_needs_the_size_that_vllm_reads_in_its_step(tp_size: Any) -> None:
    decode, handed = part("decode", "NixlPushConnector"), after_prefill("NixlPushConnector", NIXL_SAID)
    decode.prepare(decode_request(handed), sampling())
    handed["kv_transfer_params"]["tp_size"] = tp_size
    if tp_size == "absent":
        del handed["kv_transfer_params"]["tp_size"]
    with pytest.raises(PayloadError, match="lack tp_size"):
        decode.prepare(decode_request(handed), sampling())


def test_blocks_may_be_in_one_list_and_newer_releases_may_say_more() -> None:
    decode, handed = part("decode"), after_prefill("NixlConnector", NIXL_SAID)
    decode._cache = KvCache((KvGroup(1),))
    handed["kv_transfer_params"] |= {"remote_block_ids": [3, 4, 5], "what_is_new": "yes", "tp_size": None}
    params = sampling()
    decode.prepare(decode_request(handed), params)
    given = params.extra_args["kv_transfer_params"]
    assert given["remote_block_ids"] == [3, 4, 5]
    assert "tp_size" not in given, "vLLM would compute with it"


@pytest.mark.attack("Z43")
@pytest.mark.parametrize("blocks", [[[3]], [[3, 4]], [3]], ids=str)
def test_of_too_few_blocks_none_is_fetched_and_the_prompt_is_read(
    blocks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decode, handed = part("decode"), after_prefill("NixlConnector", NIXL_SAID)
    decode._cache = KvCache((KvGroup(1),))
    handed["kv_transfer_params"] |= {"remote_block_ids": blocks, "remote_block_size": 1 << 20}
    params = sampling()
    decode.prepare(decode_request(handed), params)
    assert params.extra_args is None
    assert decode.prompt_of(decode_request(handed)) == [5, 6, 7]
    assert "engine.kv_not_fetched" in caplog.text


@pytest.mark.attack("Z43")
@pytest.mark.parametrize(
    ("rows", "is_fetched"),
    [
        ([[1, 2, 3], [7, 8]], True),
        ([[1, 2, 3, 4], [6, 7, 8]], True),
        ([[1, 2], [7, 8]], False),
        ([[1, 2, 3], [8]], False),
        ([[1, 2, 3], []], False),
    ],
    ids=str,
)
def test_of_a_cache_in_groups_each_has_its_blocks(rows: Any, *, is_fetched: bool) -> None:
    """Nine tokens: a cache of all of them, and one of the last four."""
    decode, handed = part("decode"), after_prefill("NixlConnector", NIXL_SAID)
    decode._cache = KvCache((KvGroup(4), KvGroup(4, 2)), is_grouped=True)
    handed["prompt_token_ids"] = list(range(9))
    handed["kv_transfer_params"] |= {"remote_block_ids": rows}
    params = sampling()
    decode.prepare(decode_request(handed), params)
    assert (params.extra_args is not None) == is_fetched


def test_the_groups_of_a_cache_are_what_vllm_sends_of_them() -> None:
    def cache_of(*kinds: str, contexts: int = 1) -> KvCache:
        specs = [type(kind, (SimpleNamespace,), {})(block_size=16, sliding_window=40) for kind in kinds]
        config = SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=config)))
        parallel = SimpleNamespace(decode_context_parallel_size=contexts)
        return _cache_of(SimpleNamespace(engine_core=core, vllm_config=SimpleNamespace(parallel_config=parallel)))

    both = "FullAttentionSpec", "SlidingWindowSpec"
    assert cache_of(*both) == KvCache((KvGroup(16), KvGroup(16, 4)), is_grouped=True)
    unknown = KvCache((KvGroup(), KvGroup()), is_grouped=True)
    assert cache_of(*both, contexts=2) == unknown
    assert cache_of("FullAttentionSpec", "MambaSpec") == unknown
    assert KvGroup().blocks_of(9) == 0


def test_mooncake_is_told_the_replica_s_address_and_the_transfer() -> None:
    """Its connector returns nothing: request and replica have to be named by those who route."""
    handed = after_prefill("MooncakeConnector", None)
    with pytest.raises(PayloadError, match="remote_bootstrap_addr"):
        part("decode", "MooncakeConnector").prepare(decode_request(handed), sampling())
    handed["kv_transfer_params"]["remote_bootstrap_addr"] = "http://10.0.0.7:8998"
    params = sampling()
    part("decode", "MooncakeConnector").prepare(decode_request(handed), params)
    given = params.extra_args["kv_transfer_params"]
    assert (given["transfer_id"], given["remote_engine_id"]) == ("hub/r1/0", "p-1")


def test_a_decode_stage_without_a_prefill_does_it_all() -> None:
    params = sampling()
    decode, request = part("decode"), StageRequest("k", "r1")
    decode.prepare(request, params)
    assert (decode.prompt_of(request), params.extra_args) == (None, None)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"pd": "both"}, "'prefill' or 'decode'"),
        ({"pd": "prefill"}, "kv_transfer_config"),
        ({"pd": "prefill", "kv_transfer_config": {}}, "kv_connector"),
        ({"kv_transfer_config": "NixlConnector"}, "mapping"),
        ({"pd": "prefill", "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_consumer"}}, "kv_consumer"),
        ({"pd": "decode", "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_producer"}}, "kv_producer"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_the_door(args: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PrefillDecode(StageConfig(stage_id=0, engine="vllm", model="m"), dict(args))


def test_the_pair_is_told_its_sides_and_to_read_the_prompt_where_no_kv_comes() -> None:
    assert part("prefill").transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    decode = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    assert part("decode").transfer == decode
    asked = {"kv_load_failure_policy": "fail", "kv_role": "kv_both"}
    assert part("decode", **asked).transfer == {"kv_connector": "NixlConnector", **asked}
    assert part(None, kv_role="kv_both").transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_a_prefill_stage_that_is_to_show_something_is_refused() -> None:
    stage = StageConfig(stage_id=0, engine="vllm", model="m", final_output="text")
    with pytest.raises(ConfigError, match="shows nothing"):
        PrefillDecode(stage, {"pd": "prefill", "kv_transfer_config": {"kv_connector": "X"}})


def test_the_hub_keeps_where_the_prefill_left_its_kv() -> None:
    walk = Walk(PAIR)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    assert walk.machine.state.public.pd_prefill_multimodal_output is None
    message = done(0, 0, [1])
    ref = msgspec.structs.replace(message.payloads[0], metadata={"kv_transfer_params": NIXL_SAID})
    walk.tell(heard(0, 0, msgspec.structs.replace(message, payloads=(ref,))))
    assert walk.machine.state.public.pd_prefill_multimodal_output == {"stage_id": 0, "kv_transfer_params": NIXL_SAID}


@pytest.mark.attack("Z59")
def test_a_prompt_longer_than_the_model_takes_is_not_gone_through() -> None:
    """Nor are blocks that are more than the prompt has tokens."""
    decode = part("decode")
    decode._longest = 8
    params = {**NIXL_SAID, "remote_block_ids": [[1]]}

    class Long(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("it is gone through")

    for handed, said in (
        ({"prompt_token_ids": Long([1] * 9), "kv_transfer_params": params}, "9 tokens; this stage takes up to 8"),
        (
            {"prompt_token_ids": [1] * 8, "kv_transfer_params": {**params, "remote_block_ids": Long([1] * 9)}},
            "not those of 8 tokens",
        ),
    ):
        with pytest.raises(PayloadError, match=said):
            decode.prompt_of(decode_request(handed))
    assert decode.prompt_of(decode_request({"prompt_token_ids": [1] * 8, "kv_transfer_params": params})) == [1] * 8

"""Which values of vLLM's arguments are mere settings. The names are held against vLLM in tests/contract."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.trust.vllm_args import is_setting


@pytest.mark.parametrize("value", ["a.b", "a/b", "a:b c", "http://x", "../x", "", {"a": 1}, [["x", "y.z"]], b"x"])
def test_a_setting_with_a_value_that_could_name_something_is_none(value: object) -> None:
    assert not is_setting("attention_backend", value)


@pytest.mark.parametrize("value", [["fp8"], "gguf", "bitsandbytes", "a.b", {}])
def test_a_method_of_quantization_that_reads_other_files_is_no_setting(value: object) -> None:
    assert not is_setting("quantization", value)


def test_an_argument_that_is_not_listed_is_no_setting() -> None:
    assert not is_setting("of_a_later_vllm", 1)
    assert not is_setting("kv_transfer_config.of_a_later_vllm", 1)
    assert not is_setting("pooler_config", "x")
    assert not is_setting("limit_mm_per_prompt", {"image": "x"})


@pytest.mark.parametrize("value", [None, "main", "refs/pr/1", "v1.0+cpu", "a" * 40, "release-2.1/rc_1"])
def test_a_branch_a_tag_or_a_commit_is_a_setting(value: object) -> None:
    assert all(is_setting(place, value) for place in ("revision", "tokenizer_revision", "code_revision"))
    assert is_setting("speculative_config.revision", value)


LEADING_AWAY = [
    "../../srv/model",
    "main/../../..",
    "/srv/model",
    "a//b",
    ".hidden",
    "a/",
    "a b",
    "",
    1,
    "a" * 256,
    "a\n",
]


@pytest.mark.attack("P34")
@pytest.mark.parametrize("value", LEADING_AWAY)
def test_a_revision_that_leads_out_of_the_model_hubs_cache_is_no_setting(value: object) -> None:
    places = ("revision", "tokenizer_revision", "code_revision", "speculative_config.revision")
    assert not any(is_setting(place, value) for place in places)

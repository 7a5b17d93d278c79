"""What one host allows, and which document is its own."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.deploy.document import decode_deploy, encode_deploy, parse_deploy
from omni_discovery.deploy.trust.bounds import Bounds, is_below, read_allow
from omni_discovery.errors import ConfigError


def document(**engine_args: Any) -> str:
    return f"stages: [{{stage_id: 0, engine: torch, engine_args: {engine_args}, final_output: text}}]"


def test_a_document_is_ones_own_only_as_long_as_it_says_exactly_the_same() -> None:
    """1. the operator's file names a target; etcd returns the same content in another form
    2. somebody rewrites one word of it in etcd
    """
    ours = parse_deploy(document(target="my_models:shout", kwargs={"n": 2.0}), "file")
    bounds = Bounds().owning(ours)
    assert bounds.trusts(decode_deploy(encode_deploy(ours), "etcd"))
    assert not bounds.trusts(parse_deploy(document(target="my_models:shout", kwargs={"n": 2.5}), "etcd"))
    assert not Bounds().trusts(ours)
    assert Bounds(allow=("all",)).trusts(ours)


def test_a_later_document_may_name_the_models_of_ones_own_and_nothing_else_of_it() -> None:
    stage = "{stage_id: 0, engine: vllm, model: /srv/m, engine_args: {trust_remote_code: true}, final_output: text}"
    bounds = Bounds().owning(parse_deploy(f"stages: [{stage}]", "file"))
    assert bounds.allows("model", "/srv/m")
    assert not bounds.allows("model", "/srv/other")
    assert not bounds.allows("remote-code")


def test_a_module_is_allowed_with_those_below_it_and_not_with_its_namesakes() -> None:
    assert is_below("my_models", ("my_models",))
    assert is_below("my_models.sound", ("my_models",))
    assert not is_below("my_models_too", ("my_models",))
    assert not is_below("my", ("my_models",))
    assert not is_below("", ("my_models",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("targets=my_models", "did you mean 'target'"),
        ("target", "needs a value"),
        ("target=", "needs a value"),
        ("target=my_models:shout", "by its module"),
        ("remote-code=yes", "is not known"),
        ("", "is not known"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_would_be_right(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_allow([text])


def test_flags_are_kept_as_they_are_written() -> None:
    given = ("target=my_models", "remote-code", "engine-arg=hf_overrides", "model=s3://a/b", "all")
    assert read_allow([*given, "remote-code"]) == given

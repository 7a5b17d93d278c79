"""Which deploy files are vLLM-Omni's own, and what of a resolver's answer is believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.resolution import MOST_BYTES, ResolvedDocument, ResolveRequest, is_peers, read_answer
from omni_discovery.errors import ConfigError

STAGE: dict[str, Any] = {"stage_id": 0, "engine": "vllm-omni", "model": "/m", "final_output": "audio"}


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("async_chunk: true\nstages: [{stage_id: 0, max_num_seqs: 4, devices: '0'}]", True),
        ("base_config: qwen3_tts.yaml", True),
        ("pipeline: qwen3_tts\nstages: []", True),
        ("stages: [{stage_id: 0, engine: vllm}, {stage_id: 1}]", False),
        ("stages: [{stage_id: 0, stage_type: llm}]", False),
        ("stages: [{stage_id: 0, model: /m}]", False),
        ("stage_args: [{stage_id: 0}]", False),
        ("stages: 3", False),
        ("edges: []", False),
    ],
)
def test_a_file_is_theirs_if_no_stage_says_what_runs_it(text: str, theirs: bool) -> None:
    assert is_peers(text, "f.yaml") is theirs


def test_what_is_no_document_of_either_is_an_error() -> None:
    for text in ("[1]", "a: [", "a: 1\n b: 2"):
        with pytest.raises(ConfigError, match=r"f\.yaml"):
            is_peers(text, "f.yaml")


def answer(document: dict[str, Any], **more: Any) -> bytes:
    return b"a library's line\n" + msgspec.json.encode(ResolvedDocument(document=document, **more)) + b"\n"


def test_an_answer_is_checked_as_a_file_is_and_overrides_hold() -> None:
    request = ResolveRequest(model="/m", overrides={0: {"engine_args": {"max_num_seqs": 2}}})
    deploy, resolved = read_answer(answer({"stages": [STAGE]}, pipeline="qwen3_tts"), request, "it")
    assert deploy.stage(0).engine_args == {"max_num_seqs": 2}
    assert resolved.pipeline == "qwen3_tts"
    for bad, told in [
        (answer({"stages": [{**STAGE, "strange": 1}]}), "stage 0.strange is not known"),
        (answer({"stages": [{**STAGE, "final_output": "smell"}]}), "stage 0.final_output is 'smell'"),
        (answer({}), "stages"),
        (b"", "its answer has 0 bytes"),
        (b"x" * (MOST_BYTES + 1), f"its answer has {MOST_BYTES + 1} bytes"),
        (b"Traceback", "is no resolved document"),
        (b'{"document": 3}', "is no resolved document"),
        (b'{"document": ' + b"[" * 5000, "is no resolved document"),
    ]:
        with pytest.raises(ConfigError, match=told):
            read_answer(bad, request, "it")


def test_an_override_of_a_stage_that_is_not_there_is_an_error() -> None:
    request = ResolveRequest(model="/m", overrides={5: {"engine_args": {}}})
    with pytest.raises(ConfigError, match="stage 5 is not in the pipeline; it has 0"):
        read_answer(answer({"stages": [STAGE]}), request, "it")

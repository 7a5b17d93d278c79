"""Numbers that a stage pools: how they are asked for, and how they travel to whoever asked."""

from __future__ import annotations

import io
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hub.api.chat.schema import refuse_embeddings
from hub.api.served_stage import serving_stage
from hub.media import array_of
from hub.request.outputs import OmniOutput
from hub.results import ResultBuilder
from omni_discovery.deploy.document import DeployConfig, StageConfig, parse_deploy
from omni_discovery.errors import ConfigError, EngineFailedError, InvalidRequestError
from stage_runtime.engine_loop.check_output import flaw_of, pieces_of
from stage_runtime.engine_loop.jobs import OutputChunk
from stage_runtime.engines.base import EngineOutput, create_engine
from stage_runtime.engines.files import npy_of
from stage_runtime.engines.sampling import pooling_asked
from tests.support.engines import THINKER, run
from tests.unit.stage_runtime.engines.callable.test_engine import ask, engine

EMBEDDER = StageConfig(stage_id=0, engine="vllm", engine_args={"runner": "pooling"}, final_output="embedding")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": 0.5}, "'temperature' is not known"),
        ({"normalize": True}, "'normalize' is not known"),
        ({"late_interaction_params": {}}, "'late_interaction_params' is not known"),
        ({"task": 5}, "task"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 8.5}, "dimensions"),
        ({"use_activation": 1}, "use_activation"),
        ({"returned_token_ids": [1]}, "'returned_token_ids' is not known"),
        ({"compressed_token_type_ids": -1}, "compressed_token_type_ids"),
    ],
    ids=str,
)
def test_what_can_not_be_asked_is_refused_by_name(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        pooling_asked(params)


def test_only_what_was_set_is_asked() -> None:
    assert pooling_asked({"task": "embed", "dimensions": 8, "use_activation": None}) == {
        "task": "embed",
        "dimensions": 8,
    }


@pytest.mark.parametrize(
    "numbers",
    [
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor(0.25, requires_grad=True),
        np.arange(6).reshape(2, 3),
        torch.zeros(0, 4),
    ],
    ids=lambda numbers: str(tuple(numbers.shape)),
)
def test_numbers_travel_as_a_file_of_float32_in_their_shape(numbers: Any) -> None:
    read = array_of(npy_of(numbers))
    expected = numbers.detach().float().numpy() if isinstance(numbers, torch.Tensor) else numbers
    assert (read.dtype, read.shape) == (np.float32, numbers.shape)
    np.testing.assert_array_equal(read, expected)


def saved(array: Any, *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, np.zeros(2, np.float32))
    return file.getvalue()


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"what",
        pickle.dumps([1.0]),
        saved(np.array([{}], dtype=object), pickled=True),
        saved(np.zeros(2, np.float64)),
        npy_of(torch.zeros(4))[:-1],
        npy_of(torch.zeros(4)).replace(b"(4,)", b"(9**9,)"),
        zipped(),
        npy_of(torch.zeros(4)).replace(b"(4,)", b"(4, ("),
        npy_of(torch.zeros(4)).replace(b"'shape': (4,)", b"[]: (True,)  "),
        npy_of(torch.zeros(4)).replace(b"(4,), }" + b" " * 20, b"(0, " + b"9" * 21 + b")}"),
    ],
    ids=range(11),
)
def test_what_is_no_such_file_is_the_replicas_fault_and_nothing_in_it_runs(file: bytes) -> None:
    with pytest.raises(EngineFailedError, match="npy"):
        array_of(file)


def test_what_is_no_number_is_not_written() -> None:
    for wrong in (np.array(["a"]), np.array([{}], dtype=object), "text"):
        with pytest.raises(ValueError, match="numbers"):
            npy_of(wrong)


def test_an_engine_says_it_as_an_attachment() -> None:
    output = EngineOutput("a", pooled_npy=b"npy", finish_reason="stop")
    assert flaw_of(output) == ""
    assert pieces_of(output, "embedding") == [
        OutputChunk("a", "embedding", mime="application/x-npy", attachment=b"npy")
    ]
    assert "pooled_npy" in flaw_of(EngineOutput("a", pooled_npy=[1.0]))  # type: ignore[arg-type]


def test_users_read_it_as_an_array() -> None:
    file = npy_of(torch.tensor([0.5, 1.0]))
    builder = ResultBuilder(0, "r", "prompt")
    builder.add(OmniOutput("r", 0, "text", text="words", finish_reason="stop"))
    assert builder.result().embedding is None
    shown = OmniOutput("r", 1, "embedding", data=file, mime="application/x-npy")
    assert shown.embedding is not None
    assert shown.embedding.tolist() == [0.5, 1.0]
    end = OmniOutput("r", 1, "embedding", finish_reason="stop")
    assert end.embedding is None
    for output in (shown, end):
        builder.add(output)
    embedding = builder.result().embedding
    assert embedding is not None
    assert embedding.tolist() == [0.5, 1.0]
    with pytest.raises(EngineFailedError):
        _ = builder.result(EngineFailedError("it broke")).embedding


def test_a_torch_stage_shows_arrays_where_its_document_says_so() -> None:
    (output,) = run(engine("measure", "embedding"), ask("k", "a b c"))["k"]
    assert output.pooled_npy is not None
    assert array_of(output.pooled_npy).tolist() == [5.0]
    (wrong,) = run(engine("give", "embedding"), ask("k", "text"))["k"]
    assert wrong.error is not None
    assert "final_output: embedding; return an array of numbers" in wrong.error[1]


def test_a_document_may_ask_for_it_in_the_words_of_others() -> None:
    stage = "{stage_id: 0, engine: vllm, model: m, final_output: true, final_output_type: embedding}"
    assert parse_deploy(f"stages: [{stage}]", "x.yaml").stages[0].final_output == "embedding"


@pytest.mark.parametrize(
    ("args", "final_output", "named"),
    [
        ({"runner": "pooling"}, "text", "final_output is embedding"),
        ({"runner": "generate"}, "embedding", "must be pooling"),
        ({"pd": "prefill"}, "embedding", "engine_args.pd"),
        ({"handoff": {"hidden_states": True}}, "embedding", "engine_args.handoff"),
    ],
)
def test_a_vllm_stage_that_pools_and_does_not_is_refused(args: dict[str, Any], final_output: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        create_engine(msgspec.structs.replace(THINKER, engine_args=args, final_output=final_output))


def test_a_vllm_stage_pools_where_its_document_says_so() -> None:
    """By its runner, if only stages after it get the numbers, or by what it shows."""
    shown = {"embedding": {}, "none": {"runner": "pooling"}}
    for final_output, args in shown.items():
        stage = msgspec.structs.replace(THINKER, engine_args=args, final_output=final_output)
        assert create_engine(stage).modality == "embedding"


def test_vllms_server_speaks_for_a_stage_that_pools() -> None:
    text = StageConfig(stage_id=1, engine="vllm", final_output="text")
    assert serving_stage(DeployConfig(stages=(EMBEDDER, text))) is EMBEDDER
    plain = msgspec.structs.replace(EMBEDDER, engine_args={})
    assert serving_stage(DeployConfig(stages=(plain,))) is plain
    for runner, final_output in (("pooling", "text"), ("generate", "embedding")):
        wrong = StageConfig(stage_id=0, engine="vllm", engine_args={"runner": runner}, final_output=final_output)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="what pools has final_output: embedding"):
            serving_stage(DeployConfig(stages=(wrong,)))
    with pytest.raises(ConfigError, match="takes the hand-off of another"):
        serving_stage(
            DeployConfig(stages=(StageConfig(stage_id=0, engine="vllm"), msgspec.structs.replace(EMBEDDER, stage_id=1)))
        )


def test_a_chat_has_no_place_for_an_embedding() -> None:
    text = StageConfig(stage_id=1, engine="vllm", final_output="text")
    for modalities in (None, ["embedding"], ["text", "embedding"]):
        with pytest.raises(InvalidRequestError, match=r"stage 0 .*/v1/embeddings .*\['text'\] only"):
            refuse_embeddings((EMBEDDER, text), modalities)
    with pytest.raises(InvalidRequestError, match=r"--api vllm$"):
        refuse_embeddings((EMBEDDER,), None)
    refuse_embeddings((EMBEDDER, text), ["text"])
    refuse_embeddings((text,), None)

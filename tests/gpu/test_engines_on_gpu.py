"""The engines on a GPU, CUDA or ROCm: the whole contract, and what only a device can do wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from omni_discovery.wire import FailureKind  # noqa: E402 - torch first
from stage_runtime.engines.base import Engine, StageRequest, create_engine  # noqa: E402
from stage_runtime.replica.sampler import gpu_memory  # noqa: E402
from stage_runtime.testing import OPTIONAL, EngineContract  # noqa: E402
from tests.support.device_callables import torch_stage  # noqa: E402
from tests.support.engines import PAINTER, THINKER, as_the_supervisor_has_it, run  # noqa: E402
from tests.support.pipelines import save_dit, stage_of  # noqa: E402

DEVICE = "cuda"
if not torch.cuda.is_available():
    pytest.skip(f"torch {torch.__version__} sees no GPU here", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestTorchOnTheGpu(EngineContract):
    """A module that computes, word by word."""

    offers = frozenset({"pause", "update"})

    def make_engine(self) -> Engine:
        return create_engine(torch_stage("Adder", DEVICE))

    def good_request(self, key: str) -> StageRequest:
        payload = {"numbers": torch.arange(6, dtype=torch.float32), "times": 3}
        return StageRequest(key, key, payloads={0: payload}, next_stages=(1,))

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, payloads={0: {"numbers": "none"}})

    def test_inputs_and_weights_are_on_the_device_and_what_is_handed_over_leaves_it(self, engine: Engine) -> None:
        from stage_runtime.connectors.serialization import deserialize, serialize

        said = run(engine, self.good_request("k"))["k"]
        assert {output.text.split()[0] for output in said if output.text} == {torch.device(DEVICE).type}
        handed = deserialize(serialize(said[-1].handoff))
        assert handed["sums"].device.type == "cpu"
        assert handed["sums"].tolist() == [15.0 * factor for factor in (2.0, 4.0, 6.0)]

    def test_memory_of_the_device_that_runs_out_fails_its_request_only(self, engine: Engine) -> None:
        """It asks for a million billion numbers."""
        good = self.good_request("good")
        payload = {"numbers": torch.zeros(1), "room": 10**15}
        said = run(engine, StageRequest("huge", "huge", payloads={0: payload}), good)
        assert said["huge"][-1].error is not None
        assert said["huge"][-1].error[0] is FailureKind.ENGINE
        assert "memory" in said["huge"][-1].error[1]
        assert said["good"][-1].finish_reason == "stop"


def test_a_kernel_that_fails_ends_the_engine() -> None:
    """In a process of its own: nothing works there any more afterwards."""
    code = (
        "import torch\n"
        "from stage_runtime.engines.base import StageRequest, create_engine\n"
        "from tests.support.device_callables import torch_stage\n"
        f"engine = create_engine(torch_stage('break_device', {DEVICE!r})); engine.load(lambda p, s: None)\n"
        "engine.add(StageRequest('k', 'k', payloads={0: {'numbers': torch.zeros(3)}}))\n"
        "try:\n    print(engine.step())\nexcept Exception as error:\n    print('died of', type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "died of" in done.stdout, done.stdout + done.stderr


class TestPainterOnTheGpu(EngineContract):
    """Our diffusion transformer."""

    offers = frozenset({"update"})

    def make_engine(self) -> Engine:
        return create_engine(msgspec.structs.replace(PAINTER, engine_args={"capacity": 4, "device": DEVICE}))

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, "r", params={"steps": 6}, payloads={0: {"token_ids": torch.tensor([3, 5, 6, 1])}})

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, params={"steps": 0}, payloads={0: {"token_ids": torch.tensor([3, 5, 6, 1])}})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
class TestDiffusersOnTheGpu(EngineContract):
    """A tiny pipeline, in what is usual on a device."""

    offers = frozenset({"update"})
    folder: ClassVar[Path]

    @pytest.fixture(autouse=True, scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
        request.cls.folder = tmp_path_factory.mktemp("dit")
        save_dit(request.cls.folder)

    def make_engine(self) -> Engine:
        return create_engine(stage_of("dit", self.folder, device=DEVICE))

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, "r", inputs={"prompt": "7"}, params={"num_inference_steps": 4})

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": "7"}, params={"num_inference_steps": 0})


def _vllm_is_for_gpus() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not _vllm_is_for_gpus(), reason="no vllm that is built for GPUs is installed")
class TestThinkerOnTheGpu(EngineContract):
    """vLLM with the demo's thinker."""

    offers = frozenset(OPTIONAL)

    def make_engine(self) -> Engine:
        return create_engine(THINKER)

    @pytest.fixture
    def engine(self) -> Engine:
        kind = type(self)
        if kind.loaded is None:
            with as_the_supervisor_has_it():
                kind.loaded, kind.reports = self.make_engine(), []
                kind.loaded.load(lambda phase, share: kind.reports.append((phase, share)))
        return kind.loaded

    def good_request(self, key: str) -> StageRequest:
        params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
        return StageRequest(key, key, inputs={"prompt": "What is 1 + 2?"}, params=params)

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key)

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        return [{"token_ids": torch.tensor([34, 35])}, {"token_ids": torch.tensor([36])}]


def test_the_memory_of_the_gpu_that_is_used_is_measured() -> None:
    held = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    (gpu,) = gpu_memory()
    assert gpu.index == held.device.index
    assert held.nbytes <= gpu.used_bytes <= gpu.total_bytes

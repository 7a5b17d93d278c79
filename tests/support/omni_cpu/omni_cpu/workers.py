"""Workers: vLLM's own for CPUs, with vLLM-Omni's model runners."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _NoGraphs:
    """A talker's multi-token predictor without CUDA graphs, its buffers on the CPU."""

    def _init_talker_mtp(self: Any) -> None:
        if self.compilation_config.max_cudagraph_capture_size is None:
            self.compilation_config.max_cudagraph_capture_size = 0
        super()._init_talker_mtp()
        # vLLM's CPU runner makes one buffer of each pair in its constructor; these are made later.
        for name in ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"):
            if (pair := getattr(self, name, None)) is not None:
                pair.gpu = pair.cpu


class CpuArRunner(_NoGraphs, GPUARModelRunner, CPUModelRunner):
    pass


class CpuGenerationRunner(_NoGraphs, GPUGenerationModelRunner, CPUModelRunner):
    pass


class _Worker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type

    def init_device(self) -> None:
        # The worker makes its runner by this name. A second runner made afterwards would start its threads twice.
        CPUWorker.init_device.__globals__["CPUModelRunner"] = self.model_runner_cls
        super().init_device()


class CpuArWorker(_Worker):
    model_runner_cls = CpuArRunner

    def compile_or_warm_up_model(self) -> Any:
        # A GPU's first forward pass, before any request, leaves behind what some models rely on.
        made = super().compile_or_warm_up_model()
        self.model_runner._dummy_run(8)
        return made


class CpuGenerationWorker(_Worker):
    model_runner_cls = CpuGenerationRunner

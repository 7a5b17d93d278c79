"""The platform: vLLM's own for CPUs, with what vLLM-Omni asks of a platform besides."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class _NoGraph:
    """Stands for a wrapper of CUDA graphs: nothing is an instance of it."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    # vLLM's own name for a CPU is the variable of its memory nodes; a device's number in it would be none of them.
    device_control_env_var = "OMNI_CPU_DEVICES"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omni_cpu.workers.CpuArWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "omni_cpu.workers.CpuGenerationWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "omni_cpu.attention.CpuAttentionBackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def get_graph_wrapper_cls(cls) -> type:
        return _NoGraph

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        # Else the talker's code predictor would be compiled, for minutes.
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        return CpuPlatform.get_default_ir_op_priority(vllm_config)

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        return None

    @classmethod
    def get_device_count(cls) -> int:
        return 8

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        return 0

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

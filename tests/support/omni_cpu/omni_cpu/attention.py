"""Attention of diffusion models by torch: vLLM-Omni's own, which asks the platform for its name, and knows no CPU."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):
    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        return self.forward_cuda(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuAttention]:
        return CpuAttention

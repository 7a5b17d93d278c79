"""Diffusion pipelines of vLLM-Omni: its DiffusionEngine's worker and models, drawing pictures in this process."""

"""Makes a stage's output a function of its input and seed, where vLLM-Omni's own is not.

A lost replica's work is run again elsewhere, and what was shown of it is left out: that needs the same codes and the
same samples. Two models draw from the random numbers of the whole process: the talker of Qwen3-Omni for all codes but
the first of each frame, the decoder of Qwen2.5-Omni for the noise that it starts from.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

logger = logging.getLogger(__name__)


def make_deterministic(kind: str, model_stage: str | None, runner: Any) -> bool:
    """Change a loaded stage of a pipeline so that it repeats itself. Return False if that can't be done."""
    match kind, model_stage:
        case "qwen2_5_omni", "code2wav":
            _seed_noise_by_codes(runner.model)
        case "qwen3_omni_moe", "talker":
            return _hand_generators_on(runner)
    return True


def _seed_noise_by_codes(model: Any) -> None:
    """Have the same codes begin with the same noise."""
    import torch

    generate = model.generate_audio

    def generate_audio(code: Any, voice_type: Any) -> Any:
        codes = torch.as_tensor(code).detach().to("cpu", torch.int64).contiguous()
        torch.manual_seed(zlib.crc32(codes.numpy().tobytes()))
        return generate(code, voice_type)

    model.generate_audio = generate_audio


def _hand_generators_on(runner: Any) -> bool:
    """Have the code predictor use each request's own generator, which the talker is given and drops."""
    from vllm_omni.platforms import current_omni_platform

    if isinstance(runner.talker_mtp, current_omni_platform.get_graph_wrapper_cls()):
        # A CUDA graph plays back the draws that were recorded.
        logger.warning("stage.not_deterministic the talker runs in a CUDA graph; enforce_eager: true makes it so")
        return False
    predictor, mtp = runner.model.talker.code_predictor, runner.talker_mtp
    predict = predictor.forward
    generators: list[Any] = []

    def forward(layer0_code: Any, *args: Any, **kwargs: Any) -> Any:
        rows = int(layer0_code.shape[0])
        # Rows behind those of requests are padding.
        own = [*generators[:rows], *[None] * (rows - len(generators))]
        return predict(layer0_code, *args, **kwargs, generators=own)

    def talker_mtp(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        generators[:] = kwargs.pop("generators", None) or [generator]
        try:
            return mtp(*args, **kwargs)
        finally:
            generators.clear()

    predictor.forward, runner.talker_mtp = forward, talker_mtp
    runner.model.talker_mtp_accepts_per_row_generators = True
    return True

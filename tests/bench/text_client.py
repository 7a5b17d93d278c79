"""A client of a thinker, in a process of its own: of this project's hub, or of vLLM-Omni's own AsyncOmni.

``python -m tests.bench.text_client ours ENDPOINT NAMESPACE DEPLOY`` or ``peer MODEL DEPLOY``; see ``speech_client``,
whose measurements it takes. Of each piece of an answer it counts the characters.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from tests.bench.speech_client import TEXT, Speak, serve, serve_hub

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni

#: Said by both: penalties over a large vocabulary, which vLLM-Omni's deploy file asks for, take longer than the model.
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
PROMPT = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def text_by(omni: AsyncOmni) -> Speak:
    """Answers by a hub, as text alone."""

    async def write(tokens: int, seed: int) -> AsyncIterator[int]:
        params = {0: {"max_tokens": tokens, "min_tokens": tokens, "seed": seed, **SAMPLING}}
        async for output in omni.generate({"prompt": PROMPT}, params=params, modalities=["text"]):
            if output.text:
                yield len(output.text)

    return write


async def serve_peer(model: str, deploy: str) -> None:
    """vLLM-Omni's own, with its stages as processes that it starts itself."""
    from vllm.sampling_params import RequestOutputKind
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    omni = AsyncOmni(model, deploy_config=deploy)

    async def write(tokens: int, seed: int) -> AsyncIterator[int]:
        params = [each.clone() for each in omni.default_sampling_params_list]
        for each in params:
            each.output_kind = RequestOutputKind.DELTA
        params[0].max_tokens = params[0].min_tokens = tokens
        params[0].seed = seed
        for name, value in SAMPLING.items():
            setattr(params[0], name, value)
        prompt = {"prompt": PROMPT}
        async for output in omni.generate(prompt, "", sampling_params_list=params, output_modalities=["text"]):
            if output.outputs and output.outputs[0].text:
                yield len(output.outputs[0].text)

    try:
        await serve(write)
    finally:
        omni.shutdown()


def main() -> None:
    """Run one of the two."""
    role, *given = sys.argv[1:]
    asyncio.run(serve_hub(given[0], given[1], given[2], text_by) if role == "ours" else serve_peer(*given))


if __name__ == "__main__":
    main()

"""A client of a speaking model, in a process of its own: of this project's hub, or of vLLM-Omni's own AsyncOmni.

``python -m tests.bench.speech_client ours ENDPOINT NAMESPACE DEPLOY`` or ``peer MODEL DEPLOY``. Each line of its
standard input is one measurement, ``{"at_once": 4, "count": 8, "tokens": 48}``; it answers with one line that begins
with ``RESULT``. Its process is the one that routes: the hub here, the head there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni

TEXT: Final = "hello world, the quick brown fox"
RATE_HZ: Final = 24000
MARK: Final = "RESULT "
_WAV_HEADER_BYTES: Final = 44
#: Asks for one speech of so many tokens with this seed; yields the number of samples of each piece.
Speak = Callable[[int, int], AsyncIterator[int]]


class Measurement(msgspec.Struct, frozen=True):
    """``count`` speeches of ``tokens`` tokens, ``at_once`` at any time."""

    at_once: int
    count: int
    tokens: int = 48


async def measure(speak: Speak, asked: Measurement) -> dict[str, Any]:
    """What clients saw, and the processor time of this process."""
    seeds = iter(range(asked.count))
    first_s: list[float] = []
    whole_s: list[float] = []
    errors: list[str] = []
    samples = 0

    async def keep_asking() -> None:
        nonlocal samples
        for seed in seeds:
            began_s, is_first, heard = time.perf_counter(), True, 0
            try:
                async for piece in speak(asked.tokens, seed):
                    heard += piece
                    if piece and is_first:
                        is_first = False
                        first_s.append(time.perf_counter() - began_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what a client saw
                errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            whole_s.append(time.perf_counter() - began_s)
            samples += heard
            if not heard:
                errors.append("silence")

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(asked.at_once):
            group.create_task(keep_asking())
    return {
        "first_s": first_s,
        "whole_s": whole_s,
        "audio_s": samples / RATE_HZ,
        "wall_s": time.perf_counter() - began_s,
        "head_cpu_s": time.process_time() - began_cpu_s,
        "errors": errors,
    }


async def serve(speak: Speak) -> None:
    """Answer the measurements on the standard input until it ends."""
    _answer({"pid": os.getpid()})
    while line := await asyncio.to_thread(sys.stdin.readline):
        result = await measure(speak, msgspec.json.decode(line, type=Measurement))
        _answer(result)


def _answer(result: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


async def serve_hub(endpoint: str, namespace: str, deploy: str, speak_by: Callable[[AsyncOmni], Speak]) -> None:
    """A hub in this process, beside whatever else serves the same registry; ``speak_by`` it come the answers."""
    from hub.async_omni import AsyncOmni
    from omni_discovery.clients import OmniCoordClientForHub
    from omni_discovery.curve import KeyPair
    from omni_discovery.deploy.load import load_deploy
    from omni_discovery.records.schema import HubRecord

    omni = AsyncOmni(load_deploy(Path(deploy)), "bench", KeyPair.generate())
    await omni.start()
    record = HubRecord(hub_id=omni.hub_id, curve_public_key=omni.public_key)
    with OmniCoordClientForHub(endpoint, hub=record, on_view=omni.apply_view, namespace=namespace):
        while not all(stage.pickable == stage.registered > 0 for stage in omni.stage_status()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await serve(speak_by(omni))
        await omni.close()


def speech_by(omni: AsyncOmni) -> Speak:
    """Speeches by a hub."""

    async def speak(tokens: int, seed: int) -> AsyncIterator[int]:
        params = {0: {"max_tokens": tokens, "min_tokens": tokens, "seed": seed}}
        async for output in omni.generate({"prompt": TEXT}, params=params):
            if output.data:
                yield (len(output.data) - _WAV_HEADER_BYTES) // 2

    return speak


async def serve_peer(model: str, deploy: str) -> None:
    """vLLM-Omni's own, with its stages as processes that it starts itself."""
    from transformers import AutoConfig, AutoTokenizer
    from vllm.sampling_params import RequestOutputKind
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.worker.sampling_utils import apply_fixed_seed_to_sampling_params

    from stage_runtime.engines.vllm_omni.speech import prompt_of, read_speech

    omni = AsyncOmni(model, deploy_config=deploy)
    talker = AutoConfig.from_pretrained(model).talker_config
    tokenizer = AutoTokenizer.from_pretrained(model)
    speech = read_speech({"prompt": TEXT}, {"speaker": "ethan", "language": "English"}, talker)
    prompt = prompt_of(speech, tokenizer.encode, talker)

    async def speak(tokens: int, seed: int) -> AsyncIterator[int]:
        params = [each.clone() for each in omni.default_sampling_params_list]
        for each in params:
            each.output_kind = RequestOutputKind.DELTA
        params[0].max_tokens = params[0].min_tokens = tokens
        apply_fixed_seed_to_sampling_params(params[0], seed, seed_talker_mtp=True)
        async for output in omni.generate(dict(prompt), "", sampling_params_list=params):
            yield _samples_of(output)

    try:
        await serve(speak)
    finally:
        omni.shutdown()


def _samples_of(output: Any) -> int:
    made = output.outputs[0].multimodal_output if output.outputs else output.multimodal_output
    audio = (made or {}).get("audio")
    if audio is None:
        return 0
    return sum(int(part.numel()) for part in (audio if isinstance(audio, list | tuple) else [audio]))


def main() -> None:
    """Run one of the two."""
    role, *given = sys.argv[1:]
    asyncio.run(serve_hub(given[0], given[1], given[2], speech_by) if role == "ours" else serve_peer(*given))


if __name__ == "__main__":
    main()

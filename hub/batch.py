"""A batch of requests over one AsyncOmni: so many at once, one result for each prompt, in order."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hub.results import OmniResult, ResultBuilder
from omni_discovery.errors import InvalidRequestError, OverloadedError, RequestError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni

#: When a hub that has too much to do is asked again, where it does not say itself.
_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What holds for each request of a batch. ``params`` is by stage id; ``timeout_s`` counts from a prompt's start."""

    max_concurrency: int
    timeout_s: float
    params: Mapping[int, Mapping[str, Any]] | None = None
    modalities: Sequence[str] | None = None


async def run_batch(
    omni: AsyncOmni, prompts: Sequence[Any], options: BatchOptions, on_done: Callable[[], object]
) -> list[OmniResult]:
    """Run all prompts; one that fails fails alone. ``on_done`` is called after each. Cancelled, it aborts what runs."""
    batch = uuid.uuid4().hex[:12]
    results: dict[int, OmniResult] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        # All share one iterator: whoever is free takes the next prompt.
        for index, prompt in waiting:
            results[index] = await _run_one(omni, index, f"batch-{batch}-{index}", prompt, options)
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.max_concurrency, len(prompts))):
            group.create_task(work())
    return [results[index] for index in range(len(prompts))]


async def _run_one(omni: AsyncOmni, index: int, request_id: str, prompt: Any, options: BatchOptions) -> OmniResult:
    builder = ResultBuilder(index, request_id, prompt)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + options.timeout_s
    while True:
        try:
            left_s = max(0.001, deadline_s - loop.time())
            outputs = omni.generate(
                inputs_of(prompt),
                request_id=request_id,
                modalities=options.modalities,
                params=options.params,
                timeout_s=left_s,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    builder.add(output)
            return builder.result()
        except OverloadedError as error:
            pause_s = error.retry_after_s or _RETRY_S
            # Others may fill the hub's queues, too; a batch has time to wait for its turn.
            if not builder.is_empty or loop.time() + pause_s >= deadline_s:
                return builder.result(error)
            await asyncio.sleep(pause_s)
        except RequestError as error:
            return builder.result(error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one prompt, the others go on
            return builder.result(RequestError(f"{type(error).__name__}: {error}"))


def inputs_of(prompt: Any) -> Mapping[str, Any]:
    """What AsyncOmni takes, for a text, token ids, messages of a chat, or that itself. Raise InvalidRequestError."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and len(prompt):
        if all(type(item) is int for item in prompt):
            return {"prompt_token_ids": list(prompt)}
        if all(isinstance(item, Mapping) for item in prompt):
            return {"messages": [dict(item) for item in prompt]}
    raise InvalidRequestError(
        "a prompt is a text, a list of token ids, a list of chat messages, or a mapping with one of prompt, "
        f"prompt_token_ids and messages; this is {type(prompt).__name__} {prompt!r:.60}"
    )

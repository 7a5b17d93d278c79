"""vLLM's own API server over a mock engine core that steps as the echo engine does; a script for ``tokens_per_core``.

    PYTHON -m tests.bench.vllm_server_script MODEL PORT STEP_S

What runs is vLLM's ``run_server`` at its defaults: its HTTP server, its chats, its renderer, ``AsyncLLM``, its output
processor and its detokenizer. What does not: the engine core and the sockets to it. In its place every request gets the
next token of a fixed text in each step, handed over ready made in this process, so that vLLM is spared decoding it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient


class SteppingCore:
    """What ``AsyncLLM`` asks of its client of an engine core."""

    def __init__(self, step_s: float, token_id: int) -> None:
        self._step_s, self._token_id = step_s, token_id
        #: The tokens that each request has still to get.
        self._left: dict[str, int] = {}
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """It generates."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Begin a request."""
        self._left[request.request_id] = request.sampling_params.max_tokens

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Give requests up."""
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The tokens of the next step that has some."""
        while True:
            now_s = time.monotonic()
            await asyncio.sleep((now_s // self._step_s + 1) * self._step_s - now_s)
            if self._left:
                return EngineCoreOutputs(outputs=[self._next(each) for each in list(self._left)])

    def _next(self, request_id: str) -> EngineCoreOutput:
        self._left[request_id] -= 1
        reason = None
        if not self._left[request_id]:
            del self._left[request_id]
            reason = FinishReason.LENGTH
        return EngineCoreOutput(request_id, [self._token_id], finish_reason=reason)

    async def reset_mm_cache_async(self) -> None:
        """It has none."""

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing runs behind it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM asks its engine core for {name}, which this one has not")


def main(model: str, port: str, step_s: str) -> None:
    """Serve."""
    from tokenizers import Tokenizer

    token_id = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode("a", add_special_tokens=False).ids[0]
    core = SteppingCore(float(step_s), token_id)
    setattr(EngineCoreClient, "make_async_mp_client", staticmethod(lambda *_, **__: core))  # noqa: B010 - a method
    flags = ["--model", model, "--port", port, "--host", "127.0.0.1", "--served-model-name", "mock"]
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call, unused-ignore]
    uvloop.run(run_server(parser.parse_args([*flags, "--disable-uvicorn-access-log"])))


if __name__ == "__main__":
    main(*sys.argv[1:])

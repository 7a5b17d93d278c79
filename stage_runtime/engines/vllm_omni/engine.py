"""One stage of a vLLM-Omni pipeline, in the replica's own process and stepped by the thread that owns it.

vLLM-Omni's scheduler, model runner and models do the work; its connectors, coordinator and processes are not used. What
a stage hands to the next leaves as a hand-off of ours, whole, or in pieces where ``engine_args.async_chunk`` is true.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import links_of
from omni_discovery.wire import FailureKind
from stage_runtime.config import PayloadError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest
from stage_runtime.engines.client_threads import ClientThreads, work_of
from stage_runtime.engines.errors import error_of, failure_kind
from stage_runtime.engines.files import wav_of
from stage_runtime.engines.media.fetch import fetch_links
from stage_runtime.engines.media.items import has_items, take_items
from stage_runtime.engines.prompts import is_long
from stage_runtime.engines.tokens import BoundedTokenizer
from stage_runtime.engines.vllm.base import failed_output, scheduler_metrics
from stage_runtime.engines.vllm.load import check_model, usual_capacity
from stage_runtime.engines.vllm_omni.args import check_versions, split_args
from stage_runtime.engines.vllm_omni.handoff import (
    PayloadCheck,
    code_count,
    codes_of,
    is_terminal,
    pieces_of,
    read_payload,
    read_source,
    renamed,
)
from stage_runtime.engines.vllm_omni.load import LoadedStage, load_stage
from stage_runtime.engines.vllm_omni.mailbox import Sent
from stage_runtime.engines.vllm_omni.request import (
    Processing,
    check_inputs,
    check_length,
    first_prompt,
    first_request,
    later_request,
    read_params,
    read_processing,
    source_of,
)
from stage_runtime.engines.vllm_omni.talker import Talker, talker_of

logger = logging.getLogger(__name__)

#: How long the engine is stepped after something happened: vLLM-Omni's threads take some milliseconds to notice.
_GRACE_S: Final = 0.1
#: Longest wait, after the end of a request, for what it hands over: a thread brings it.
_HANDOFF_WAIT_S: Final = 10.0
#: A step without anything to run returns at once.
_IDLE_S: Final = 0.001
#: Tokens of an answer without which a thinker, handing over whole, has nothing to be spoken: the last is left out.
_LEAST_SPOKEN: Final = 2
#: Requests whose pictures, sound, videos and long texts are read at once; of one client, one less.
_READERS: Final = 4
#: How many pieces of one request may wait to be fetched.
_MOST_UNREAD: Final = 16
#: Requests for each place in a step, in a stage that turns pieces into sound as they come.
_FED_PER_PLACE: Final = 4


@dataclass(frozen=True, slots=True)
class _Read:
    """The input of a request in the pipeline's first stage, read: the request without its files, these, its prompt."""

    request: StageRequest
    items: Mapping[str, Any] | None
    prompt: dict[str, Any]


@dataclass(slots=True)
class _Run:
    """One request in the engine."""

    request: StageRequest
    #: Its name in vLLM: used once, unlike its key.
    name: str
    params: Any
    #: The prompt of the pipeline's first stage; empty until the first piece has come.
    prompt: Mapping[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    #: Its input, while pictures, sound, videos or a long text of it are read.
    reading: Future[_Read] | None = None
    #: How many payloads of the stage before it were given, and whether the last one was among them.
    given: int = 0
    has_all_input: bool = True
    #: Whether the stage before said that no more comes; until then the request does not end.
    has_heard_end: bool = True
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    samples: int = 0
    #: What it hands over, so far; and whether that is all.
    payloads: list[dict[str, Any]] = field(default_factory=list)
    has_all_payloads: bool = False
    #: Its last output, held back until all that it hands over is there; when that is given up.
    end: EngineOutput | None = None
    give_up_at_s: float = 0.0

    @property
    def hands_over(self) -> bool:
        return bool(self.request.next_stages)

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to be stepped for it; not while it waits for the stage before."""
        if self.reading is not None:
            return True
        return self.has_heard_end if self.end is not None else self.has_begun and self.has_all_input


class OmniStage:
    """See Engine. ``engine_args`` are described in ``args``."""

    def __init__(self, stage: StageConfig) -> None:
        self._stage = stage
        self._args, self._given = split_args(stage)
        check_versions(stage)
        check_model(stage)
        self._capacity = usual_capacity(self._given)
        self._loaded: LoadedStage | None = None
        self._tokenizer: BoundedTokenizer | None = None
        self._takes: PayloadCheck | None = None
        #: By the request's key, and the keys by vLLM's name.
        self._runs: dict[str, _Run] = {}
        self._keys: dict[str, str] = {}
        self._readers: ClientThreads | None = None
        self._names = itertools.count()
        self._due: list[EngineOutput] = []
        self._quiet_at_s = 0.0

    @property
    def capacity(self) -> int:
        """See Engine. ``max_num_seqs``, known exactly once the stage is loaded; more where pieces become sound.

        Such a stage works on a request for a moment and then waits for its next piece. vLLM-Omni's scheduler gives the
        place to another meanwhile, and the request keeps nothing on the device, no KV cache either. Would a request
        hold its place until its end, the later ones were silent while the device is idle.
        """
        return self._capacity

    @property
    def modality(self) -> str:
        """See Engine."""
        return "text" if self._stage.final_output == "none" else self._stage.final_output

    @property
    def deterministic(self) -> bool:
        """See DeterministicEngine."""
        return self._loaded is not None and self._loaded.is_deterministic

    def load(self, report: Report) -> None:
        """See Engine."""
        self._loaded = loaded = load_stage(self._stage, self._args, self._given, report)
        config = loaded.vllm_config
        self._capacity = int(config.scheduler_config.max_num_seqs)
        if self._args.async_chunk and config.model_config.worker_type == "generation":
            self._capacity *= _FED_PER_PLACE
        self._tokenizer = self._tokenizer_of(config)
        self._takes = _taken_by(loaded)
        #: See DescribedEngine.
        self.model_details = {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "revision": str(config.model_config.revision or ""),
        }

    @property
    def voices(self) -> list[str]:
        """See SpeakingEngine."""
        if self._loaded is None or not self._loaded.is_first:
            return []
        talker = getattr(self._loaded.hf_config, "talker_config", None)
        return sorted(getattr(talker, "spk_id", None) or ())

    def _tokenizer_of(self, config: Any) -> BoundedTokenizer | None:
        from vllm.tokenizers import cached_tokenizer_from_config

        if self._loaded is None or not self._loaded.is_first:
            return None
        tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
        return BoundedTokenizer(tokenizer, int(config.model_config.max_model_len))

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        loaded = self._ready()
        if request.key in self._runs:
            raise InvalidRequestError("the request is running already")
        run = _Run(request, f"r{next(self._names)}", read_params(request, loaded))
        self._runs[request.key], self._keys[run.name] = run, request.key
        try:
            self._take(run)
        except BaseException:
            # It may have begun: a place of vLLM's that nobody gives back is lost to all others.
            self._stop(run)
            raise
        self._note_activity()

    def _take(self, run: _Run) -> None:
        """Begin a request, have its input read, or wait for its first piece. Raise what ``add`` raises."""
        loaded, request = self._ready(), run.request
        if loaded.is_first:
            check_inputs(request, loaded)
            processing = read_processing(request.inputs)
            has_files = has_items(request.inputs) or processing.use_audio_in_video
            if has_files or is_long(request.inputs):
                # In a thread: the other requests go on meanwhile.
                with work_of(request.client):
                    run.reading = self._reader().submit(self._read, request, processing, has_files=has_files)
            else:
                self._begin_first(run, _Read(request, None, first_prompt(request, loaded, self._tokenizer, None)))
        elif request.stream_from:
            if not self._args.async_chunk:
                raise InvalidRequestError("the hand-off comes in pieces: this stage's engine_args.async_chunk is false")
            run.has_all_input = run.has_heard_end = False
        else:
            self._give_whole(run)

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """See PieceEngine. The last piece says so itself; the end that is announced behind it brings nothing."""
        run = self._runs.get(key)
        if run is None:
            return
        if piece is not None and run.end is None:
            with _blaming(from_stage):
                payload = read_payload(piece, self._takes, is_first=not run.given)
            self._give(run, from_stage, piece, payload)
        # One that is done, as a talker at its last token, wants no more of what still comes.
        if is_last and not run.has_all_input and run.end is None:
            raise InvalidRequestError(f"the hand-off of stage {from_stage} ended before its last piece")
        run.has_heard_end = run.has_heard_end or is_last
        self._note_activity()

    def wants(self, key: str, from_stage: int) -> bool:
        """See PieceEngine."""
        del from_stage
        run = self._runs.get(key)
        return run is None or self._ready().mailbox.unread(run.name) < _MOST_UNREAD

    def abort(self, key: str) -> None:
        """See Engine."""
        run = self._runs.get(key)
        if run is not None:
            self._stop(run)
            self._due.append(EngineOutput(key, finish_reason="abort", usage=_usage(run)))

    def has_unfinished(self) -> bool:
        """See Engine."""
        if self._due or any(run.is_busy for run in self._runs.values()):
            return True
        loaded = self._loaded
        if loaded is None:
            return False
        is_recent = time.monotonic() < self._quiet_at_s
        return loaded.mailbox.has_unread or (is_recent and bool(loaded.core.scheduler.has_requests()))

    def step(self) -> list[EngineOutput]:
        """See Engine. One step of vLLM's, and what its threads have brought since the last one."""
        loaded = self._ready()
        outputs, self._due = self._due, []
        outputs += self._begin_those_read()
        ran = False
        if loaded.core.scheduler.has_requests():
            made, ran = loaded.core.step_fn()
            loaded.core.post_step(model_executed=ran)
            outputs += self._read_outputs(made)
        for sent in loaded.mailbox.sent():
            run = self._runs.get(self._keys.get(sent.name, ""))
            if run is not None and run.hands_over:
                outputs += self._guarded(run, partial(self._hand_on, run, sent))
        outputs += self._held_ends()
        if ran or outputs:
            self._note_activity()
        else:
            time.sleep(_IDLE_S)
        return outputs

    def metrics(self) -> Mapping[str, float]:
        """See MeasuredEngine."""
        return {} if self._loaded is None else scheduler_metrics(self._loaded.core.scheduler)

    def close(self) -> None:
        """See Engine."""
        loaded, self._loaded = self._loaded, None
        self._runs.clear()
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        if loaded is not None:
            loaded.close()

    def _ready(self) -> LoadedStage:
        if self._loaded is None:
            raise RuntimeError("the stage is not loaded")
        return self._loaded

    def _note_activity(self) -> None:
        self._quiet_at_s = time.monotonic() + _GRACE_S

    # ---- input

    def _reader(self) -> ClientThreads:
        if self._readers is None:
            self._readers = ClientThreads(_READERS, "items")
        return self._readers

    def _read(self, request: StageRequest, processing: Processing, *, has_files: bool) -> _Read:
        """Read an input, in any thread. Raise InvalidRequestError."""
        loaded, items = self._ready(), None
        if has_files:
            fetched = fetch_links(request.inputs, links_of(self._stage.engine, self._stage.engine_args))
            inputs, items = take_items(fetched, loaded.item_kinds, with_sound=processing.use_audio_in_video)
            request = replace(request, inputs=inputs)
        return _Read(request, items, first_prompt(request, loaded, self._tokenizer, items))

    def _begin_those_read(self) -> Iterator[EngineOutput]:
        """Begin the requests whose input is read; put out the ends of those that are bad."""
        reading = [(run, run.reading) for run in self._runs.values() if run.reading is not None]
        for run, future in reading:
            if not future.done():
                continue
            run.reading = None
            try:
                self._begin_first(run, future.result())
            except Exception as error:
                # The engine is not in a step, so the other requests in it are unharmed.
                if failure_kind(error) is FailureKind.ENGINE:
                    logger.exception("engine.add_failed request=%s", run.request.request_id)
                self._stop(run)
                yield EngineOutput(run.request.key, error=error_of(error))

    def _begin_first(self, run: _Run, read: _Read) -> None:
        """Begin a request in the pipeline's first stage. Raise InvalidRequestError."""
        loaded, prompt = self._ready(), read.prompt
        run.request = read.request
        with_items = dict(prompt)
        if read.items:
            with_items["multi_modal_data"] = dict(read.items)
            with_items["mm_processor_kwargs"] = msgspec.structs.asdict(read_processing(run.request.inputs))
        made = first_request(run.name, with_items, run.params, loaded, hands_over=run.hands_over)
        # The next stage has a place for each of the thinker's, those of pictures and sound too.
        run.prompt = {**prompt, "prompt_token_ids": list(made.prompt_token_ids)}
        check_length(len(made.prompt_token_ids), loaded)
        self._begin(run, made)

    def _give_whole(self, run: _Run) -> None:
        """Give a run the hand-off of the stage before, whole or in pieces that were collected."""
        if len(run.request.payloads) != 1:
            stages = ", ".join(map(str, run.request.payloads)) or "none"
            raise InvalidRequestError(f"this stage takes the hand-off of one stage; it got {stages}")
        ((from_stage, handed),) = run.request.payloads.items()
        with _blaming(from_stage):
            pieces = pieces_of(handed)
        if len(pieces) > 1 and not self._args.async_chunk:
            raise InvalidRequestError("the hand-off is in pieces: this stage's engine_args.async_chunk is false")
        # All of it is checked first: what is refused must not have begun.
        with _blaming(from_stage):
            payloads = [read_payload(piece, self._takes, is_first=not at) for at, piece in enumerate(pieces)]
        if self._args.async_chunk and not is_terminal(payloads[-1]):
            raise InvalidRequestError("the hand-off's last piece is missing, or it is of a stage without async_chunk")
        for piece, payload in zip(pieces, payloads, strict=True):
            self._give(run, from_stage, piece, payload)

    def _give(self, run: _Run, from_stage: int, handed: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        """Give a run a hand-off, or a piece of one, and the payload that was read in it."""
        loaded = self._ready()
        made = None
        with _blaming(from_stage):
            source = None if run.has_begun else read_source(handed)
            if isinstance(self._takes, Talker):
                payload = self._takes.fitted(payload, loaded.vllm_config.model_config.dtype)
                if source is not None:
                    self._takes.check_prompt(source.prompt_token_ids)
        if source is not None:
            run.prompt = source.prompt()
            with _blaming(from_stage, also=Exception):
                made = later_request(run.name, source, run.params, loaded, in_pieces=self._args.async_chunk)
            check_length(len(made.prompt_token_ids), loaded)
        check_length(max(1, code_count(payload)), loaded)
        try:
            loaded.mailbox.offer(run.name, from_stage, run.given, renamed(payload, run.name))
        except (TypeError, RecursionError) as error:
            raise PayloadError(f"the hand-off's payload: {error}", from_stage) from error
        run.given += 1
        run.has_all_input = run.has_all_input or is_terminal(payload)
        if made is not None:
            self._begin(run, made)

    def _begin(self, run: _Run, made: Any) -> None:
        loaded = self._ready()
        made.request_id = made.external_req_id = run.name
        # From here on it has to be ended in vLLM, too.
        run.has_begun = True
        loaded.processor.add_request(request=made, prompt=None, parent_req=None, request_index=0, queue=None)
        request, wave = loaded.core.preprocess_add_request(made)
        # vLLM's own request has no room for these, and vLLM-Omni reads them from it.
        request.additional_information = made.additional_information
        request.external_req_id, request.payload_sender_info = run.name, None
        loaded.core.add_request(request, wave)

    # ---- output

    def _read_outputs(self, made: Any) -> Iterator[EngineOutput]:
        for each in (made or {}).values():
            # One by one: what can't be read ends its own request.
            for raw in each.outputs:
                run = self._runs.get(self._keys.get(raw.request_id, ""))
                if run is not None:
                    yield from self._guarded(run, partial(self._read_raw, run, raw))

    def _read_raw(self, run: _Run, raw: Any) -> Iterator[EngineOutput]:
        for output in self._ready().processor.process_outputs([raw], time.time(), None).request_outputs:
            said = None if run.end is not None else self._read_output(run, output)
            if said is not None:
                yield said

    def _guarded(self, run: _Run, read: Callable[[], Iterable[EngineOutput]]) -> Iterator[EngineOutput]:
        """What is read of a request outside of a step of vLLM's; its end by an error if that fails.

        vLLM is done with its step, so the other requests are unharmed.
        """
        try:
            yield from list(read())
        except Exception as error:
            logger.exception("engine.output_failed request=%s", run.request.request_id)
            self._stop(run)
            yield failed_output(run.request.key, error)

    def _read_output(self, run: _Run, output: Any) -> EngineOutput | None:
        """What one output of vLLM's adds to a request's answer; None for nothing."""
        made, key = output.outputs[0], run.request.key
        run.token_ids += made.token_ids
        run.texts.append(made.text or "")
        sound = self._sound_of(run, made) if self.modality == "audio" else None
        is_shown = self._stage.final_output == "text"
        text, token_ids = (made.text or "", tuple(made.token_ids)) if is_shown else ("", ())
        if not output.finished:
            return EngineOutput(key, text=text, token_ids=token_ids, audio_wav=sound) if sound or token_ids else None
        if made.finish_reason == "error":
            self._stop(run)
            return EngineOutput(key, error=(FailureKind.ENGINE, str(made.stop_reason or "vLLM-Omni gave no reason")))
        if self.modality == "audio" and not run.samples:
            self._stop(run)
            return EngineOutput(key, error=(FailureKind.ENGINE, "the codes made no sound"))
        end = EngineOutput(
            key,
            text=text,
            token_ids=token_ids,
            audio_wav=sound,
            finish_reason=made.finish_reason or "stop",
            usage=_usage(run),
        )
        if run.has_heard_end and not run.hands_over:
            self._forget(run)
            return end
        run.end, run.give_up_at_s = end, time.monotonic() + _HANDOFF_WAIT_S
        return None

    def _sound_of(self, run: _Run, made: Any) -> bytes | None:
        """The new samples of an output as a WAV file. Raise ValueError for sound that is none."""
        import torch

        held: Any = getattr(made, "multimodal_output", None) or {}
        audio = held.get("audio")
        if audio is None:
            return None
        parts = audio if isinstance(audio, list | tuple) else [audio]
        samples = torch.cat([part.reshape(-1).float() for part in parts])
        if not samples.numel():
            return None
        run.samples += samples.numel()
        rate = held.get("sr")
        while isinstance(rate, list | tuple):
            rate = rate[-1]
        return wav_of(samples, self._args.sample_rate_hz if rate is None else int(rate))

    def _hand_on(self, run: _Run, sent: Sent) -> Iterator[EngineOutput]:
        """Take a payload for the next stage; put it out at once where it goes in pieces."""
        key = run.request.key
        if sent.flaw:
            self._stop(run)
            yield EngineOutput(key, error=(FailureKind.ENGINE, f"a payload can't be handed over: {sent.flaw}"))
            return
        handed = {"payload": sent.payload}
        if not self._args.async_chunk:
            run.payloads, run.has_all_payloads = [handed], True
            return
        if not sent.number:
            handed["source"] = source_of(run.prompt)
        run.has_all_payloads = is_terminal(sent.payload)
        if set(run.request.next_stages) - set(run.request.stream_to):
            run.payloads.append(handed)
        if run.request.stream_to:
            yield EngineOutput(key, handoff_piece=handed)

    def _held_ends(self) -> Iterator[EngineOutput]:
        """The ends of requests whose input has ended and whose hand-off has come, or did not in time."""
        now_s = time.monotonic()
        for run in list(self._runs.values()):
            if run.end is None or not run.has_heard_end:
                continue
            if run.has_all_payloads or not run.hands_over or self._is_unspoken(run):
                yield from self._guarded(run, partial(self._ended, run, run.end))
            elif now_s >= run.give_up_at_s:
                self._stop(run)
                reason = f"vLLM-Omni made nothing to hand over within {_HANDOFF_WAIT_S:g} s of the request's end"
                yield EngineOutput(run.request.key, error=(FailureKind.ENGINE, reason))

    def _ended(self, run: _Run, end: EngineOutput) -> Iterator[EngineOutput]:
        handoff = self._handoff_of(run)
        self._forget(run)
        yield replace(end, handoff=handoff)

    def _is_unspoken(self, run: _Run) -> bool:
        """Whether an answer is so short that the talker would trip over it: the stages after it have nothing to do."""
        is_thinker = self._ready().metadata.model_stage == "thinker"
        return is_thinker and not self._args.async_chunk and len(run.token_ids) < _LEAST_SPOKEN

    def _handoff_of(self, run: _Run) -> Mapping[str, Any] | None:
        if not run.payloads or self._is_unspoken(run):
            return None
        if self._args.async_chunk:
            return {"pieces": run.payloads}
        source = source_of(run.prompt, run.token_ids, "".join(run.texts))
        return {**run.payloads[0], "source": source}

    # ---- the end

    def _stop(self, run: _Run) -> None:
        """End a request in vLLM, and forget it."""
        loaded = self._ready()
        if run.reading is not None:
            run.reading.cancel()
        if run.has_begun:
            loaded.core.abort_requests([run.name])
            loaded.processor.abort_requests([run.name], internal=True)
        self._forget(run)
        self._note_activity()

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run.request.key, None)
        self._keys.pop(run.name, None)
        self._ready().mailbox.forget(run.name)


@contextmanager
def _blaming(from_stage: int, also: type[Exception] = InvalidRequestError) -> Iterator[None]:
    """Raise what is wrong with a hand-off as PayloadError: it is its producer's fault, not the client's nor ours."""
    try:
        yield
    except (InvalidRequestError, also) as error:
        raise PayloadError(str(error), from_stage) from error


def _taken_by(loaded: LoadedStage) -> PayloadCheck | None:
    """What the stage takes of the one before it; None for one without, or of which nothing is known."""
    if loaded.is_first:
        return None
    if loaded.metadata.model_stage == "talker":
        return talker_of(loaded.kind, loaded.hf_config)
    longest = int(loaded.vllm_config.model_config.max_model_len)
    return codes_of(loaded.metadata.model_stage, loaded.hf_config, most=longest)


def _usage(run: _Run) -> dict[str, int]:
    return {"prompt_tokens": len(run.prompt.get("prompt_token_ids", ())), "completion_tokens": len(run.token_ids)}

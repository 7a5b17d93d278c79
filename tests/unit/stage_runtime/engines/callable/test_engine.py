"""The torch engine: what may be called, what it is told, what becomes of its output, and whose failure is whose."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engine_loop.jobs import Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest, create_engine
from stage_runtime.engines.callable.engine import TorchEngine
from stage_runtime.engines.files import wav_of
from stage_runtime.lifecycle import stalled
from stage_runtime.replica.identity import model_details
from tests.support import callables
from tests.support.engines import run


def engine(name: str, final_output: Any = "text", model: str = "", **args: Any) -> TorchEngine:
    """The engine around one of tests/support/callables.py, loaded."""
    target = {"target": f"tests.support.callables:{name}"}
    stage = StageConfig(
        stage_id=3, engine="torch", model=model, engine_args={**target, **args}, final_output=final_output
    )
    made = create_engine(stage)
    assert isinstance(made, TorchEngine)
    made.load(lambda _phase, _progress: None)
    return made


def ask(key: str = "k", prompt: str = "a b c", /, **more: Any) -> StageRequest:
    return StageRequest(key, key, **{"inputs": {"prompt": prompt}, **more})


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


def ends_of(said: dict[str, list[EngineOutput]]) -> dict[str, str]:
    return {key: outputs[-1].error[1] if outputs[-1].error else text_of(outputs) for key, outputs in said.items()}


class TestTarget:
    """What the operator names."""

    @pytest.mark.parametrize(
        ("name", "kwargs", "said"),
        [
            ("Greeter", {"greeting": "hi"}, "hi, you"),
            ("make_greeter", {"greeting": "oh"}, "oh, you"),
            ("ready_made", None, "good day, you"),
            ("ready_made.__call__", None, "good day, you"),
        ],
    )
    def test_a_class_a_factory_an_instance_or_a_method_does_the_work(self, name: str, kwargs: Any, said: str) -> None:
        made = engine(name, **({} if kwargs is None else {"kwargs": kwargs}))
        assert text_of(run(made, ask("k", "you"))["k"]) == said

    def test_a_module_is_put_on_its_device_for_evaluation_and_told_of_device_and_model(self) -> None:
        made = engine("Doubler", "none", model="a/folder", device="cpu", kwargs={"factor": 3.0})
        module: Any = made._loaded.call
        assert (module.told_device, module.told_model, module.training) == ("cpu", "a/folder", False)
        request = ask(inputs={}, payloads={0: {"tensor": np.ones(2, np.float32)}}, next_stages=(1,))
        handoff = run(made, request)["k"][-1].handoff
        assert handoff is not None
        assert handoff["tensor"].tolist() == [3.0, 3.0]

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("os.system", "is no name like 'package.module:name'"),
            ("no.such.module:f", "can't be imported: No module named 'no'.*PYTHONPATH"),
            ("tests.support.callables:nothing", "there is no 'nothing' in tests.support.callables"),
            ("tests.support.callables:NO_CALLABLE", "can't be called"),
            ("tests.support.callables:untyped", "annotated 'YourInput'"),
            ("tests.support.callables:two", "needs 2 parameters"),
            ("tests.support.callables:later", "is asynchronous.*give its input a field pieces: AsyncIterator"),
            ("tests.support.callables:no_generator", "write it as 'async def' with 'async for piece in"),
            ("tests.support.callables:Greeter", "kwargs do not fit .*'greeting'"),
        ],
    )
    def test_a_target_that_can_t_be_used_is_the_operators(self, target: str, said: str) -> None:
        with pytest.raises(ConfigError, match=f"stage 0: engine_args.*{said}"):
            create_engine(StageConfig(stage_id=0, engine="torch", engine_args={"target": target})).load(
                lambda _phase, _progress: None
            )

    def test_whether_the_target_is_there_can_be_asked_without_building_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no licence')")
        for target, said in (
            ("tests.support.callables:nope", "there is no 'nope' in"),
            ("breaks_at_import:f", "can't be imported: RuntimeError: no licence"),
            ("os:sep", "is of type str, which can't be called"),
            ("os.path:join", "give it one parameter"),
            ("tests.support.callables:Greeter", "kwargs do not fit .*'greeting'"),
        ):
            made = TorchEngine(StageConfig(stage_id=0, engine="torch", engine_args={"target": target}))
            with pytest.raises(ConfigError, match=said):
                made.check()
        for name in ("Greeter", "make_greeter"):
            args = {"target": f"tests.support.callables:{name}", "kwargs": {"greeting": "hello"}}
            TorchEngine(StageConfig(stage_id=0, engine="torch", engine_args=args)).check()

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({"batch": True}, r"annotated 'list\[YourInput\]'"),
            ({"device": "cuda"}, "sees no GPU here"),
            ({"device": "abacus"}, "engine_args.device"),
            ({"kwargs": {"no": 1}}, "do not fit"),
            ({"capacity": 0}, "capacity"),
            ({"colour": "red"}, "colour"),
        ],
    )
    def test_arguments_that_do_not_fit_are_named(
        self, args: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=said):
            engine("echo", **args)

    def test_the_record_says_which_code_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two replicas whose module differs by a line are not the same."""
        monkeypatch.syspath_prepend(str(tmp_path))
        said = []
        for number in (1, 2):
            lines = ("from tests.support.callables import Words", "def f(said: Words):", f"    return {number} * 'x'")
            (tmp_path / f"told{number}.py").write_text("\n".join(lines))
            target = f"told{number}:f"
            made = create_engine(StageConfig(stage_id=0, engine="torch", engine_args={"target": target}))
            made.load(lambda _phase, _progress: None)
            said.append(model_details("", made)["code"].partition(";")[0].removeprefix(f"{target}+"))
        assert len(set(said)) == 2
        assert all(re.fullmatch("[0-9a-f]{8}", each) for each in said)

    def test_a_callable_without_torch_needs_no_torch(self) -> None:
        """In a process of its own, in which torch can't be imported."""
        code = (
            "import sys, types, msgspec\n"
            "sys.modules['torch'] = None\n"
            "class In(msgspec.Struct):\n    prompt: str\n"
            "def up(given: In) -> str:\n    return given.prompt.upper()\n"
            "module = types.ModuleType('mine'); module.up = up; sys.modules['mine'] = module\n"
            "from omni_discovery.deploy.document import StageConfig\n"
            "from stage_runtime.engines.base import StageRequest, create_engine\n"
            "stage = StageConfig(stage_id=0, engine='torch', engine_args={'target': 'mine:up'}, final_output='text')\n"
            "engine = create_engine(stage); engine.load(lambda p, s: None)\n"
            "engine.add(StageRequest('k', 'k', inputs={'prompt': 'hi'}))\n"
            "print(engine.step()[0].text)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "HI\n", done.stderr


class TestInput:
    """What the callable is told, and what is refused at the door."""

    def test_fields_come_from_params_inputs_and_hand_offs_in_the_types_they_have(self) -> None:
        """Arrays are made of what comes, lists of arrays, and a struct within is checked, too."""
        request = ask(
            params={"nested": {"seed": 1, "size": 9}, "prompt": "overruled"},
            payloads={0: {"numbers": torch.tensor([1, 2]), "array": [0.5], "tensor": np.zeros(2), "more": "ignored"}},
        )
        assert text_of(run(engine("repeat_told"), request)["k"]) == "a b c [1, 2] 9 array tensor"

    def test_the_prompt_of_a_chat_is_its_last_message(self) -> None:
        for content in ("you", [{"type": "text", "text": "y"}, {"type": "text", "text": "ou"}]):
            request = ask(
                inputs={"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": content}]}
            )
            assert text_of(run(engine("ready_made"), request)["k"]) == "good day, you"

    def test_a_seed_is_passed_and_without_one_every_attempt_has_the_same(self) -> None:
        made = engine("hum", "audio")

        def hum(key: str, request_id: str, **params: Any) -> list[bytes | None]:
            said = run(made, StageRequest(key, request_id, params=params))[key]
            return [output.audio_wav for output in said if output.audio_wav]

        assert hum("a", "r") == hum("b", "r") != hum("c", "other")
        assert hum("d", "r", seed=7) == hum("e", "other", seed=7) != hum("f", "r", seed=8)

    def test_a_seed_for_a_callable_that_draws_no_lots_is_fine(self) -> None:
        assert text_of(run(engine("ready_made"), ask("k", "you", params={"seed": 4}))["k"]) == "good day, you"

    @pytest.mark.parametrize(
        ("name", "request_args", "said"),
        [
            ("repeat_told", {"inputs": {}}, "prompt: it is missing"),
            ("repeat_told", {"inputs": {"prompt": 5}}, "prompt: Expected 'str', got 'int'"),
            ("repeat_told", {"params": {"numbers": ["x"]}}, r"numbers\[.*\]: Expected 'int'"),
            ("repeat_told", {"params": {"nested": {}}}, "nested.seed: it is missing"),
            ("repeat_told", {"params": {"colour": 1}}, "'colour' is not known"),
            ("repeat_told", {"params": {"tensor": "x"}}, "tensor: expected numbers, got str"),
            ("repeat_told", {"params": {"tensor": [[1], [1, 2]]}}, "tensor: "),
            ("repeat_told", {"params": {"array": ["x"]}}, "array: expected numbers"),
            ("repeat_told", {"payloads": {0: {"numbers": 1}}}, r"numbers \(handed over by a stage before\): Expected"),
            ("ready_made", {"payloads": {0: {"pieces": [{}, {}]}}}, "pieces: the hand-off came in 2"),
            ("ready_made", {"inputs": {"messages": []}}, "prompt: Expected 'str', got 'null'"),
        ],
    )
    def test_what_does_not_fit_is_refused_by_the_name_of_its_field(
        self, name: str, request_args: dict[str, Any], said: str
    ) -> None:
        made = engine(name)
        with pytest.raises(InvalidRequestError, match=f"^(the parameter )?{said}"):
            made.add(ask(**request_args))
        assert not made.has_unfinished()

    def test_pieces_payloads_and_companions_can_be_asked_for(self) -> None:
        made = engine("count_pieces")
        assert made.takes_companions
        assert not engine("echo").takes_companions
        request = ask(
            inputs={}, payloads={0: {"pieces": [{}, {}]}, 1: {"x": 1}}, companions={"negative": {0: {"x": 1}}}
        )
        assert text_of(run(made, request)["k"]) == "2 pieces, 2 payloads, ['negative']"
        one_piece = ask(inputs={}, payloads={0: {"pieces": [{"text": "w"}]}})
        assert text_of(run(engine("echo"), one_piece)["k"]) == "w"


class TestOutput:
    """What comes out."""

    def test_a_tuple_is_shown_and_handed_over_at_once(self) -> None:
        (output,) = run(engine("echo"), ask(next_stages=(1,), params={"repeat": 2}))["k"]
        assert (output.text, output.handoff, output.finish_reason) == ("a b ca b c", {"text": "a b ca b c"}, "stop")
        assert run(engine("echo"), ask())["k"][-1].handoff is None

    def test_a_generator_shows_and_hands_over_piece_by_piece(self) -> None:
        """Who takes pieces gets each at once, the others all of them at the end."""
        said = run(engine("speak"), ask(next_stages=(1, 2), stream_to=(1,)))["k"]
        assert [output.text for output in said if output.text] == ["a ", "b ", "c "]
        assert [output.handoff_piece["text"] for output in said if output.handoff_piece] == ["a ", "b ", "c "]
        assert said[-1].handoff == {"pieces": [{"text": "a "}, {"text": "b "}, {"text": "c "}]}
        only_pieces = run(engine("speak"), ask(next_stages=(1,), stream_to=(1,)))["k"]
        assert only_pieces[-1].handoff is None

    def test_a_picture_is_a_png(self) -> None:
        (output,) = run(engine("paint", "image"), ask(inputs={}))["k"]
        assert output.image_png is not None
        assert Image.open(io.BytesIO(output.image_png)).size == (4, 4)

    def test_sound_is_a_wav_of_the_stages_rate(self) -> None:
        outputs = run(engine("hum", "audio", sample_rate_hz=8000), ask(inputs={}))["k"]
        files = [output.audio_wav for output in outputs if output.audio_wav]
        assert len(files) == 2
        with wave.open(io.BytesIO(files[0])) as reader:
            assert (reader.getframerate(), reader.getnchannels(), reader.getnframes()) == (8000, 1, 4)

    def test_samples_are_clipped_and_what_is_no_row_of_numbers_is_refused(self) -> None:
        with wave.open(io.BytesIO(wav_of(torch.tensor([0.0, 5.0, -5.0], dtype=torch.bfloat16), 8000))) as reader:
            assert np.frombuffer(reader.readframes(3), "<i2").tolist() == [0, 32767, -32767]
        for wrong in (np.zeros((2, 2)), np.zeros(2, np.int16), np.array([np.nan])):
            with pytest.raises(ValueError, match="sound"):
                wav_of(wrong, 8000)

    @pytest.mark.parametrize(
        ("shows", "prompt", "said"),
        [
            ("text", "list", "a list can't be put out; return a str, and a mapping to hand over"),
            ("text", "int", "a int can't be put out"),
            ("image", "bytes", "no PNG, WAV or MP4 file"),
            ("image", "text", "a str came out of a stage with final_output: image; return a PIL image"),
            ("video", "text", "a str came out of a stage with final_output: video; return bytes of shape (frames,"),
            ("none", "text", "final_output: none; return a mapping to hand over"),
        ],
    )
    def test_what_can_t_be_put_out_fails_its_request_and_says_what_can(
        self, shows: str, prompt: str, said: str
    ) -> None:
        (output,) = run(engine("give", shows), ask("k", prompt))["k"]
        assert output.error is not None
        assert said in output.error[1]


class TestFailures:
    """Whose failure is whose."""

    def test_what_user_code_raises_fails_its_request_only(self) -> None:
        """1. before the first piece; 2. between two; 3. a sys.exit; each with another request beside it."""
        failing = ask("bad", params={"fail": True})
        assert ends_of(run(engine("echo", capacity=2), failing, ask("good"))) == {
            "bad": "RuntimeError: it was told to fail",
            "good": "a b c",
        }
        said = run(engine("speak", capacity=2), ask("bad", "a FAIL c"), ask("good"))
        assert ends_of(said) == {"bad": "RuntimeError: it was told to fail", "good": "a b c "}
        assert said["bad"][0].text == "a "
        assert ends_of(run(engine("leave"), ask("k", "5"))) == {"k": "SystemExit: 5"}

    def test_memory_that_runs_out_fails_the_request_and_the_next_is_served(self) -> None:
        made = engine("Doubler", "none")
        too_large = ask("bad", inputs={}, payloads={0: {"tensor": []}})
        fits = ask("good", inputs={}, payloads={0: {"tensor": [1.0]}}, next_stages=(1,))
        said = run(made, too_large, fits)
        assert said["bad"][-1].error == (FailureKind.ENGINE, "OutOfMemoryError: out of memory")
        assert said["good"][-1].handoff is not None

    def test_a_device_that_is_lost_ends_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing behind a failed kernel works any more, whoever asks: only a new process can."""

        def lost() -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        made = engine("echo")
        made._target = replace(made._loaded, device="cuda:0")
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        made.add(ask(params={"fail": True}))
        with pytest.raises(RuntimeError, match="device-side assert"):
            made.step()

    def test_a_call_that_stands_still_is_seen_by_the_stall_verdict(self) -> None:
        """1. the call never ends; 2. the loop is busy and shows no progress; 3. it goes on: the request ends."""
        callables.GO_ON.clear()
        outcomes: list[Any] = []
        clock = [100.0]
        loop = EngineLoop(engine("stuck"), Payloads(0, {}, lambda: 0.0), {}, outcomes.extend, lambda: clock[0])
        work = Work("k", "h/k", "k", 0, {"prompt": "x"}, {}, (), (), 100.0, float("inf"))
        loop.jobs.put(work)
        thread = threading.Thread(target=loop.turn)
        assert not loop.progress.busy
        thread.start()
        try:
            while thread.is_alive() and not loop.progress.busy:
                time.sleep(0.01)
            clock[0] = 131.0
            assert stalled(loop.progress.busy, clock[0], loop.progress.at_s, 30.0)
        finally:
            callables.GO_ON.set()
            thread.join()
        assert [type(outcome).__name__ for outcome in outcomes] == ["OutputChunk", "Finished"]


class TestTurns:
    """Who works when."""

    def test_generators_take_turns_and_are_closed_where_they_are_cancelled(self) -> None:
        made, callables.SEEN[:] = engine("speak", capacity=2), []
        for key in ("a", "b", "c"):
            made.add(ask(key, "1 2 3 4 5"))
        said = [output.key for _ in range(6) for output in made.step()]
        assert said[:2] == ["a", "b"]
        assert "c" not in said
        made.abort("a")
        made.abort("c")
        assert [output.key for output in made.step() if output.finish_reason == "abort"] == ["a", "c"]
        assert callables.SEEN == ["begun", "begun", "closed"]
        made.close()
        assert callables.SEEN[-1] == "closed"
        assert not made.has_unfinished()

    def test_a_batch_has_all_that_is_there_up_to_the_capacity(self) -> None:
        made, callables.SEEN[:] = engine("shout", batch=True, capacity=2), []
        said = run(made, *(ask(key, key) for key in ("a", "b", "c")))
        assert ends_of(said) == {"a": "A", "b": "B", "c": "C"}
        assert callables.SEEN == ["batch of 2", "batch of 1"]

    def test_one_that_fails_a_batch_is_found_and_fails_alone(self) -> None:
        made = engine("shout", batch=True, capacity=3)
        said = run(made, ask("a", "a"), ask("bad", "FAIL"), ask("own", "ALONE"))
        assert ends_of(said) == {"a": "A", "bad": "RuntimeError: it was told to fail", "own": "ValueError: alone"}

    def test_a_batch_with_too_few_results_fails_with_both_numbers(self) -> None:
        said = run(engine("short_batch", batch=True, capacity=2), ask("a"), ask("b"))
        assert ends_of(said) == {"a": "one", "b": "one"}
        made = engine("give", batch=False)
        assert ends_of(run(made, ask("k", "list")))["k"].startswith("TypeError")

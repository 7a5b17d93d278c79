"""The demo of speech: `make omni-demo`, or ``python -m stage_runtime.demo.speech --model FOLDER --omni-python PATH``.

Serves a Qwen3-TTS by vLLM-Omni's own deploy file and stages, has it speak, kills the replica that makes the sound while
it is heard, and compares the samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import wave
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.console import Console

from omni_discovery.commands.output import say
from omni_discovery.commands.registry import user_runtime_dir
from omni_discovery.errors import ConfigError, OmniError
from stage_runtime.demo.http_client import DemoError, Sound, listen
from stage_runtime.demo.pipeline import DemoConfig, DemoPipeline, make_output

if TYPE_CHECKING:
    from types import FrameType

DEPLOY: Final = Path(__file__).with_name("speech.yaml")
_TEXT: Final = "hello world, the quick brown fox jumps over the lazy dog"
#: 159 frames of sound, 12.7 seconds.
_PARAMS: Final[tuple[dict[str, Any], ...]] = ({"max_tokens": 160, "seed": 7, "language": "English"}, {})
_REPLICAS: Final = 4
_DECODER: Final = 1
#: The piece at which the decoder is killed.
_KILLED_AT: Final = 4
#: The request may have been with the other decoder.
_MOST_KILLS: Final = 6
_RESTART_S: Final = 120.0


def run_speech(config: DemoConfig, model: Path, omni_python: str, speaker: str) -> int:
    """Run the demo; return the exit code. Raise ConfigError for what is given wrong, DemoError for what fails later."""
    console = Console(highlight=False)
    if not (model / "config.json").exists():
        raise ConfigError(f"--model {model} is no model's folder: 'make omni-demo' makes one and gives it")
    make_output(config.output)
    with ExitStack() as stack:
        demo = _Speech(config, console, stack, model, omni_python, speaker)
        demo.start("[bold]omni demo of speech[/] · Qwen3-TTS by vLLM-Omni: two talkers, two decoders")
        stack.callback(demo.stop)
        console.print(
            "[dim]The weights are tiny and random, so what it says is noise; all else is as with the real model.[/]"
        )
        demo.wait_until_ready("asking vLLM-Omni which stages the model has; importing it takes up to a minute")
        expected = demo.speak()
        demo.lose_a_decoder(expected)
        if config.keep:
            demo.keep_serving()
    return 0


class _Speech(DemoPipeline):
    """One run of it."""

    question: ClassVar[str] = "hello"

    def __init__(
        self, config: DemoConfig, console: Console, stack: ExitStack, model: Path, omni_python: str, speaker: str
    ) -> None:
        flags = (str(model), "--omni", "--omni-python", omni_python, "--deploy-config", str(DEPLOY))
        super().__init__(config, console, stack, flags, _REPLICAS)
        self._params = ({**_PARAMS[0], "speaker": speaker}, *_PARAMS[1:])

    def first_step(self) -> str:
        """See DemoPipeline."""
        body = {"messages": [{"role": "user", "content": "hello"}], "sampling_params_list": list(self._params)}
        decode = 'import base64, json, sys; a = json.load(sys.stdin)["choices"][0]["message"]["audio"]["data"]'
        return (
            f"curl -s {self._url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"  -d '{json.dumps(body)}' \\\n"
            f"  | python3 -c '{decode}; sys.stdout.buffer.write(base64.b64decode(a))' > hello.wav"
        )

    def speak(self) -> Sound:
        """Have the text spoken twice, and save it. Raise DemoError if it is not the same sound twice."""
        sound = listen(self._url, _TEXT, self._params)
        if listen(self._url, _TEXT, self._params).samples != sound.samples:
            raise DemoError(f"the same request made another sound; {self._log_end()}")
        path = self._config.output / "speech.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sound.rate_hz)
            file.writeframes(sound.samples)
        samples = len(sound.samples) // 2
        self._console.print(
            f'"{_TEXT}": {samples} samples, {samples / sound.rate_hz:.1f} s of sound in {sound.seconds:.2f} s,'
            f" the first after {sound.first_s:.2f} s; asked twice, the same"
        )
        self._console.print(f"sound: [bold]{path.resolve()}[/]\n")
        return sound

    def lose_a_decoder(self, expected: Sound) -> None:
        """Kill the decoder that makes the sound, with SIGKILL while it is heard. Raise DemoError for another sound."""
        for number in range(_MOST_KILLS):
            decoders = [info for info in self._replicas() if info.stage_id == _DECODER]
            victim = decoders[number % len(decoders)]

            def kill(piece: int, pid: int = victim.pid) -> None:
                if piece == _KILLED_AT:
                    os.kill(pid, signal.SIGKILL)
                    self._killed.add(pid)

            heard = listen(self._url, _TEXT, self._params, kill)
            if heard.samples != expected.samples:
                raise DemoError(f"the sound was another one after {victim.name} was killed; {self._log_end()}")
            was_at_work = f"replica.lost_at_work replica={victim.name}" in self._log.read_text(errors="replace")
            self._console.print(
                f"killed replica {victim.name} (pid {victim.pid}) with SIGKILL while the sound was heard:"
                f" [green]the same {len(heard.samples) // 2} samples[/] in {heard.seconds:.2f} s;"
                f" {'it was making them' if was_at_work else 'the other decoder was making them, so once more'}"
            )
            if was_at_work:
                self._console.print()
                return
            self._wait_all_up(_RESTART_S)
        raise DemoError(f"no decoder was at work when it was killed, {_MOST_KILLS} times; {self._log_end()}")


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stage_runtime.demo.speech", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a Qwen3-TTS")
    parser.add_argument("--omni-python", required=True, metavar="PATH", help="the Python that has vLLM-Omni in it")
    parser.add_argument("--speaker", default="ethan", help="one of the model's voices (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep serving at the end, until Ctrl-C")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the sound and the log")
    parser.add_argument("--port", type=int, default=0, help="of the HTTP API (default: a free one)")
    arguments = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    config = DemoConfig(arguments.output, arguments.keep, arguments.port, 1, "speech-demo", user_runtime_dir())
    try:
        return run_speech(config, arguments.model, arguments.omni_python, arguments.speaker)
    except ConfigError as error:
        say(str(error), error=True)
        return 2
    except OmniError as error:
        say(str(error), error=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""``omni demo --speak``: the demo with a talker and a vocoder behind the thinker, beside the painter.

The answer is heard while the talker still runs, and replicas of every stage are killed in the middle of the sentence.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text

from omni_discovery.errors import ConfigError
from stage_runtime.demo.http_client import DemoError, Reply, ask
from stage_runtime.demo.measure import measure_speech
from stage_runtime.demo.player import Player, write_wav
from stage_runtime.demo.processes import run_time_s
from stage_runtime.demo.run import Demo
from stage_runtime.demo.show import answer_panel, has_colour, numbers_table, speak_step
from stage_runtime.demo.waterfall import waterfall

if TYPE_CHECKING:
    from omni_discovery.records.schema import ReplicaInfo

_FOLDER: Final = Path(__file__).parent
_QUESTION: Final = "26 plus 48"
_SEED: Final = 17
#: Every stage, the last first: which of them are at work while the sentence is heard.
_STAGES: Final = {3: "vocoder", 2: "talker", 1: "painter", 0: "thinker"}
_AT_WORK: Final = (3, 2)
#: The piece of sound at which a replica is killed: a fifth of a second of it was heard.
_KILLED_AT: Final = 2
_MOST_KILLS: Final = 4
_RESTART_S: Final = 120.0


def check_models() -> None:
    """Raise ConfigError if this installation has no talker: the weights lie in the repository, not in the package."""
    if not all((_FOLDER / name / "config.json").is_file() for name in ("talker", "vocoder")):
        raise ConfigError("--speak needs the models of the repository: clone it and run 'make demo' there")


class SpeakingDemo(Demo):
    """One run of it."""

    deploy: ClassVar[Path] = _FOLDER / "speak.yaml"
    title: ClassVar[str] = "[bold]omni demo --speak[/] · thinker, talker (vLLM), painter, vocoder, two of each"

    def show(self) -> None:
        """See Demo."""
        self.ask_questions()
        whole = self.speak()
        for stage_id in _STAGES:
            self.lose_in_mid_sentence(stage_id, whole)
        self._console.print()
        self.show_numbers()
        with self._console.status("measuring the speech"):
            numbers, with_pieces, without = measure_speech(self._url, self._hub.pid)
        (self._config.output / "speech-numbers.json").write_text(numbers.to_json())
        self._console.print(numbers_table(numbers))
        figure = waterfall(with_pieces, without)
        (self._config.output / "waterfall.txt").write_text(figure + "\n", encoding="utf-8")
        self._console.print("\n" + figure + "\n", markup=False)

    def first_step(self) -> str:
        """See DemoPipeline."""
        return speak_step(self._url)

    def speak(self) -> Reply:
        """Ask a sum: the answer is shown, drawn and heard. Raise DemoError."""
        path = self._config.output / "answer.wav"
        with closing(Player(path, aloud=self._console.is_terminal)) as player:
            reply = self._hear(player.put)
        self._console.print(answer_panel(_QUESTION, reply, colour=has_colour(self._console)))
        seconds = len(reply.samples) / 2 / reply.rate_hz
        self._console.print(
            f"heard: {seconds:.1f} s of sound, the first after {reply.first_sound_s:.2f} s, all of it after"
            f" {reply.seconds:.2f} s; saved while it was made: [bold]{path.resolve()}[/]"
        )
        self._console.print()
        return reply

    def lose_in_mid_sentence(self, stage_id: int, whole: Reply) -> None:
        """Kill a replica with SIGKILL while the sentence is heard. Raise DemoError if that can be heard."""
        name = _STAGES[stage_id]
        for _ in range(_MOST_KILLS):
            victims: list[ReplicaInfo] = []
            reply = self._hear(self._killer(stage_id, victims))
            if reply.samples != whole.samples or reply.text != whole.text:
                raise DemoError(f"the sound was another one after the {name} was killed; {self._log_end()}")
            killed = f"killed {name} {victims[0].name} (pid {victims[0].pid}) with SIGKILL in mid-sentence"
            was_at_work = f"replica.lost_at_work replica={victims[0].name}" in self._log.read_text(errors="replace")
            if stage_id in _AT_WORK and not was_at_work:
                self._console.print(f"{killed}, but it had nothing to do; once more")
                self._wait_all_up(_RESTART_S)
                continue
            path = self._config.output / f"answer-{name}-killed.wav"
            write_wav(path, reply.samples, reply.rate_hz)
            self._console.print(
                f"{killed}: [green]the same {len(reply.samples) // 2} samples[/] in {reply.seconds:.2f} s: {path.name}"
            )
            return
        raise DemoError(f"no {name} was at work when it was killed, {_MOST_KILLS} times; {self._log_end()}")

    def _killer(self, stage_id: int, victims: list[ReplicaInfo]) -> Callable[[bytes, int], None]:
        """What kills, at the piece of sound, the replica of a stage that has worked most since now."""
        replicas = [info for info in self._replicas() if info.stage_id == stage_id]
        before_s = {info.pid: run_time_s(info.pid) for info in replicas}
        heard = 0

        def kill(_samples: bytes, _rate_hz: int) -> None:
            nonlocal heard
            heard += 1
            if heard == _KILLED_AT:
                victim = max(replicas, key=lambda info: run_time_s(info.pid) - before_s[info.pid])
                os.kill(victim.pid, signal.SIGKILL)
                self._killed.add(victim.pid)
                victims.append(victim)

        return kill

    def _hear(self, on_sound: Callable[[bytes, int], None]) -> Reply:
        with self._console.status(Text(_QUESTION)) as status:

            def show(text: str) -> None:
                status.update(Text(f"{_QUESTION}  →  {text}"))

            reply = ask(self._url, _QUESTION, seed=_SEED, on_text=show, on_sound=on_sound)
        if not reply.samples or not reply.png:
            raise DemoError(f"the answer has no sound, or no picture; {self._log_end()}")
        return reply

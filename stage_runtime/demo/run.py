"""The demo: start everything, ask, kill a replica, ask again, measure, stop everything."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final

from rich.console import Console
from rich.text import Text

from omni_discovery.deploy.document import parse_deploy
from stage_runtime.demo.http_client import Reply, ask
from stage_runtime.demo.measure import measure, measure_memory
from stage_runtime.demo.pipeline import DemoConfig, DemoPipeline, make_output
from stage_runtime.demo.show import answer_panel, has_colour, numbers_table

QUESTIONS: Final = ("three plus four", "what is 17 - 9?", "draw a 6", "26 plus 48", "how is the weather today?")
#: Seeds count up from here; this one gives the demo a legible hand.
_FIRST_SEED: Final = 14
_RESTART_S: Final = 60.0


def run_demo(config: DemoConfig) -> int:
    """Run the demo; return the exit code. Raise ConfigError for the output folder, DemoError for what fails later."""
    console = Console(highlight=False)
    kind = _kind_of(config)
    make_output(config.output)
    with ExitStack() as stack:
        demo = kind(config, console, stack)
        demo.start(demo.title)
        stack.callback(demo.stop)
        demo.wait_until_ready()
        demo.measure_memory()
        demo.show()
        if config.keep:
            demo.keep_serving()
    return 0


def _kind_of(config: DemoConfig) -> type[Demo]:
    if not config.speak:
        return Demo
    from stage_runtime.demo.speaking import SpeakingDemo, check_models

    check_models()
    return SpeakingDemo


class Demo(DemoPipeline):
    """One run of it."""

    deploy: ClassVar[Path] = Path(__file__).with_name("deploy.yaml")
    title: ClassVar[str] = "[bold]omni demo[/] · thinker (vLLM) and painter (diffusion), two of each"

    def __init__(self, config: DemoConfig, console: Console, stack: ExitStack) -> None:
        deploy = parse_deploy(self.deploy.read_text(encoding="utf-8"), str(self.deploy))
        expected = sum(stage.runtime.num_replicas for stage in deploy.stages)
        super().__init__(config, console, stack, ("--deploy-config", str(self.deploy)), expected)
        self._memory = (0.0, 0)

    def show(self) -> None:
        """All that is shown once everything is ready. Raise DemoError."""
        self.ask_questions()
        self.lose_a_replica()
        self.show_numbers()

    def measure_memory(self) -> None:
        """Of all processes, before they have worked."""
        self._memory = measure_memory(self._hub.pid)

    def ask_questions(self) -> None:
        """Ask the questions, show the answers, and save the picture of the longest sum. Raise DemoError."""
        pictures = {}
        for seed, question in enumerate(QUESTIONS, _FIRST_SEED):
            reply = self._ask(question, seed)
            self._console.print(answer_panel(question, reply, colour=has_colour(self._console)))
            if reply.png:
                pictures[question] = reply.png
        path = self._config.output / "answer.png"
        path.write_bytes(pictures[QUESTIONS[3]])
        self._console.print(f"picture of {QUESTIONS[3]!r}: [bold]{path.resolve()}[/]\n")

    def lose_a_replica(self) -> None:
        """Kill a replica of each stage with SIGKILL; the next request must be answered, too. Raise DemoError."""
        for stage_id in sorted({info.stage_id for info in self._replicas()}):
            victim = next(info for info in self._replicas() if info.stage_id == stage_id)
            os.kill(victim.pid, signal.SIGKILL)
            self._killed.add(victim.pid)
            reply = self._ask("nine plus nine", stage_id)
            name = f"replica {victim.name} (pid {victim.pid})"
            self._console.print(
                f"killed {name} with SIGKILL; the next request: [green]{reply.text}[/] in {reply.seconds:.2f} s"
            )
        self._console.print()

    def show_numbers(self) -> None:
        """Measure and print the figures, and write them to a file."""
        self._wait_all_up(_RESTART_S)
        with self._console.status(f"measuring over {self._config.requests} requests"):
            numbers = measure(self._url, self._ready_s, self._memory, self._config.requests)
        (self._config.output / "numbers.json").write_text(numbers.to_json())
        self._console.print(numbers_table(numbers))

    def _ask(self, question: str, seed: int) -> Reply:
        with self._console.status(Text(question)) as status:
            words: list[str] = []

            def show(text: str) -> None:
                words.append(text)
                status.update(Text(f"{question}  →  {''.join(words)}"))

            return ask(self._url, question, seed=seed, on_text=show)

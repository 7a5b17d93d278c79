"""How the demo ends when it is not given the time to end in order."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from omni_discovery.errors import ConfigError
from omni_discovery.etcd.embedded_file import read_embedded, write_endpoint
from stage_runtime.demo import speaking
from stage_runtime.demo.pipeline import DemoConfig
from stage_runtime.demo.run import Demo, run_demo
from tests.support.quiet import soon_s

_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def test_ctrl_c_while_it_stops_kills_the_hub_and_leaves_no_runtime_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a hub that takes its time to stop, with an etcd that it has announced; 2. Ctrl-C: it is killed"""
    demo = Demo(DemoConfig(tmp_path, False, 0, 1, "demo", tmp_path), Console(quiet=True), ExitStack())
    with subprocess.Popen([sys.executable, "-c", _DEAF], stdout=subprocess.PIPE) as hub:
        assert hub.stdout is not None
        assert hub.stdout.readline()
        demo._hub = hub
        file = write_endpoint(tmp_path, "demo", "127.0.0.1:1")
        file.write_text(f'{{"endpoint": "127.0.0.1:1", "pid": {hub.pid}}}')
        assert read_embedded(tmp_path, "demo") is not None
        wait, interrupts = hub.wait, [KeyboardInterrupt]

        def wait_or_ctrl_c(timeout: float | None = None) -> int:
            if interrupts:
                raise interrupts.pop()
            return wait(timeout)

        monkeypatch.setattr(hub, "wait", wait_or_ctrl_c)
        began_s = time.monotonic()
        demo.stop()
        assert time.monotonic() - began_s < soon_s(30.0)
        assert hub.returncode == -9
    assert not file.exists()


def test_without_the_weights_of_the_repository_it_does_not_begin_to_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package has none of them."""
    monkeypatch.setattr(speaking, "_FOLDER", tmp_path)
    output = tmp_path / "out"
    with pytest.raises(ConfigError, match="--speak needs the models of the repository: clone it and run 'make demo'"):
        run_demo(DemoConfig(output, False, 0, 1, "demo", tmp_path, speak=True))
    assert not output.exists()


@pytest.mark.attack("E3")
def test_nothing_is_written_into_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """A link that another user made there would lead the demo's log to a file of this user."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "serve.log").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"others can write to .*shared.*: name a folder that is yours alone"):
        run_demo(DemoConfig(shared, False, 0, 1, "demo", tmp_path))
    assert victim.read_text() == "mine"

"""`make omni-demo` as a user sees it, on the model that it makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import wave
from pathlib import Path

from tests.support.omni_cluster import MARKS, PYTHON, write_model

pytestmark = MARKS
_DEMO_S = 600


def test_it_speaks_survives_a_killed_decoder_and_leaves_a_sound(tmp_path: Path) -> None:
    words = ["--model", write_model(tmp_path), "--omni-python", str(PYTHON), "--output", str(tmp_path / "out")]
    ended = subprocess.run(
        [sys.executable, "-m", "stage_runtime.demo.speech", *words],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=_DEMO_S,
        check=False,
    )
    said = " ".join(ended.stdout.split())
    assert ended.returncode == 0, said + ended.stderr
    for told in ("what it says is noise", "it was making them", "the same 305280 samples", "no process is left"):
        assert told in said
    assert re.search(r"305280 samples, 12\.7 s of sound", said)
    with wave.open(str(tmp_path / "out" / "speech.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (24000, 305280)
        assert len(set(file.readframes(file.getnframes()))) > 100, "that is silence"

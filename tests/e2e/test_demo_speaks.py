"""``omni demo --speak`` as a user sees it: words, sound and a picture of one pipeline, and kills in mid-sentence."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.processes import Child

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
_DEMO_S = 600
#: By name, the stages of which replicas are killed, in this order.
STAGES = {"vocoder": 3, "talker": 2, "painter": 1, "thinker": 0}


def samples_of(file: Path) -> array[int]:
    with wave.open(str(file)) as made:
        assert (made.getframerate(), made.getnchannels(), made.getsampwidth()) == (16000, 1, 2)
        return array("h", made.readframes(made.getnframes()))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder that a whole run has left, and what it has said; it keeps serving meanwhile."""
    folder = tmp_path_factory.mktemp("speaking")
    words = ["demo", "--speak", "--keep", "--requests", "3", "--output", "out"]
    child = Child(words, folder, "demo", variables={"COLUMNS": "200"})
    try:
        deadline_s = time.monotonic() + _DEMO_S
        while "--watch" not in child.text:
            child.must_run()
            assert time.monotonic() < deadline_s, child.text[-3000:]
            time.sleep(0.1)
        yield folder / "out", child.text
    finally:
        left = child.stop(signal.SIGINT)
    assert not left, child.text[-3000:]
    assert "no process is left" in child.text


def test_one_question_is_answered_in_words_in_sound_and_in_a_picture(demo: tuple[Path, str]) -> None:
    folder, said = demo
    assert "26 + 48 = 74" in said
    assert "I can only do sums from 0 to 99." in said, "which is neither drawn nor said"
    samples = samples_of(folder / "answer.wav")
    assert 1 < len(samples) / 16000 < 4
    assert max(samples) > 3000, "that is silence"
    with Image.open(folder / "answer.png") as picture:
        assert picture.width > picture.height > 50


def test_a_replica_of_every_stage_is_killed_in_mid_sentence_and_no_sample_differs(demo: tuple[Path, str]) -> None:
    folder, said = demo
    undisturbed = samples_of(folder / "answer.wav")
    lost = (folder / "serve.log").read_text(errors="replace")
    killed = re.findall(r"killed (\w+) (\d)/\d \(pid \d+\) with SIGKILL in mid-sentence: the same (\d+) samples", said)
    assert [(name, int(stage)) for name, stage, _ in killed] == list(STAGES.items())
    for name, stage, count in killed:
        disturbed = samples_of(folder / f"answer-{name}-killed.wav")
        assert len(disturbed) == len(undisturbed) == int(count)
        difference = [one - other for one, other in zip(disturbed, undisturbed, strict=True)]
        assert not any(difference), "the difference of both files is not silence"
        if name in ("vocoder", "talker"):
            assert re.search(rf"replica\.lost_at_work replica={stage}/", lost), "it had nothing to do"


def test_the_first_sound_leaves_before_the_talker_has_ended_only_with_async_chunk(demo: tuple[Path, str]) -> None:
    folder, said = demo
    figure = (folder / "waterfall.txt").read_text(encoding="utf-8")
    assert all(line in said for line in figure.splitlines())
    times = [
        {
            name: (int(begin), int(end))
            for name, begin, end in re.findall(r"^  (\w+) *\|.*\| +(\d+) to +(\d+) ms", part, re.M)
        }
        for part in re.split(r"^without", figure, flags=re.M)
    ]
    pieces, whole = times
    assert pieces["sound"][0] < pieces["talker"][1]
    assert whole["sound"][0] >= whole["talker"][1]


def test_the_line_that_it_prints_to_try_next_has_the_answer_said_again(demo: tuple[Path, str], tmp_path: Path) -> None:
    folder, said = demo
    (line,) = re.findall(r"^curl .*audio/speech.*\n  -d .*", said, re.MULTILINE)
    subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, timeout=60)
    assert samples_of(tmp_path / "answer.wav") == samples_of(folder / "answer.wav")


def test_its_figures_are_left(demo: tuple[Path, str]) -> None:
    folder, said = demo
    numbers = json.loads((folder / "speech-numbers.json").read_text())
    assert numbers["first_sound_ms"] > 0
    assert numbers["hub_ms_per_s"] > 0
    assert "real-time factor" in said

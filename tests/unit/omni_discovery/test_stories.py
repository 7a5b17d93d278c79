"""Stories of what failed, from process to doctor."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from omni_discovery.stories import Stories, Waits, read_stories, read_waits


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "omni"
    made.mkdir(mode=0o700)
    return made


def test_what_one_process_wrote_another_reads_the_oldest_first(tmp_path: Path) -> None:
    home, now_s = folder(tmp_path), [10.0]
    stories = Stories(home, "n", "etcd:2379", lambda: now_s[0])
    stories.write("lease", "/omni/v1/n/replicas/0/1", lambda: ["granted", "lost"])
    now_s[0] = 11.0
    stories.write("request", "r1", lambda: ["submitted"])
    stories.flush()
    first, second = read_stories(home, "n")
    assert (first.kind, first.name, first.lines, first.at_s) == (
        "lease",
        "/omni/v1/n/replicas/0/1",
        ("granted", "lost"),
        10.0,
    )
    assert (second.kind, second.pid) == ("request", os.getpid())
    assert read_stories(home, "other") == []


def test_the_file_follows_by_itself(tmp_path: Path) -> None:
    home = folder(tmp_path)
    stories = Stories(home, "n")
    stories.write("request", "r1", lambda: ["submitted"])
    timer = stories._timer
    assert timer is not None
    timer.join(5.0)
    assert [story.name for story in read_stories(home, "n")] == ["r1"]
    stories.flush()


def test_only_the_latest_are_kept_and_long_ones_are_cut(tmp_path: Path) -> None:
    home = folder(tmp_path)
    stories = Stories(home, "n")
    for number in range(100):
        stories.write("request", f"r{number}", lambda: ["x" * 10_000] * 1000)
        if number % 7 == 0:
            stories.flush()
    stories.flush()
    kept = read_stories(home, "n")
    assert [kept[0].name, kept[-1].name, len(kept)] == ["r80", "r99", 20]
    assert (len(kept[0].lines), len(kept[0].lines[0])) == (100, 500)


def test_of_many_at_once_the_first_are_kept_and_no_lines_are_made_for_the_others(tmp_path: Path) -> None:
    home, made = folder(tmp_path), []

    def lines(number: int) -> list[str]:
        made.append(number)
        return ["failed"]

    stories = Stories(home, "n")
    for number in range(1000):
        stories.write("request", f"r{number}", lambda number=number: lines(number))
    stories.flush()
    assert made == list(range(20))
    assert len(read_stories(home, "n")) == 20


def test_files_of_former_processes_stay_and_the_oldest_of_many_go(tmp_path: Path) -> None:
    home = folder(tmp_path)
    (home / "n.stories").mkdir(mode=0o700)
    for number in range(60):
        file = home / "n.stories" / f"{9_000_000 + number}.json"
        file.write_text(f'[{{"kind":"lease","name":"{number}","pid":1,"at_s":{number},"lines":[]}}]')
        os.utime(file, (number, number))
    stories = Stories(home, "n")
    stories.write("lease", "mine", list)
    stories.flush()
    names = [story.name for story in read_stories(home, "n")]
    assert names == [*(str(number) for number in range(11, 60)), "mine"]


@pytest.mark.parametrize("content", [b"", b"[{}]", b"\xff\xff", b"[" * 100])
def test_a_damaged_file_is_left_out(tmp_path: Path, content: bytes) -> None:
    home = folder(tmp_path)
    (home / "n.stories").mkdir(mode=0o700)
    (home / "n.stories" / "1.json").write_bytes(content)
    assert read_stories(home, "n") == []


def test_a_folder_that_others_can_write_to_is_neither_written_nor_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = folder(tmp_path)
    home.chmod(0o777)
    stories = Stories(home, "n")
    for _ in range(2):
        stories.write("lease", "x", lambda: ["lost"])
        stories.flush()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["stories.not_written"]
    assert read_stories(home, "n") == []


def test_a_story_that_can_not_be_kept_costs_nobody_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. its lines can't be read; 2. no thread can be started: the story waits for the end; 3. both are logged"""
    home = folder(tmp_path)
    stories = Stories(home, "n")
    stories.write("request", "r0", lambda: [1 / 0 and ""])

    def no_thread(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", no_thread)
    stories.write("request", "r1", lambda: ["submitted"])
    stories.flush()
    assert [story.name for story in read_stories(home, "n")] == ["r1"]
    assert caplog.text.count("stories.not_kept kind=request") == 2


def test_a_name_that_utf_8_can_not_hold_is_shown_escaped(tmp_path: Path) -> None:
    home = folder(tmp_path)
    stories = Stories(home, "n")
    stories.write("request", "r\ud800", lambda: ["a\udfff"])
    stories.flush()
    (story,) = read_stories(home, "n")
    assert (story.name, story.lines) == ("r\\ud800", ("a\\udfff",))


def test_the_file_is_its_users_alone_and_no_half_of_one_is_left(tmp_path: Path) -> None:
    home = folder(tmp_path)
    stories = Stories(home, "n")
    stories.write("lease", "k", lambda: ["lost"])
    stories.flush()
    (file,) = (home / "n.stories").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_a_process_waits_for_is_read_until_it_waits_no_more(tmp_path: Path) -> None:
    home, now_s = folder(tmp_path), [10.0]
    waits = Waits(home, "n", "etcd:2379", lambda: now_s[0])
    waits.begin("pipeline", "the supervisor of stage 0", "no etcd answers")
    now_s[0] = 15.0
    waits.begin("pipeline", "the supervisor of stage 0", "no pipeline")
    waits.begin("0", "the supervisor of stage 0", "x" * 10_000)
    first, second = read_waits(home, "n")
    assert (first.since_s, first.reason, first.pid, first.endpoints) == (10.0, "no pipeline", os.getpid(), "etcd:2379")
    assert (second.since_s, len(second.reason)) == (15.0, 500)
    assert read_waits(home, "other") == []
    waits.end("pipeline")
    waits.end("pipeline")
    assert [wait.since_s for wait in read_waits(home, "n")] == [15.0]
    waits.close()
    waits.close()
    assert read_waits(home, "n") == []
    assert list((home / "n.waits").iterdir()) == []


def test_waits_of_a_process_that_has_ended_are_none(tmp_path: Path) -> None:
    home = folder(tmp_path)
    Waits(home, "n", "").begin("k", "w", "r")
    (file,) = (home / "n.waits").iterdir()
    file.rename(file.with_name("4194305.json"))
    (home / "n.waits" / f"{os.getpid()}.json").write_text("{")
    assert read_waits(home, "n") == []
    assert not file.with_name("4194305.json").exists()


def test_waits_that_can_not_be_written_hold_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = folder(tmp_path)
    home.chmod(0o777)
    waits = Waits(home, "n", "")
    waits.begin("a", "w", "r")
    waits.begin("b", "w", "r")
    assert read_waits(home, "n") == []
    assert caplog.text.count("waits.not_written") == 1

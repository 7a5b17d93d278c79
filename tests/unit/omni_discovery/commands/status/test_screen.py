"""The screen of ``omni status``: it fits, it can be pasted, and what is not known is not zero."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.commands.status.overview import HubSummary, Loading, StageLine
from omni_discovery.commands.status.screen import Flags, Status, shell_lines, status_text

FLAGS = Flags(("--namespace", "prod"), "unix:///tmp/e/etcd:2379")
LINE = StageLine(0, "echo", 2, 2, 0, 0, 1, 16, 0, 0, 0)
HUB = HubSummary("front-1", "front", False, 1.0, 120, 0, 300.0)


def status(*needs: Finding, **fields: Any) -> Status:
    usual: dict[str, Any] = {"unknown": (), "stages": (LINE,), "hubs": (HUB,)}
    return Status("prod", "a:2379", "03:00:00", needs, **{**usual, **fields})


def need(text: str = "it is broken", *command: str, advice: str = "mend it") -> Finding:
    return Finding(Grade.PROBLEM, "replica", text, advice, command)


def shown(of: Status, width: int = 80) -> str:
    return status_text(of, FLAGS, width).plain


def test_a_calm_screen_says_first_that_nothing_is_needed() -> None:
    lines = shown(status()).splitlines()
    assert lines[0] == "namespace prod at etcd a:2379, 03:00:00"
    assert lines[2] == "nothing needs you"
    assert "hub front-1 on front: 120 requests in 5 min, 0 failed, beat 1 s ago" in lines
    assert status().code == 0


def test_what_needs_somebody_comes_first_with_its_command() -> None:
    made = status(need("stage 0 has nobody", "omni", "hub", "allow", "front-1"))
    assert made.code == 1
    lines = shown(made).splitlines()
    assert lines[2:6] == [
        "one thing needs you",
        " 1. replica: stage 0 has nobody",
        "    mend it:",
        "      omni hub allow front-1 --namespace prod",
    ]


def test_what_tells_more_stands_below_once_with_the_host_where_it_is_asked() -> None:
    """It asks a hub, and etcd for what is wrong."""
    failed = replace(need("1 of 2 failed"), more=("omni", "why", "--last-failures"), more_host="front")
    flags = Flags(("--etcd-endpoints", "a:2379", "--namespace", "prod"), "a:2379")
    lines = status_text(status(failed, failed), flags, 80).plain.splitlines()
    assert lines[5:10] == [
        "    Which requests failed last, where they had been and how they ended, asked on",
        "    front:",
        "      omni why --last-failures --etcd-endpoints a:2379 --namespace prod",
        " 2. replica: 1 of 2 failed",
        "    mend it",
    ]
    here = status_text(status(failed, host="front"), flags, 80).plain
    assert "how they ended:" in here
    (alone,) = shell_lines(failed.more, Flags((), "unix:///tmp/e"), 74)
    assert alone == "omni why --last-failures"


def test_a_topic_is_said_unless_the_text_says_it() -> None:
    """A part of a word is not the word."""
    told = [
        Finding(Grade.PROBLEM, "load", "stage 0 is overloaded", ""),
        Finding(Grade.PROBLEM, "ended", "the supervisor of stage 1 on gpu-2 ended 2 s ago", ""),
    ]
    lines = shown(status(*told)).splitlines()
    assert lines[3:5] == [" 1. load: stage 0 is overloaded", " 2. the supervisor of stage 1 on gpu-2 ended 2 s ago"]


def test_a_screen_without_etcd_shows_no_number_at_all() -> None:
    made = status(stages=None, hubs=None, unknown=("stages, replicas and hubs: etcd does not say",))
    assert made.code == 2
    text = shown(made)
    assert "nothing needs you" not in text
    assert "0" not in text.partition("\n")[2]
    assert "not known" in text


def test_what_is_not_known_is_a_question_mark_and_explained() -> None:
    text = shown(status(stages=(StageLine(0, "vllm", None, 1, 0, 0, 0, 8, None, None, None),)))
    assert text.splitlines()[5].split() == ["0", "vllm", "?", "1", "0", "0", "0/8", "?", "?", "?"]
    assert "?: not known" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_longer_than_the_screen_but_where_a_word_is(width: int) -> None:
    long = "a very long text about a replica that broke, and broke again " * 8
    loading = tuple(Loading(f"0/{number}", "loading the model", 0.4) for number in range(9))
    made = status(
        *(
            need(f"{number} {long}", "omni", "serve", "--headless", "--stage-id", "0", advice=long)
            for number in range(12)
        ),
        stages=(StageLine(0, "an-engine-of-some-length", 99, 1, 9, 0, 0, 8, None, None, None, loading),),
        hubs=(HUB,) * 9,
        unknown=(long,),
    )
    text = shown(made, width)
    longest = max(len(line) for line in text.splitlines() if "--etcd-endpoints" not in line and "unix:" not in line)
    assert longest <= max(width, 75)
    assert "and 4 more:" in text
    assert "and 3 more on their way up" in text
    assert "and 4 more hubs" in text


def test_a_command_in_several_lines_is_one_for_a_shell_and_its_words_stay_words() -> None:
    words = ("omni", "drain", "0/1; reboot", "$(id)")
    flags = Flags(("--etcd-endpoints", "a:2379,b:2379,c:2379", "--namespace", "it's"), "")
    lines = shell_lines(words, flags, 30)
    assert len(lines) > 2
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == [*words, *flags.given]


def test_what_is_for_etcdctl_is_preceded_by_its_settings() -> None:
    lines = shell_lines(("etcdctl", "del", "/omni/v1/prod/replicas/0/0; id"), FLAGS, 80)
    assert lines == ['eval "$(omni etcd env --namespace prod)"', "etcdctl del '/omni/v1/prod/replicas/0/0; id'"]


def test_who_finds_no_embedded_etcd_by_itself_gets_its_endpoint() -> None:
    (line,) = shell_lines(("omni", "serve", "--headless", "--stage-id", "1"), FLAGS, 200)
    assert "--etcd-endpoints unix:///tmp/e/etcd:2379" in line
    (cordon,) = shell_lines(("omni", "cordon", "0/1", "--undo"), FLAGS, 200)
    assert "--etcd-endpoints" not in cordon


def test_an_advice_that_holds_its_command_does_not_say_it_twice() -> None:
    text = shown(status(need("x", "omni", "hub", "allow", "h", advice="stop it there, or: omni hub allow h")))
    assert "    stop it there, or:\n      omni hub allow h --namespace prod" in text


def test_a_bar_is_shown_only_where_the_engine_says_how_far_it_is() -> None:
    loading = (Loading("0/0", "loading the model", 0.25), Loading("0/1", "", 0.0))
    text = shown(status(stages=(StageLine(0, "vllm", 2, 0, 2, 0, 0, 0, 0, 0, 0, loading),)))
    assert "  0/0 [#####...............]  25 % loading the model" in text
    assert "  0/1 starting\n" in text

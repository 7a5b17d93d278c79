"""The flags of ``omni serve``: what goes together, what is refused and why, and that help and docs say the same."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from hub.cli import check_flags, serve_config
from hub.command import ServeCommand
from hub.serve.document_flags import joins_pipeline
from hub.serve.flags import warn_of_ignored_flags
from hub.serve.plan import deploy_of, stages_on_host
from omni_discovery.errors import ConfigError
from tests.support.processes import DEFAULTS

PAIR = """
stages:
  - {stage_id: 0, engine: echo, runtime: {num_replicas: 3}, final_output: text}
  - {stage_id: 1, engine: echo, runtime: {num_replicas: 2}, final_output: image}
"""
HEADLESS = ("--headless", "--stage-id", "0", "--etcd-endpoints", "h:1")
ROOT = Path(__file__).parents[4]


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    parser = argparse.ArgumentParser(prog="omni serve")
    ServeCommand().add_arguments(parser)
    return parser


@pytest.fixture
def pair(tmp_path: Path) -> str:
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    return str(file)


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ((), [(0, 3), (1, 2)]),
        (("--omni-dp-size-local", "1"), [(0, 3), (1, 2)]),
        (("--stage-id", "0"), [(0, 1)]),
        (("--stage-id", "1", "--omni-dp-size-local", "4"), [(1, 4)]),
        (("--stage-id", "1", "--stage-overrides", '{"1": {"num_replicas": 5}}'), [(1, 5)]),
        (("--hub-only",), []),
    ],
)
def test_how_many_replicas_run_here(
    parser: argparse.ArgumentParser, pair: str, flags: tuple[str, ...], counts: list[tuple[int, int]]
) -> None:
    """A stage that is named runs once unless K says otherwise; without a name, all run as the document says."""
    arguments = parser.parse_args(["--deploy-config", pair, *flags])
    check_flags(arguments)
    assert [(stage.stage_id, count) for stage, count in stages_on_host(arguments, deploy_of(arguments))] == counts


def test_a_hub_alone_may_take_the_document_in_force_from_an_etcd(parser: argparse.ArgumentParser) -> None:
    """A document of its own comes before that one."""
    joining = parser.parse_args(["--hub-only", "--etcd-endpoints", "h:1"])
    check_flags(joining)
    assert joins_pipeline(joining)
    for own in (["m"], ["--deploy-config", "f"]):
        assert not joins_pipeline(parser.parse_args(["--hub-only", "--etcd-endpoints", "h:1", *own]))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "nothing to serve: give a MODEL or --deploy-config"),
        (["--hub-only"], "nothing to serve: .*; with --hub-only and --etcd-endpoints, a hub takes that one by itself"),
        (["--stage-id", "0", "--etcd-endpoints", "h:1"], "nothing to serve"),
        (["--headless"], "say which with --stage-id"),
        (["--headless", "--stage-id", "0"], "give --etcd-endpoints"),
        (["m", "--omni-dp-size-local", "2"], "say which with --stage-id"),
        (["m", "--stage-id", "0", "--omni-dp-size-local", "0"], "at least 1"),
        (["m", "--stage-id", "0", "--omni-dp-size-local", "1025"], "at most 1024, not 1025"),
        (["m", "--stage-id", "-1"], "--stage-id must be 0 or more, not -1"),
        (["m", "--hub-only", "-ora", "10.0.0.5"], "--hub-only runs none"),
        (["m", "--hub-only", "--stage-id", "0"], "--hub-only runs no replicas"),
        (["--hub-only", *HEADLESS], "--hub-only runs no replicas"),
        (["m", "--omni-heartbeat-timeout", "0.5"], r"--omni-heartbeat-timeout\) is 0.5; right would be from 1 to 3600"),
        (["m", "--omni-heartbeat-timeout", "nan"], "is nan; right would be from 1"),
        (["m", "--omni-heartbeat-timeout", "-3", "--etcd-endpoints", "h:1"], "right would be from 1 to 3600"),
        (["m", "--port", "70000"], "take 0 to 65535"),
        (["m", "--namespace", "a/b"], "namespace"),
        (["--api-key", "k", "m"], "nothing to serve: .*; what stands behind --api-key are keys: MODEL comes before it"),
        ([*HEADLESS, "--metrics-port", "70000"], "--metrics-port 70000 is none; take 0 to 65535"),
        ([*HEADLESS, "--metrics-host", "0.0.0.0"], "is where --metrics-port listens: give that too"),
        ([*HEADLESS, "--metrics-port", "0", "--metrics-host", "a:1"], "--metrics-host 'a:1' is no address"),
        ([*HEADLESS, "--port", "8001"], "--port is a hub's: leave it out with --headless"),
        ([*HEADLESS, "--port", "8000"], "--port is a hub's"),
        ([*HEADLESS, "--host", "0.0.0.0"], "--host is a hub's"),
        ([*HEADLESS, "--api", "vllm"], "--headless has no HTTP API"),
        ([*HEADLESS, "--admin-api"], "--headless has no HTTP API"),
        ([*HEADLESS, "--access-log"], "--headless has no HTTP API: leave out --access-log"),
        ([*HEADLESS, "--max-waiting", "4"], "--max-waiting is a hub's"),
        ([*HEADLESS, "--otlp-traces-endpoint", "http://h:4318/v1/traces"], "is for a hub"),
    ],
)
def test_flags_that_can_not_be_meant_are_refused_with_the_reason(
    parser: argparse.ArgumentParser, flags: list[str], reason: str
) -> None:
    """Statements 92 and 93 of the peer, but that no master is needed, and what came since."""
    with pytest.raises(ConfigError, match=reason):
        check_flags(parser.parse_args(flags))


def test_an_embedded_etcd_takes_no_login(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", "secret")
    with pytest.raises(ConfigError, match="an embedded etcd has neither users nor TLS"):
        check_flags(parser.parse_args(["m", "--etcd-user", "u"]))


@pytest.mark.parametrize(
    "flags",
    [
        ["m", "-ora", "10.0.0.5"],
        ["m", "--stage-id", "0", "-ora", "fd00::5", "--etcd-endpoints", "h:1"],
        [*HEADLESS, "-ora", "10.0.0.5", "--omni-dp-size-local", "2"],
        [*HEADLESS, "--metrics-port", "9100", "--metrics-host", "0.0.0.0"],
        ["m", "--hub-only", "--etcd-endpoints", "h:1", "--port", "0"],
    ],
)
def test_flags_that_go_together_pass(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    check_flags(parser.parse_args(flags))


def test_an_unknown_policy_is_refused_with_those_that_there_are(parser: argparse.ArgumentParser, pair: str) -> None:
    arguments = parser.parse_args(["--deploy-config", pair, "--omni-lb-policy", "luck"])
    with pytest.raises(ConfigError, match=r"--omni-lb-policy: .*least-queue-length"):
        serve_config(arguments, deploy_of(arguments))


def test_what_is_not_given_is_as_the_help_says(parser: argparse.ArgumentParser, pair: str) -> None:
    arguments = parser.parse_args(["--deploy-config", pair])
    config = serve_config(arguments, deploy_of(arguments))
    assert (config.host, config.port, config.policy, config.ttl_s) == ("127.0.0.1", 8000, "least-load", 10.0)


def test_a_stage_that_the_pipeline_has_not_is_refused_also_where_a_model_is_the_pipeline(
    parser: argparse.ArgumentParser,
) -> None:
    with pytest.raises(ConfigError, match="stage 1 is not in the pipeline; it has 0"):
        deploy_of(parser.parse_args(["m", "--stage-id", "1"]))


def test_an_engine_that_nobody_knows_is_refused_where_it_would_run_and_told_elsewhere(
    parser: argparse.ArgumentParser, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Third parties' engines are installed where their replicas are."""
    file = tmp_path / "d.yaml"
    file.write_text(PAIR.replace("{stage_id: 1, engine: echo", "{stage_id: 1, engine: theirs"))
    here = parser.parse_args(["--deploy-config", str(file)])
    with pytest.raises(ConfigError, match="stage 1: engine 'theirs' is not known on this host"):
        serve_config(here, deploy_of(here))
    elsewhere = parser.parse_args(["--deploy-config", str(file), "--stage-id", "0"])
    serve_config(elsewhere, deploy_of(elsewhere))
    assert "deploy.engine_unknown stage 1: engine 'theirs'" in caplog.text


def test_pieces_that_do_not_make_the_next_stage_answer_earlier_are_told(
    parser: argparse.ArgumentParser, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stages of vLLM: the second one reads ahead, and answers when its prompt is whole."""
    file = tmp_path / "d.yaml"
    stages = "{stage_id: 0, engine: vllm, model: n/a}, {stage_id: 1, engine: vllm, model: n/b, final_output: text}"
    file.write_text(f"async_chunk: true\nstages: [{stages}]\n")
    arguments = parser.parse_args(["--deploy-config", str(file), "--hub-only"])
    serve_config(arguments, deploy_of(arguments))
    assert "deploy.async_chunk edge 0 to 1: async_chunk does not have stage 1 answer" in caplog.text
    assert "answers once its prompt is whole" in caplog.text


def test_a_connector_that_nobody_knows_is_refused_where_it_would_run_and_told_elsewhere(
    parser: argparse.ArgumentParser, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Third parties' connectors are installed where the replicas at both ends of an edge are; a hub alone warns."""
    file = tmp_path / "d.yaml"
    file.write_text(f"{PAIR}edges: [{{from: 0, to: 1, connector: mine}}]\nconnectors: {{mine: {{name: Carrier}}}}\n")
    here = parser.parse_args(["--deploy-config", str(file), "--stage-id", "0"])
    with pytest.raises(ConfigError, match="the edge 0 to 1: connector 'Carrier' is not known on this host; there are "):
        serve_config(here, deploy_of(here))
    alone = parser.parse_args(["--deploy-config", str(file), "--hub-only", "--etcd-endpoints", "h:1"])
    serve_config(alone, deploy_of(alone))
    assert "deploy.connector_unknown the edge 0 to 1: connector 'Carrier'" in caplog.text


def test_a_pipeline_that_vllms_server_can_t_speak_for_is_refused_by_its_document_alone(
    parser: argparse.ArgumentParser, pair: str
) -> None:
    with pytest.raises(ConfigError, match="--api vllm needs a vLLM stage; stage 0 is echo"):
        deploy_of(parser.parse_args(["--deploy-config", pair, "--api", "vllm"]))
    deploy_of(parser.parse_args(["m", "--api", "vllm"]))


def test_what_older_launchers_pass_is_said_once_and_ignored(
    parser: argparse.ArgumentParser, caplog: pytest.LogCaptureFixture
) -> None:
    """Statement 94 of the peer, and the same for what else has no meaning any more."""
    flags = ["--replica-id", "1", "-oma", "h", "-omp", "1", "m", "--deploy-config", "d", "--omni-lb-policy", "random"]
    arguments = parser.parse_args([*HEADLESS, *flags])
    check_flags(arguments)
    warn_of_ignored_flags(arguments)
    told = [record.getMessage().split(":")[0] for record in caplog.records]
    assert told == [
        "flag.ignored --replica-id",
        "flag.ignored --omni-master-address, --omni-master-port",
        "flag.ignored MODEL, --deploy-config",
        "flag.ignored --omni-lb-policy",
    ]


def told_default(action: argparse.Action, text: str) -> str:
    """What the help says of a flag's default; it must be the parser's own where that has one."""
    found = re.search(r"default: ([^)]*)\)", text)
    told = found[1] if found else ""
    if action.default not in (None, False, "", []):
        own = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
        assert told.rpartition(", else ")[2] == own, action.dest
    return told


def test_the_page_has_each_flag_in_its_section_with_its_default(parser: argparse.ArgumentParser) -> None:
    """docs/reference/flags.md: the part of ``omni serve``, a table for each section, in the order of the help."""
    formatter = parser._get_formatter()
    expected = []
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            names = ", ".join(f"`{name}`" for name in action.option_strings or [str(action.metavar)])
            text = formatter._expand_help(action)
            expected.append((group.title, names, told_default(action, text)))
    found, section = [], ""
    page = (ROOT / "docs/reference/flags.md").read_text(encoding="utf-8")
    for line in page.partition("## `omni serve`")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif line.startswith("| `"):
            found.append((section.lower(), cells[0], cells[2].replace("`", "")))
            assert cells[3], f"{cells[0]} is not explained"
    assert found == [(str(section).lower(), names, default) for section, names, default in expected]


def test_the_help_fits_a_terminal_and_every_flag_has_a_section(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 80
    plain = [action.dest for group in parser._action_groups[:2] for action in group._group_actions]
    assert plain == ["help", "parent_pid"]
    assert not [group.title for group in parser._action_groups[2:] if not group._group_actions]

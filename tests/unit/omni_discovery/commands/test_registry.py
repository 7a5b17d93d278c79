"""How commands find the registry: the namespace of the environment, and what is said where nothing is found."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.commands.registry import find_endpoints, tell_if_empty
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.embedded_file import write_endpoint
from omni_discovery.testing import FakeKV, ManualClock
from stage_runtime.cli import build_parser
from tests.support.processes import DEFAULTS
from tests.support.reference import commands


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Those of all commands and of their actions."""
    yield build_parser()
    for name, command in commands().items():
        parser = argparse.ArgumentParser(prog=name)
        command.add_arguments(parser)
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def default_namespaces() -> list[str]:
    """The default of each ``--namespace`` that may be left out."""
    return [
        action.default
        for parser in parsers()
        for action in parser._actions
        if "--namespace" in action.option_strings and not action.required
    ]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)


def test_the_namespace_of_every_command_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing is not set."""
    for value in (None, ""):
        if value is not None:
            monkeypatch.setenv("OMNI_NAMESPACE", value)
        assert set(default_namespaces()) == {"default", "demo"}
    monkeypatch.setenv("OMNI_NAMESPACE", "team-a")
    found = default_namespaces()
    assert set(found) == {"team-a"}
    assert len(found) >= 14


def test_where_no_etcd_is_known_the_embedded_ones_of_other_namespaces_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also beside files that are none of ours, and one of an etcd that is gone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "omni"
    arguments = argparse.Namespace(etcd_endpoints=None, namespace="default")

    def reason() -> str:
        with pytest.raises(ConfigError) as caught:
            find_endpoints(arguments)
        return str(caught.value)

    assert reason().endswith("(no embedded etcd of namespace 'default' runs on this machine)")
    write_endpoint(folder, "demo", "127.0.0.1:1")
    (folder / "not one.etcd.json").write_text("{}")
    (folder / "gone.etcd.json").write_text('{"endpoint": "127.0.0.1:2", "pid": 4194305}')
    assert reason().endswith("; one of 'demo' does: add --namespace demo)")
    write_endpoint(folder, "other", "127.0.0.1:3")
    assert reason().endswith("; those of demo, other do: choose with --namespace)")


async def test_an_empty_namespace_is_told_apart_from_one_where_only_this_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kv = FakeKV(ManualClock())
    await kv.put("/omni/v1/demo/pipeline", b"{}")
    assert await tell_if_empty(kv, "demo") == 0
    assert capsys.readouterr().err == ""
    assert await tell_if_empty(kv, "default") == 0
    assert capsys.readouterr().err == "omni: nothing is in namespace 'default'; there is 'demo': add --namespace demo\n"

"""Whom ``omni why`` and ``omni top`` ask, and who gets the token."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.commands.why import command
from omni_discovery.commands.why.command import WhyCommand, _all_of, hubs_to_ask
from omni_discovery.errors import OmniError
from omni_discovery.receipts.asking import HubUnaskableError, is_proved
from omni_discovery.receipts.receipt import ReceiptLine


def options(*words: str, question: tuple[str, ...] = ("--last-failures",)) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    WhyCommand().add_arguments(parser)
    return parser.parse_args([*question, "--namespace", "of-nobody", *words])


def said(url: str, *words: str) -> str:
    """What is said of a hub that etcd has at this URL, where nobody listens."""
    (ask,) = hubs_to_ask(options("--all-hubs", *words), [url])
    with pytest.raises(HubUnaskableError) as caught:
        ask("/admin/requests")
    return str(caught.value)


@pytest.fixture
def token(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "token").write_text("secret")
    return "--admin-token-file", str(tmp_path / "token")


@pytest.mark.attack("P4")
@pytest.mark.parametrize("url", ["http://a.invalid:1", "https://a.invalid:1", "http://[::1", "ftp://127.0.0.2.invalid"])
def test_an_address_that_etcd_alone_names_does_not_get_the_token(url: str, token: tuple[str, str]) -> None:
    """Unless the operator says so; and the text says how. Without a token it is asked."""
    text = said(url, *token)
    assert "--admin-token-anywhere" in text
    assert "--admin-ca-file" in text
    assert "is not asked" not in said(url, *token, "--admin-token-anywhere")
    assert "is not asked" not in said(url)


def test_what_the_operators_own_authority_has_signed_gets_it() -> None:
    assert is_proved("https://a.invalid:1", "/ca.pem")
    assert not is_proved("https://a.invalid:1", "")
    assert not is_proved("http://a.invalid:1", "/ca.pem")


@pytest.mark.attack("V1")
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_a_port_of_this_machine_that_etcd_names_does_not_get_the_token(url: str, token: tuple[str, str]) -> None:
    """Every user of this machine may listen there, and no hub writes such an address into its record."""
    assert "is not asked" in said(url, *token)


def test_a_hub_that_the_operator_names_gets_it_wherever_it_is(token: tuple[str, str]) -> None:
    (ask,) = hubs_to_ask(options("--hub", "http://a.invalid:1", *token), [])
    with pytest.raises(HubUnaskableError, match="does not answer"):
        ask("/admin/requests")


@pytest.mark.attack("V6")
def test_a_hub_that_answers_nonsense_hides_nothing_of_what_others_say(capsys: pytest.CaptureFixture[str]) -> None:
    right: dict[str, Any] = {"requests": [{"request_id": "a"}]}
    found = _all_of([right, {"requests": [[]]}, {"requests": 1}], "requests", ReceiptLine)
    assert [each.request_id for each in found] == ["a"]
    assert capsys.readouterr().err.count("can't be read") == 2
    with pytest.raises(OmniError, match="can't be read"):
        _all_of([{"requests": [[]]}], "requests", ReceiptLine)


@pytest.mark.parametrize("name", ["0/0", "stage/0", "1" * 4000 + "/0", "", "٣/0", "0"])
def test_failures_where_no_replica_is_are_listed_all_the_same(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"hub": "h", "requests": [{"request_id": "a", "replicas": [name], "received_at": 1e300}]}
    monkeypatch.setattr(command, "hubs_to_ask", lambda *_: [lambda _path: answer])
    monkeypatch.setattr(command, "_look", lambda _: None)
    assert WhyCommand().run(options()) == 0
    assert "????-??-?? ??:??:??  a" in capsys.readouterr().out


@pytest.mark.parametrize(
    "picking",
    [
        {"candidates": [{"replica": "x/y"}]},
        {"candidates": [{"replica": "0/0", "weight": 0.0}], "policy": "round-robin"},
        {"candidates": [{"replica": "0/0"}], "policy": "prefix-hash"},
    ],
)
def test_a_pick_of_nonsense_can_not_be_made_again_and_says_so(
    picking: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picked = {"chosen": "0/0", "policy": "least-load", **picking}
    attempts = [{"stage": 0, "attempt": 0, "picking": picked}, {"stage": 1, "attempt": 0}]
    answer = {"hub": "h", "receipts": [{"request_id": "a", "attempts": attempts}]}
    monkeypatch.setattr(command, "hubs_to_ask", lambda *_: [lambda _path: answer])
    assert WhyCommand().run(options(question=("a", "--replay"))) == 3
    assert "stage 1 attempt 0: not picked" in capsys.readouterr().out

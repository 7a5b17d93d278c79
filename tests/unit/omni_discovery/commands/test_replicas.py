"""``omni replicas`` where etcd answers and the list does not come."""

from __future__ import annotations

import pytest

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.commands.main import main
from omni_discovery.etcd import check


@pytest.mark.attack("K4")
def test_a_list_that_does_not_come_is_not_said_to_be_an_etcd_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(_self: OmniCoordClientForHub, timeout_s: float) -> None:
        raise TimeoutError(f"not within {timeout_s} s")

    monkeypatch.setattr(check, "check_registry", lambda *_: None)
    monkeypatch.setattr(OmniCoordClientForHub, "wait_synced", never)
    assert main(["replicas", "--etcd-endpoints", "127.0.0.1:9"]) != 0
    told = capsys.readouterr().err
    assert "etcd at 127.0.0.1:9 answers, but all of namespace 'default' did not come within 30 s" in told
    assert "omni doctor names keys to delete" in told
    assert "correct --etcd-endpoints" not in told

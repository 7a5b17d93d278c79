"""What a hub says of an etcd of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hub.serve import running_hub
from omni_discovery.commands.stage_options import StageOptions
from omni_discovery.deploy.document import read_deploy
from tests.support.documents import TREE


def config(local: tuple[int, ...]) -> Any:
    stages = tuple(StageOptions(stage_id=stage_id, count=1, endpoints="") for stage_id in local)
    return SimpleNamespace(deploy=read_deploy(yaml.safe_load(TREE), "test"), local_stages=stages)


@pytest.mark.parametrize(("local", "told"), [((0,), "stages_elsewhere=1,2:"), ((), "=0,1,2:"), ((0, 1, 2), "")])
def test_a_hub_whose_other_stages_can_not_join_its_own_etcd_warns(
    caplog: pytest.LogCaptureFixture, local: tuple[int, ...], told: str
) -> None:
    running_hub._warn_if_alone(config(local), "127.0.0.1:2379")
    assert len(caplog.records) == bool(told)
    assert told in caplog.text
    if told:
        assert "no other host can join" in caplog.text
        assert "--etcd-endpoints HOST:PORT" in caplog.text

"""Who puts the first deploy document, where etcd's answer is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from hub.serve.pipeline_claim import claim_pipeline
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.kv import Claim, KeyValue

DEPLOY = DeployConfig(stages=(StageConfig(stage_id=0, engine="echo", final_output="text"),))


class Client:
    """Its first calls fail, the next one finds the document there."""

    def __init__(self, *errors: RegistryUnavailableError) -> None:
        self._errors = list(errors)

    def create_pipeline(self, value: bytes) -> Claim:
        if self._errors:
            raise self._errors.pop(0)
        return Claim(False, 9, KeyValue("pipeline", value, 7, 7))


def test_a_hub_whose_put_may_have_run_asks_what_is_in_force() -> None:
    client: Any = Client(RegistryUnavailableError("no answer", may_have_run=True))
    assert claim_pipeline(client, DEPLOY, "default") == 0


@pytest.mark.parametrize("errors", [(False,), (True, True)])
def test_a_hub_that_hears_nothing_of_its_put_fails_to_start(errors: tuple[bool, ...]) -> None:
    client: Any = Client(*(RegistryUnavailableError("no answer", may_have_run=each) for each in errors))
    with pytest.raises(RegistryUnavailableError):
        claim_pipeline(client, DEPLOY, "default")

"""A document that several tests of this folder read."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import DeployConfig, parse_deploy
from tests.support.documents import TREE


@pytest.fixture
def tree() -> DeployConfig:
    return parse_deploy(TREE, "tree.yaml")

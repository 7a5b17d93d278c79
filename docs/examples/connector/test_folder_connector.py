"""The connector keeps what replicas rely on, and leaves no file behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from folder_connector import FolderConnector

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import OmniConnectorBase
from stage_runtime.testing import ConnectorContract


class TestFolderConnector(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_connector(self, **settings: Any) -> OmniConnectorBase:
        return FolderConnector({"folder": str(self.folder), **settings})


def test_what_is_closed_or_consumed_leaves_no_file(tmp_path: Path) -> None:
    with FolderConnector({"folder": str(tmp_path)}) as connector:
        _, _, metadata = connector.put("0", "1", "a", {"some": "thing"})
        connector.put("0", "1", "b", {"some": "thing"})
        assert connector.get("0", "1", "a", metadata)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one that all hosts mount"):
        FolderConnector({"folder": "/no/such/folder"})

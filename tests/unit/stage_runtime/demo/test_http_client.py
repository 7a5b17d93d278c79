"""The demo asks with the key that its hub asks for, where its user has set one."""

from __future__ import annotations

import pytest

from stage_runtime.demo.http_client import json_headers
from stage_runtime.demo.show import ask_step


def test_a_key_of_the_environment_goes_along_and_into_the_command_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert json_headers() == {"Content-Type": "application/json"}
    assert "Authorization" not in ask_step("u")
    monkeypatch.setenv("VLLM_API_KEY", "k-1")
    assert json_headers()["Authorization"] == "Bearer k-1"
    pasted = ask_step("u")
    assert '-H "Authorization: Bearer $VLLM_API_KEY" \\\n' in pasted
    assert "k-1" not in pasted

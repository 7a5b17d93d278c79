"""The whole surface of a hub, asked by schemathesis: all that /openapi.json allows and forbids, with a fixed seed.

What it looks for: statuses of 500 and above, answers of other types than described, errors that have another body than
OpenAI's, requests that the description forbids and the hub takes, and methods that are not refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.integration.api.test_description import ALL
from tests.support.speaking import served

CONFIG = """
[checks]
# What a schema can't say is refused with 400, such as a prompt of spaces, or a parameter that the stage does not know.
positive_data_acceptance.enabled = false
# A time-out of a nanosecond is a number above 0.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
#: Of each route, drawn; the long form draws more.
EXAMPLES = 10 if os.environ.get("OMNI_LONG") else 2
FLAGS = f"--phases examples,coverage,fuzzing --max-examples {EXAMPLES} --seed 1"
HOW = "--no-shrink --continue-on-failure --workers 1"
#: Only there so that a hub that hangs ends the test.
TIMEOUT_S = 500.0


@pytest.mark.long
@pytest.mark.attack("C15")
async def test_no_generated_request_finds_a_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All routes are asked. The hub's own log has no error either."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG, encoding="utf-8")
    async with served(ALL) as hub:
        url = f"{hub.address}/openapi.json"
        async with httpx.AsyncClient() as http:
            count = sum(len(methods) for methods in (await http.get(url)).json()["paths"].values())
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", url]
        running = await asyncio.create_subprocess_exec(
            *command,
            *FLAGS.split(),
            *HOW.split(),
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said = (await running.communicate())[0].decode()
        finally:
            if running.returncode is None:
                running.kill()
                await running.wait()
        assert running.returncode == 0, said
        assert re.search(r"Tested: (\d+)", said)[1] == str(count), said  # type: ignore[index]
        assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
        await asyncio.wait_for(still_answers(hub.address), 30.0)


async def still_answers(address: str) -> None:
    async with httpx.AsyncClient(timeout=30.0) as http:
        answer = await http.post(f"{address}/v1/completions", json={"prompt": "still there"})
        assert answer.json()["choices"][0]["text"].split() == ["still", "there"]

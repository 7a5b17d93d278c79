"""vLLM-Omni's own server over a hub, in the Python that has it: its tests, run from this one's."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.omni_cluster import PYTHON, ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    # CI makes it: there, its absence is an error.
    pytest.mark.skipif(
        not (PYTHON.exists() or "CI" in os.environ), reason="vLLM-Omni has an environment of its own: make setup-omni"
    ),
]
_MOST_S = 900.0


def test_its_server_passes_its_tests_in_its_own_python() -> None:
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_vllm_omni_server.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_MOST_S, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5000:]
    assert " skipped" not in ran.stdout

"""What a person pastes from a page first, run in a shell as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import DEFAULTS, alive
from tests.support.registry import quiet_port

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_blocks_of_the_deploy_page_answer_when_pasted(tmp_path: Path) -> None:
    """1. the document is written to a file
    2. the commands are pasted at once: the second waits until the server that the first has started can serve
    3. the answer streams, and the last line stops the server

    Only the port is another, since other tests run beside this one.
    """
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    document, commands = re.findall(r"^```(?:yaml|bash)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "try.yaml").write_text(document)
    assert document.startswith("# try.yaml\n")
    port = quiet_port()
    script = commands.replace("localhost:8000", f"localhost:{port}").replace(
        "omni serve ", f"omni serve --port {port} "
    )
    assert script.count(str(port)) == 3
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    shell = subprocess.run(
        ["bash", "-c", f"{script}\necho pid $!; wait $!; echo ended with $?"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    said = shell.stdout + shell.stderr
    words = re.findall(r'"content": ?"(one|two|three) ?"', shell.stdout)
    assert words == ["one", "two", "three"], said
    assert "data: [DONE]" in shell.stdout, said
    assert "ended with 0" in shell.stdout, said
    pid = re.findall(r"^pid (\d+)$", shell.stdout, re.MULTILINE)
    assert alive([int(each) for each in pid]) == []

"""docs/reference/environment.md names every environment variable that anything here reads or sets, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("hub", "omni_discovery", "stage_runtime")
#: Whose variables they are, so that other words in capitals are not taken for one.
VARIABLE = re.compile(
    r"(OMNI|XDG|CUDA|HIP|ROCR|ASCEND|VLLM|HF|MASTER|GRPC|OMP|RAY|NCCL|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|PYTHON)(_[A-Z0-9]+)+|PYTHON[A-Z]+"
)


def sources() -> dict[str, str]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def named(text: str) -> set[str]:
    """The variables whose names stand in a string of their own."""
    if not re.search(rf"[\"']({VARIABLE.pattern})[\"']", text):
        return set()
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and VARIABLE.fullmatch(value)}


def read_by_name(text: str) -> set[str]:
    """The names in ``os.environ[...]``, ``os.environ.get(...)``, ``os.getenv(...)`` and their like."""
    return set(re.findall(r"os\.(?:environ(?:\.\w+\(|\[)|getenv\()\s*[\"'](\w+)[\"']", text))


def test_the_page_names_every_variable_and_no_other() -> None:
    section = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8").partition("\n## Environment\n")[2]
    page = {name for name in re.findall(r"`(\w+)`", section.partition("\n## ")[0]) if VARIABLE.fullmatch(name)}
    assert page == set.union(*map(named, sources().values()))


def test_no_variable_is_read_that_the_pattern_does_not_know() -> None:
    found = {name: read_by_name(text) for name, text in sources().items()}
    assert all(VARIABLE.fullmatch(variable) for names in found.values() for variable in names), found
    assert found["omni_discovery/commands/registry.py"] >= {
        "OMNI_ETCD_ENDPOINTS",
        "OMNI_ETCD_PASSWORD",
        "XDG_RUNTIME_DIR",
    }

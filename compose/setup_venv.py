"""Make the checkout's virtual environment: `python3 compose/setup_venv.py demo|test`.

Needs nothing but Python and its venv module. Installs the pinned packages of compose/lock-*.txt, then the project
itself, and says how long that took and how much was downloaded. Does nothing when all is in place.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = "uv==0.13.8"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOCKS = {"demo": ["lock-cpu.txt"], "test": ["lock-cpu.txt", "lock-test.txt"]}


def main() -> int:
    """Return the exit code."""
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in LOCKS:
        print("usage: python3 compose/setup_venv.py demo|test", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is run by whatever python3 is
        print(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}.", file=sys.stderr)
        print("Name another one: make PYTHON=python3.11 demo", file=sys.stderr)
        return 2
    stamp = VENV / f".omni-{kind}-{_digest(kind)}"
    if stamp.exists():
        return 0
    try:
        _install(kind)
    except subprocess.CalledProcessError as error:
        print(f"\nSetting up .venv failed at: {' '.join(map(str, error.cmd[:6]))} ...", file=sys.stderr)
        print("What went wrong is above. Mend it and run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again; it goes on from there.", file=sys.stderr)
        return 130
    stamp.touch()
    return 0


def _install(kind: str) -> None:
    begin_s, begin_bytes = time.monotonic(), _received_bytes()
    if not PYTHON.exists():
        _say("1/3 making .venv")
        venv.create(VENV, with_pip=True)
    _say("2/3 fetching the installer")
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
    _say("3/3 installing the pinned packages (about 400 MB on the first run) and compiling them")
    locks = [argument for name in LOCKS[kind] for argument in ("-r", str(ROOT / "compose" / name))]
    _uv("--no-deps", "--compile-bytecode", *_torch_source(), *locks)
    _uv("--no-deps", "--editable", str(ROOT))
    megabytes = (_received_bytes() - begin_bytes) / 1e6
    _say(f"ready: {time.monotonic() - begin_s:.0f} s, {megabytes:.0f} MB downloaded\n")


def _uv(*arguments: str) -> None:
    environment = dict(os.environ)
    certificate = environment.get("PIP_CERT")
    if certificate:
        environment.setdefault("SSL_CERT_FILE", certificate)
    # uv does not read pip's settings; a mirror that pip was told of has to be handed on.
    index = environment.get("PIP_INDEX_URL") or _pip_setting("index-url")
    if index:
        environment.setdefault("UV_DEFAULT_INDEX", index)
    command = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), *arguments]
    subprocess.run(command, check=True, env=environment)


def _torch_source() -> list[str]:
    """Where torch's CPU wheel comes from: a folder that has it, else PyTorch's own CPU index."""
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if any(Path(folder.removeprefix("file://")).glob("torch-*+cpu-*.whl")):
            return ["--find-links", folder]
    return ["--extra-index-url", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]


def _pip_setting(name: str) -> str:
    found = subprocess.run(
        [PYTHON, "-m", "pip", "config", "get", f"global.{name}"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else ""


def _received_bytes() -> int:
    """Bytes received by all interfaces but loopback since boot; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return 0
    counters = (line.split(":", 1) for line in lines)
    return sum(int(rest.split()[0]) for name, rest in counters if name.strip() != "lo")


def _digest(kind: str) -> str:
    parts = [ROOT / "pyproject.toml", Path(__file__), *(ROOT / "compose" / name for name in LOCKS[kind])]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts) + str(ROOT).encode()).hexdigest()[:16]


def _say(text: str) -> None:
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

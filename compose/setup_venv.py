"""Make a virtual environment of the checkout: `python3 compose/setup_venv.py demo|test|audit|omni`.

Needs nothing but Python and its venv module. Installs the pinned packages of compose/lock-*.txt, then the project
itself, and says how long that took and how much was downloaded. Does nothing when all is in place.

Nothing is installed whose hash is not in a lock, builds fetch nothing, and each package has one index: PyTorch's CPU
index serves torch and nothing else, the default index everything else.
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
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: pip installs the first one: it has the installer of the others, and what builds.
BUILD_LOCK = "lock-build.txt"
TORCH_LOCK = "lock-torch-cpu.txt"
LOCKS = {
    "demo": ["lock-cpu.txt"],
    "test": ["lock-cpu.txt", "lock-test.txt"],
    "audit": ["lock-audit.txt"],
    "omni": ["lock-omni-cpu.txt"],
}
#: The tools of `make sbom` and `make audit` must not meet what they look at; vLLM-Omni wants other versions of vLLM and
#: diffusers than the rest runs on.
VENVS = {
    "demo": ROOT / ".venv",
    "test": ROOT / ".venv",
    "audit": ROOT / ".venv-audit",
    "omni": ROOT / ".venv-omni",
}
#: A package of the tests that is installed beside the project: it is found by its entry points.
OMNI_CPU = ROOT / "tests" / "support" / "omni_cpu"


def main() -> int:
    """Return the exit code."""
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in LOCKS:
        print(f"usage: python3 compose/setup_venv.py {'|'.join(LOCKS)}", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is run by whatever python3 is
        print(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}.", file=sys.stderr)
        print("Name another one: make PYTHON=python3.11 demo", file=sys.stderr)
        return 2
    stamp = VENVS[kind] / f".omni-{kind}-{_digest(kind)}"
    if stamp.exists():
        return 0
    try:
        _install(kind)
    except subprocess.CalledProcessError as error:
        print(f"\nSetting up {VENVS[kind].name} failed at: {' '.join(map(str, error.cmd[:6]))} ...", file=sys.stderr)
        print("What went wrong is above. Mend it and run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again; it goes on from there.", file=sys.stderr)
        return 130
    stamp.touch()
    return 0


def _install(kind: str) -> None:
    begin_s, begin_bytes = time.monotonic(), _received_bytes()
    python = VENVS[kind] / "bin" / "python"
    if not python.exists():
        _say(f"1/3 making {VENVS[kind].name}")
        venv.create(VENVS[kind], with_pip=True)
    _say("2/3 fetching the installer")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", _lock(BUILD_LOCK)], check=True)
    size = "" if kind == "audit" else " (about 400 MB on the first run)"
    _say(f"3/3 installing the pinned packages{size} and compiling them")
    hashed = ["--no-deps", "--no-build-isolation", "--require-hashes", "--compile-bytecode"]
    if kind != "audit":
        _uv(python, *hashed, *_torch_source(), "-r", _lock(TORCH_LOCK))
    _uv(python, *hashed, *(argument for name in LOCKS[kind] for argument in ("-r", _lock(name))))
    if kind != "audit":
        _uv(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if kind == "omni":
        _uv(python, "--no-deps", "--no-build-isolation", "--reinstall", "--compile-bytecode", str(OMNI_CPU))
    megabytes = (_received_bytes() - begin_bytes) / 1e6
    _say(f"ready: {time.monotonic() - begin_s:.0f} s, {megabytes:.0f} MB downloaded\n")


def _lock(name: str) -> str:
    return str(ROOT / "compose" / name)


def _uv(python: Path, *arguments: str) -> None:
    # Its own settings would come from any folder above the checkout, which may be somebody else's.
    environment = {**os.environ, "UV_NO_CONFIG": "1"}
    certificate = environment.get("PIP_CERT")
    if certificate:
        environment.setdefault("SSL_CERT_FILE", certificate)
    # uv does not read pip's settings; a mirror that pip was told of has to be handed on.
    index = environment.get("PIP_INDEX_URL") or _pip_setting(python, "index-url")
    if index:
        environment.setdefault("UV_DEFAULT_INDEX", index)
    # On a terminal it shows how far it is; elsewhere that would be a line for each of more than a hundred packages.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [str(python), "-m", "uv", "pip", "install", *quiet, "--python", str(python), *arguments]
    subprocess.run(command, check=True, env=environment)


def _torch_source() -> list[str]:
    """Where torch's CPU wheel comes from: a folder that has it, else PyTorch's own CPU index, and nowhere else."""
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if any(Path(folder.removeprefix("file://")).glob("torch-*+cpu-*.whl")):
            return ["--no-index", "--find-links", folder]
    return ["--default-index", TORCH_CPU_INDEX]


def _pip_setting(python: Path, name: str) -> str:
    found = subprocess.run(
        [python, "-m", "pip", "config", "get", f"global.{name}"], capture_output=True, text=True, check=False
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
    locks = [ROOT / "compose" / name for name in (BUILD_LOCK, TORCH_LOCK, *LOCKS[kind])]
    parts = [ROOT / "pyproject.toml", Path(__file__), *locks]
    if kind == "omni":
        parts += sorted(path for path in OMNI_CPU.rglob("*") if path.suffix in (".py", ".pth", ".toml"))
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts) + str(ROOT).encode()).hexdigest()[:16]


def _say(text: str) -> None:
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

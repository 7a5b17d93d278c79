"""The project's images where nothing can be pulled: this machine's Python and packages, then compose/Dockerfile's own.

What the Dockerfile fetches (its base image, Debian's packages, pip's) comes from here instead; its other instructions
are built as they stand, over the files that its ignore file lets through.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.binaries import wheel_etcd

ROOT: Final = Path(__file__).resolve().parents[2]
DOCKERFILE: Final = ROOT / "compose" / "Dockerfile"

#: What a hub and the stages of pair-echo.yaml need: no torch, no vLLM.
SMALL: Final = ("omni-discovery[hub]", "numpy", "pillow", "safetensors")
_OURS: Final = ("omni_discovery", "hub", "stage_runtime")
#: What health checks and probes call.
_TOOLS: Final = ("sh", "grep", "sleep")
_NOT_OF_THE_LIBRARY: Final = {"site-packages", "dist-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3"}
_PASSWD: Final = "root:x:0:0::/:/bin/sh\nomni:x:10001:10001::/state:/bin/sh\n"
_USER: Final = 10001
_DOCKER_S: Final = 300


@contextmanager
def product_image(packages: Iterable[str] = SMALL) -> Iterator[str]:
    """The tag of an image of the Dockerfile's target ``cpu``, with these packages and all that they require."""
    number = uuid.uuid4().hex[:12]
    base, tag = f"omni-test-base:{number}", f"omni-test:{number}"
    with _removed(tag, base):
        _import_image(base, lambda tar: _add_product(tar, packages))
        docker("build", "--quiet", "--tag", tag, "-", given=_context(base))
        yield tag


@contextmanager
def etcd_image() -> Iterator[str]:
    """The tag of an image with the wheel's etcd on its PATH, as etcd's own images have it."""
    tag = f"omni-test-etcd:{uuid.uuid4().hex[:12]}"
    with _removed(tag):
        _import_image(tag, _add_etcd)
        yield tag


def docker(*words: str, given: bytes | None = None, timeout_s: float = _DOCKER_S) -> str:
    """What a docker command prints; AssertionError with its last words if it fails."""
    ran = subprocess.run(["docker", *words], input=given, capture_output=True, timeout=timeout_s, check=False)
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    assert ran.returncode == 0, f"docker {' '.join(words)}: {said[-3000:]}"
    return ran.stdout.decode()


def instructions_of_cpu(text: str, base: str) -> str:
    """The Dockerfile's target ``cpu`` on another base, without the steps that fetch packages."""
    begin = re.search(r"^FROM \S+ AS cpu$", text, re.MULTILINE)
    assert begin is not None
    lines = re.sub(r"\\\n\s*", "", text[begin.end() :]).splitlines()
    return "\n".join([f"FROM {base}", *(line for line in lines if not line.startswith("RUN "))]) + "\n"


@contextmanager
def _removed(*tags: str) -> Iterator[None]:
    try:
        yield
    finally:
        subprocess.run(["docker", "rmi", "--force", *tags], capture_output=True, timeout=60, check=False)


def _import_image(tag: str, add: Callable[[tarfile.TarFile], None]) -> None:
    """Make an image of one layer from the files that ``add`` adds to a tar."""
    command = ["docker", "import", "-", tag]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as importing:
        assert importing.stdin is not None
        with tarfile.open(fileobj=importing.stdin, mode="w|") as tar:
            add(tar)
        importing.stdin.close()
        assert importing.wait(_DOCKER_S) == 0


def _context(base: str) -> bytes:
    """What docker build is sent: the files that the ignore file lets through, and the changed Dockerfile."""
    from docker.utils.build import exclude_paths

    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = [line for line in lines if not line.startswith("#")]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(exclude_paths(str(ROOT), ignored)):
            tar.add(ROOT / name, name, recursive=False)
        _add_text(tar, "Dockerfile", instructions_of_cpu(DOCKERFILE.read_text(encoding="utf-8"), base))
    return packed.getvalue()


# ---- what is in an image


def _add_etcd(tar: tarfile.TarFile) -> None:
    binary = wheel_etcd()
    for each in (binary, binary.with_name("etcdctl")):
        tar.add(each, f"usr/local/bin/{each.name}")
    _add_libraries(tar, [binary])


def _add_product(tar: tarfile.TarFile, packages: Iterable[str]) -> None:
    """Python, the packages, this project as pip would install it, and the user that the Dockerfile makes."""
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    library = Path(sysconfig.get_path("stdlib"))
    packages_in = _run(str(python), "-I", "-c", "import site; print(site.getsitepackages()[0])").strip()
    trees = [(python, str(python)), *_of_library(library), *_of_packages(packages, packages_in)]
    trees += [(ROOT / name, f"{packages_in}/{name}") for name in _OURS]
    for tool in _TOOLS:
        trees.append((Path(_run("sh", "-c", f"command -v {tool}").strip()).resolve(), f"/bin/{tool}"))
    for path, name in trees:
        tar.add(path, name.lstrip("/"))
    _add_libraries(tar, [path for path, _ in trees])
    for name in ("python", "python3"):
        _add_link(tar, f"usr/local/bin/{name}", str(python))
    main = f"#!{python}\nimport sys\nfrom omni_discovery.commands.main import main\nsys.exit(main())\n"
    _add_text(tar, "usr/local/bin/omni", main, mode=0o755)
    _add_text(tar, "etc/passwd", _PASSWD)
    _add_folder(tar, "tmp", mode=0o1777)
    _add_folder(tar, "state", user=_USER)


def _of_library(folder: Path) -> list[tuple[Path, str]]:
    return [(path, str(path)) for path in folder.iterdir() if path.name not in _NOT_OF_THE_LIBRARY]


def _of_packages(packages: Iterable[str], folder: str) -> list[tuple[Path, str]]:
    """The files and folders that the packages have in site-packages."""
    found: dict[str, Path] = {}
    for name in _closure(packages):
        files = distribution(name).files or ()
        tops = {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}
        if name == "omni-discovery":
            tops = {top for top in tops if top.endswith(".dist-info")}
        found |= {f"{folder}/{top}": Path(str(distribution(name).locate_file(top))) for top in tops}
    return [(path, name) for name, path in found.items()]


def _closure(packages: Iterable[str]) -> set[str]:
    """The packages and all that they require, as they are installed here."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(each) for each in packages]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        new = {"", *wanted.extras} - found.setdefault(name, set())
        found[name] |= new
        required = map(Requirement, distribution(name).requires or ())
        waiting += [
            each
            for each in required
            if any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in new)
        ]
    return set(found)


def _add_libraries(tar: tarfile.TarFile, trees: Iterable[Path]) -> None:
    """The shared libraries, and the loader, that programs and modules need from outside of their own folders."""
    files = [path for tree in trees for path in ([tree] if tree.is_file() else tree.rglob("*")) if _is_elf(path)]
    printed = _run("ldd", *map(str, files))
    for library in sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(", printed, re.MULTILINE))):
        if not any(Path(library).is_relative_to(tree) for tree in trees):
            tar.add(Path(library).resolve(), library.lstrip("/"))


def _is_elf(path: Path) -> bool:
    if not path.is_file() or (path.suffix in {".py", ".pyc"}):
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _run(*command: str) -> str:
    # ldd's code is 1 where one of its files is no dynamic executable.
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=command[0] != "ldd").stdout


def _add_text(tar: tarfile.TarFile, name: str, text: str, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), mode
    tar.addfile(entry, io.BytesIO(text.encode()))


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _add_folder(tar: tarfile.TarFile, name: str, *, mode: int = 0o755, user: int = 0) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, user, user
    tar.addfile(entry)

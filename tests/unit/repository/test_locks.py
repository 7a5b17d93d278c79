"""The pinned environments are whole: what `pip check` would name in them is what their files explain, and no more.

And they are what was meant: each pin has a hash, each package one index, and nothing is installed without its hash.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from compose import setup_venv
from compose.check_engines import MINORS

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "compose"
#: Each environment by the files that it is made of, as setup_venv.py installs them.
ENVIRONMENTS = {
    "demo": ["lock-torch-cpu.txt", "lock-cpu.in"],
    "test": ["lock-torch-cpu.txt", "lock-cpu.in", "lock-test.in"],
}
PINS = sorted(path.stem for path in COMPOSE.glob("lock-*.in"))
HASHED = sorted(path.name for path in COMPOSE.glob("lock-*.txt"))
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

_PINNED = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ;.*)?(?: \\)?$", re.MULTILINE)
#: A requirement with at least one hash, and nothing else.
_HASHED = re.compile(r"[\w.-]+==[^\s;]+(?: ;[^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")
#: A line of the list of what is left out: `#   name, name: why (who requires it)`.
_LEFT_OUT = re.compile(r"^#   ([\w., -]+): \S.* \(([\w., -]+)\)$", re.MULTILINE)


def text_of(environment: str) -> str:
    return "\n".join((ROOT / "compose" / name).read_text(encoding="utf-8") for name in ENVIRONMENTS[environment])


def pinned(environment: str) -> dict[str, str]:
    """The version of each package, by canonical name."""
    found = _PINNED.findall(text_of(environment))
    names = [canonicalize_name(name) for name, _ in found]
    assert len(names) == len(set(names)), "a package is pinned twice"
    return dict(zip(names, (version for _, version in found), strict=True))


def left_out(environment: str) -> set[tuple[str, str]]:
    """What the files say is left out: the package that requires it, and its own name."""
    lines = [line for line in text_of(environment).splitlines() if line.startswith("#   ")]
    found = _LEFT_OUT.findall(text_of(environment))
    assert len(found) == len(lines), "a line of the list of what is left out can't be read"
    return {
        (canonicalize_name(owner), canonicalize_name(name))
        for names, owners in found
        for name in names.split(", ")
        for owner in owners.split(", ")
    }


def broken(environment: str) -> dict[tuple[str, str], str]:
    """What `pip check` would say of an environment of exactly the pinned packages."""
    versions = pinned(environment)
    found = {}
    for owner in versions:
        for text in requires(owner) or ():
            required = Requirement(text)
            name = canonicalize_name(required.name)
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            if name not in versions:
                found[owner, name] = f"{owner} requires {text}, which is not pinned"
            elif not required.specifier.contains(versions[name], prereleases=True):
                found[owner, name] = f"{owner} requires {text}; pinned is {versions[name]}"
    return found


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_pip_check_would_name_only_what_the_lock_explains(environment: str) -> None:
    found, explained = broken(environment), left_out(environment)
    assert [text for key, text in found.items() if key not in explained] == []
    assert explained - set(found) == set(), "explained, and not missing"


def test_what_a_user_imports_beside_the_product_is_in_the_demo() -> None:
    """The client that the pages show, with all that it needs."""
    assert "openai" in pinned("demo")
    assert not [key for key in broken("demo") if key[0] in {"openai", "omni-discovery", "httpx"}]


def test_the_projects_own_requirements_are_met_by_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {"demo": list(project["dependencies"])}
    for name in ("embedded", "hub", "stage", "vllm-cpu", "diffusers", "tracing"):
        asked["demo"] += extras[name]
    asked["test"] = [
        *asked["demo"],
        *extras["test"],
        *extras["ray"],
        *extras["yuanrong"],
        *extras["mooncake"],
        *extras["job-store"],
    ]
    for environment, texts in asked.items():
        versions = pinned(environment)
        for required in map(Requirement, texts):
            if required.name != "omni-discovery":
                version = versions[canonicalize_name(required.name)]
                assert required.specifier.contains(version, prereleases=True), f"{required}: {version} is pinned"


@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu"])
def test_a_vllm_that_was_not_tested_is_not_installed(extra: str) -> None:
    """From the oldest minor that `make engines` runs to the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (engine,) = [Requirement(each) for each in project["optional-dependencies"][extra] if "omni" not in each]
    minors = sorted({int(minor.partition("+")[0].partition(".")[2]) for minor in MINORS})
    assert engine.specifier == SpecifierSet(f">=0.{minors[0]},<0.{minors[-1] + 1}")


def test_the_environment_of_vllm_omni_has_one_tested_minor_and_the_vllm_beside_it() -> None:
    """The engine refuses other minors by name; the environment's own is one that it takes."""
    versions = versions_in("lock-omni-cpu.txt")
    minors = {versions[name].rpartition(".")[0] for name in ("vllm-omni", "vllm-cpu")}
    assert minors == {"0.30"}


# ---- hashes, and where packages come from


def versions_in(name: str) -> dict[str, str]:
    found = _PINNED.findall((COMPOSE / name).read_text(encoding="utf-8"))
    return {canonicalize_name(package): version for package, version in found}


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_has_a_hash_and_a_lock_names_no_index(name: str) -> None:
    text = (COMPOSE / name).read_text(encoding="utf-8")
    assert _HASHED.sub("", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)) == ""
    assert len(_HASHED.findall(text)) == len(versions_in(name)) >= 1
    assert "://" not in text


@pytest.mark.parametrize("stem", PINS)
def test_a_lock_has_the_versions_of_its_pins(stem: str) -> None:
    """Else somebody has changed one of the two: `make lock`."""
    assert versions_in(f"{stem}.txt") == versions_in(f"{stem}.in")


def test_a_package_in_two_locks_has_one_version() -> None:
    """But the tools that look at them, and vLLM-Omni with all that it pins, which have environments of their own."""
    known: dict[str, str] = {}
    for name in HASHED:
        if name not in ("lock-audit.txt", "lock-omni-cpu.txt"):
            for package, version in versions_in(name).items():
                assert known.setdefault(package, version) == version, f"{package} in {name}"


def files_that_install() -> dict[str, str]:
    files = [ROOT / "Makefile", ROOT / "README.md", *COMPOSE.rglob("*.py"), COMPOSE / "Dockerfile"]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / ".ci").iterdir()]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_each_package_has_one_index() -> None:
    """No second index may answer for a name: what stands there first would be installed."""
    for name, text in files_that_install().items():
        for flag in ("extra-index-url", "unsafe-best-match", "unsafe-first-match", "trusted-host"):
            assert flag not in text, name


def test_torchs_index_serves_torch_alone() -> None:
    assert set(versions_in("lock-torch-cpu.txt")) == {"torch"}
    for name in HASHED:
        assert ("torch" in versions_in(name)) == (name == "lock-torch-cpu.txt")
    text = re.sub(r"\\\n\s*", "", (COMPOSE / "Dockerfile").read_text(encoding="utf-8"))
    (asked,) = [command for line in text.splitlines() for command in line.split("&&") if TORCH_INDEX in command]
    assert re.findall(r"-r (\S+)", asked) == ["compose/lock-torch-cpu.txt"]


def test_what_the_images_and_the_environments_install_is_checked_by_its_hash() -> None:
    """All but this project itself, whose build takes what is installed already."""
    text = re.sub(r"\\\n\s*", "", (COMPOSE / "Dockerfile").read_text(encoding="utf-8"))
    commands = [part for line in text.splitlines() for part in re.sub(r"^RUN ", "", line).split("&&")]
    installing = [part for part in commands if re.search(r"pip (install|wheel)", part)]
    assert len(installing) >= 6
    for command in installing:
        assert "--no-deps" in command
        is_of_the_project = command.rstrip().endswith((" .", "/wheels/*.whl"))
        assert ("--require-hashes" in command) != is_of_the_project, command
        if is_of_the_project:
            assert "--no-build-isolation" in command or "--no-index" in command


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands by which setup_venv.py would make each environment."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(list(map(str, command)))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(setup_venv.subprocess, "run", run)
    monkeypatch.setattr(setup_venv.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(setup_venv, "VENVS", dict.fromkeys(setup_venv.LOCKS, tmp_path))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    for kind in setup_venv.LOCKS:
        setup_venv._install(kind)
    return [command for command in commands if "install" in command]


def test_setting_up_takes_nothing_without_a_hash_and_torch_from_its_own_index(installed: list[list[str]]) -> None:
    locks = [name for command in installed for name in HASHED if str(COMPOSE / name) in command]
    assert set(locks) == set(HASHED) - {"lock-gpu.txt"}, "each lock is installed by something"
    for command in installed:
        assert "--no-deps" in command
        is_of_the_project = "--editable" in command or str(setup_venv.OMNI_CPU) in command
        assert ("--require-hashes" in command) != is_of_the_project
        assert "--no-build-isolation" in command or str(COMPOSE / "lock-build.txt") in command
        names = [name for name in HASHED if str(COMPOSE / name) in command]
        assert (TORCH_INDEX in command) == (names == ["lock-torch-cpu.txt"])


def test_the_image_for_gpus_adds_all_that_vllms_own_lacks() -> None:
    """By what the build of vLLM for CPUs requires, which stands for the other."""
    there = closure(["vllm-cpu"]) | set(versions_in("lock-gpu.txt"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(each).name for each in (*project["dependencies"], *extras["hub"], *extras["stage"])]
    assert closure(asked) - there == set()


def closure(names: Sequence[str]) -> set[str]:
    """The packages and all that they require, in this environment's versions."""
    walked: set[tuple[str, str]] = set()
    left = [(canonicalize_name(name), "") for name in names]
    while left:
        name, extra = left.pop()
        if (name, extra) in walked:
            continue
        walked.add((name, extra))
        try:
            required = [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:
            continue
        wanted = [each for each in required if each.marker is None or each.marker.evaluate({"extra": extra})]
        left += [(canonicalize_name(each.name), more) for each in wanted for more in ("", *each.extras)]
    return {name for name, _ in walked}


@pytest.mark.attack("H1")
def test_the_folders_above_a_checkout_do_not_change_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of uv's in a folder above, where another user may put them, are not even read: uv would refuse these."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "uv.toml").write_text("nonsense = [", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "checkout")
    setup_venv._uv(Path(sys.executable), "--offline", "--no-deps", "--dry-run", "msgspec")

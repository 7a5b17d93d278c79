"""systemd units and Kubernetes manifests: checked by the readers' own schemas, and against what the product does."""

from __future__ import annotations

import configparser
import copy
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from omni_discovery.deploy.load import load_deploy
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from tests.support.serve_commands import ETCD, parsed

ROOT = Path(__file__).resolve().parents[3]
SYSTEMD = ROOT / "compose" / "systemd"
KUBERNETES = ROOT / "compose" / "kubernetes"
UNITS = ("omni-hub.service", "omni-stage@.service")
BASE = KUBERNETES / "base"
#: The oldest and the newest release that the validator knows of those that have all that is used.
RELEASES = ("1.27", "1.37")


def drain_s(drain_timeout_s: float) -> float:
    """After SIGTERM, when a supervisor kills what has not drained."""
    replica = ReplicaConfig(stage_id=0, endpoints="etcd:2379", namespace="default")
    return drain_timeout_s + SupervisorConfig(replica=replica).kill_after_s


# ---- systemd


def read_unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Sections of keys with all their values."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in (SYSTEMD / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            section.setdefault(key, []).append(value)
    return sections


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_omni_and_gives_it_the_time_to_stop(name: str) -> None:
    service = read_unit(name)["Service"]
    (command,) = service["ExecStart"]
    program, *words = shlex.split(command.replace("%i", "1"))
    assert program == "/opt/omni-discovery/.venv/bin/omni"
    assert words[-1] in {"$HUB_FLAGS", "$STAGE_FLAGS"}
    arguments = parsed(words[:-1], *ETCD)
    # A hub alone has nothing to drain but open answers.
    needed_s = 5.0 if arguments.hub_only else drain_s(arguments.drain_timeout)
    assert int(service["TimeoutStopSec"][0]) > needed_s + 10
    for key, value in {"Type": "exec", "KillMode": "mixed", "Restart": "on-failure", "OOMPolicy": "continue"}.items():
        assert service[key] == [value]
    assert int(service["LimitNOFILE"][0]) >= 65536


def test_no_option_takes_gpus_compiled_code_or_shared_memory_away_from_stages() -> None:
    assert not set(read_unit(UNITS[1])["Service"]) & {
        *("PrivateDevices", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateIPC", "RemoveIPC"),
        *("DynamicUser", "InaccessiblePaths", "PrivateNetwork", "SystemCallFilter", "ProtectProc"),
    }


def test_the_settings_file_has_the_variables_that_the_units_ask_for() -> None:
    settings = configparser.ConfigParser()
    settings.optionxform = str  # type: ignore[assignment,method-assign]
    settings.read_string("[file]\n" + (SYSTEMD / "omni.env").read_text(encoding="utf-8"))
    assert set(settings["file"]) == {"OMNI_ETCD_ENDPOINTS", "HUB_FLAGS"}
    parsed(["serve", "--hub-only", "--deploy-config", "pair.yaml", *shlex.split(settings["file"]["HUB_FLAGS"])], *ETCD)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    """With programs in place of those that only an installed host has; a template by one of its instances."""
    for name in UNITS:
        text = (SYSTEMD / name).read_text(encoding="utf-8")
        text = re.sub(r"/opt/omni-discovery/\.venv/bin/omni|/usr/bin/nvidia-modprobe", "/bin/true", text)
        (tmp_path / name.replace("@.", "@1.")).write_text(text, encoding="utf-8")
    files = sorted(map(str, tmp_path.iterdir()))
    ran = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True, timeout=60, check=False)
    # Other units of this machine may have faults of their own.
    assert not [line for line in ran.stderr.splitlines() if "omni-" in line]
    assert ran.returncode == 0


# ---- Kubernetes


def manifests() -> list[dict[str, Any]]:
    """Every object of the base."""
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert {BASE / name for name in listed} == set(BASE.glob("*.yaml")) - {BASE / "kustomization.yaml"}
    texts = [(BASE / name).read_text(encoding="utf-8") for name in listed]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def with_gpus() -> list[dict[str, Any]]:
    """The base with the patches of the overlay."""
    overlay = yaml.safe_load((KUBERNETES / "gpu" / "kustomization.yaml").read_text(encoding="utf-8"))
    found = copy.deepcopy(manifests())
    for patch in overlay["patches"]:
        target = patch["target"]
        hit = [
            document
            for document in found
            if document["kind"] == target["kind"] and re.fullmatch(target["name"], document["metadata"]["name"])
        ]
        assert hit
        for document in hit:
            for step in yaml.safe_load(patch["patch"]):
                apply(document, step)
    return found


def apply(document: Any, step: dict[str, Any]) -> None:
    """One step of a JSON patch."""
    *path, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    key: Any = int(last) if isinstance(document, list) else last
    assert step["op"] == "add" or document[key] is not None
    document[key] = step["value"]


def deployments(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Deployment"}


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (only,) = spec["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_are_what_kubernetes_takes(release: str) -> None:
    documents = manifests() + with_gpus()
    assert len(documents) >= 20
    for document in documents:
        kubernetes_validate.validate(document, release, strict=True)


def test_the_validator_would_say_what_is_wrong() -> None:
    wrong = copy.deepcopy(manifests()[-1])
    wrong["spec"]["podSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="podSelektor"):
        kubernetes_validate.validate(wrong, RELEASES[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not there")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kustomize_makes_of_them_what_was_checked(folder: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    built = deployments(list(yaml.safe_load_all(printed)))
    for name, spec in deployments(manifests() if folder == "base" else with_gpus()).items():
        expected = copy.deepcopy(spec)
        container(expected)["image"] = f"omni-discovery:{'cpu' if folder == 'base' else 'gpu'}"
        assert built[name] == expected


def test_there_is_a_deployment_for_the_hub_and_for_each_stage_and_it_runs_what_omni_understands() -> None:
    for documents, file in ((manifests(), "pair"), (with_gpus(), "pair-gpu")):
        stages = load_deploy(ROOT / "compose" / f"{file}.yaml").stages
        found = deployments(documents)
        assert set(found) == {"hub", *(f"stage-{stage.stage_id}" for stage in stages)}
        hub = parsed(container(found["hub"])["args"], *ETCD)
        assert (hub.hub_only, hub.deploy_config) == (True, Path(f"compose/{file}.yaml"))
        for stage in stages:
            arguments = parsed(container(found[f"stage-{stage.stage_id}"])["args"], *ETCD)
            assert (arguments.headless, arguments.stage_id) == (True, stage.stage_id)
            grace_s = found[f"stage-{stage.stage_id}"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert grace_s > drain_s(arguments.drain_timeout) + 10


def test_the_hub_is_asked_what_its_api_has_and_the_policies_name_pods_that_are_there() -> None:
    found = deployments(manifests())
    hub = container(found["hub"])
    paths = {probe: hub[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/health", "readinessProbe": "/ready"}
    labels = [spec["template"]["metadata"]["labels"] for spec in found.values()]
    selectors = [selector for document in manifests() for selector in selectors_of(document)]
    assert len(selectors) >= 9
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels), selector


def selectors_of(document: dict[str, Any]) -> list[dict[str, str]]:
    """The labels by which an object names pods."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            return [spec["selector"]]
        case "Deployment" | "PodDisruptionBudget":
            return [spec["selector"]["matchLabels"]]
        case "NetworkPolicy":
            peers = [peer for rule in spec["ingress"] for peer in rule.get("from", ())]
            return [each["podSelector"]["matchLabels"] for each in (spec, *peers)]
        case _:
            return []

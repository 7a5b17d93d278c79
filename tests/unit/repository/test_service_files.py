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

import certifi
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


#: Where pods have the files of Secrets.
MOUNTED = "/etc/omni/etcd"


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A folder with such files, as far as the flags look at them."""
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    (tmp_path / "password").write_text("secret", encoding="utf-8")
    return tmp_path


def understood(spec: dict[str, Any], mounted: Path) -> Any:
    """What omni makes of a container's arguments."""
    return parsed([word.replace(MOUNTED, str(mounted)) for word in container(spec)["args"]], *ETCD)


def test_there_is_a_deployment_for_the_hub_and_for_each_stage_and_it_runs_what_omni_understands(mounted: Path) -> None:
    for documents, file in ((manifests(), "pair"), (with_gpus(), "pair-gpu")):
        stages = load_deploy(ROOT / "compose" / f"{file}.yaml").stages
        found = deployments(documents)
        assert set(found) == {"hub", *(f"stage-{stage.stage_id}" for stage in stages)}
        hub = understood(found["hub"], mounted)
        assert (hub.hub_only, hub.deploy_config) == (True, Path(f"compose/{file}.yaml"))
        for stage in stages:
            arguments = understood(found[f"stage-{stage.stage_id}"], mounted)
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
            peers = [peer for rule in rules_of(spec) for peer in rule["peers"]]
            chosen = [each["podSelector"] for each in (spec, *peers) if "podSelector" in each]
            return [each["matchLabels"] for each in chosen if each]
        case _:
            return []


def rules_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules of a policy, with the direction of each, its peers and its ports. None is without peers or ports."""
    return [
        {"direction": direction, "peers": rule[key], "ports": rule["ports"]}
        for direction, key in (("ingress", "from"), ("egress", "to"))
        for rule in spec.get(direction, ())
    ]


#: Ends of connections: their namespaces' labels, and their pods'.
HUB = ({"kubernetes.io/metadata.name": "omni"}, {"app.kubernetes.io/name": "hub"})
STAGE = (HUB[0], {"app.kubernetes.io/name": "stage-0", "app.kubernetes.io/component": "stage"})
OTHER_STAGE = (HUB[0], {"app.kubernetes.io/name": "stage-1", "app.kubernetes.io/component": "stage"})
PROMETHEUS = ({"kubernetes.io/metadata.name": "monitoring"}, {"app": "prometheus"})
CLIENT = ({"kubernetes.io/metadata.name": "web", "omni-client": "true"}, {"app": "web"})
STRANGER = ({"kubernetes.io/metadata.name": "default"}, {"app.kubernetes.io/name": "hub"})
REGISTRY = ({"kubernetes.io/metadata.name": "etcd"}, {"app": "etcd"})
DNS = ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"})
#: The names of ports are those of the containers.
PORTS = {"http": 8000, "metrics": 9100}


def is_let_through(source: Any, target: Any, port: int) -> bool:
    """Whether the policies of both ends allow a connection, as Kubernetes reads them."""
    return all(
        _allows(own, other, direction, port)
        for own, other, direction in ((source, target, "egress"), (target, source, "ingress"))
        # Only the pods of our namespace have policies of ours.
        if own[0] == HUB[0]
    )


def _allows(own: Any, other: Any, direction: str, port: int) -> bool:
    policies = [each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"]
    mine = [spec for spec in policies if _matches(spec["podSelector"], own[1])]
    rules = [rule for spec in mine for rule in rules_of(spec) if rule["direction"] == direction]
    assert any(direction.capitalize() in spec["policyTypes"] for spec in mine), "without a policy all is open"
    return any(
        any(_is_peer(peer, other) for peer in rule["peers"]) and any(_is_port(each, port) for each in rule["ports"])
        for rule in rules
    )


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    found: dict[str, str] = selector.get("matchLabels", {})
    return found.items() <= labels.items()


def _is_peer(peer: dict[str, Any], end: Any) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    of_namespace = _matches(peer["namespaceSelector"], end[0]) if "namespaceSelector" in peer else end[0] == HUB[0]
    return of_namespace and _matches(peer.get("podSelector", {}), end[1])


def _is_port(rule: dict[str, Any], port: int) -> bool:
    first = PORTS.get(rule["port"], rule["port"])
    return bool(first <= port <= rule.get("endPort", first))


@pytest.mark.parametrize(
    ("source", "target", "ports"),
    [
        (CLIENT, HUB, [8000]),
        (PROMETHEUS, HUB, [8000]),
        (PROMETHEUS, STAGE, [9100]),
        (HUB, STAGE, [1024, 40_000, 65_535]),
        (STAGE, OTHER_STAGE, [1024, 40_000, 65_535]),
        (HUB, REGISTRY, [2379]),
        (STAGE, REGISTRY, [2379]),
        (HUB, DNS, [53]),
        (STAGE, DNS, [53]),
    ],
)
def test_the_network_lets_through_what_has_to_come_through(source: Any, target: Any, ports: list[int]) -> None:
    assert all(is_let_through(source, target, port) for port in ports)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((STRANGER, end) for end in (HUB, STAGE)),
        *((CLIENT, end) for end in (STAGE, OTHER_STAGE)),
        *((STAGE, end) for end in (HUB, CLIENT, STRANGER, PROMETHEUS)),
        *((HUB, end) for end in (CLIENT, STRANGER, PROMETHEUS)),
    ],
)
def test_the_network_lets_nobody_else_through(source: Any, target: Any) -> None:
    assert not any(is_let_through(source, target, port) for port in (53, 80, 443, 2379, 8000, 9100, 40_000))


def test_nobody_reaches_more_than_the_port_that_is_for_him() -> None:
    assert not is_let_through(CLIENT, HUB, 9100)
    assert not any(is_let_through(PROMETHEUS, STAGE, port) for port in (8000, 40_000))
    assert not any(is_let_through(source, REGISTRY, port) for source in (HUB, STAGE) for port in (2380, 22, 443))


def test_every_pod_reaches_etcd_by_tls_with_a_login_of_its_kind(mounted: Path) -> None:
    """Its flags name files that are mounted from Secrets, for its group alone, and its probe has the same flags."""
    (settings,) = [each["data"] for each in manifests() if each["kind"] == "ConfigMap"]
    assert settings["OMNI_ETCD_ENDPOINTS"].startswith("https://")
    told = (BASE / "etcd.yaml").read_text(encoding="utf-8")
    for name, spec in deployments(manifests()).items():
        kind = name.partition("-")[0]
        pod, only = spec["template"]["spec"], container(spec)
        flags = understood(spec, mounted)
        (mount,) = [each for each in only["volumeMounts"] if each["name"] == "etcd"]
        (volume,) = [each["projected"] for each in pod["volumes"] if each["name"] == "etcd"]
        assert (mount["mountPath"], mount["readOnly"]) == (MOUNTED, True)
        assert volume["defaultMode"] == 0o440
        files = {item["path"]: each["secret"]["name"] for each in volume["sources"] for item in each["secret"]["items"]}
        assert files == {"ca.crt": "omni-etcd-ca", "password": f"omni-etcd-{kind}"}
        assert (flags.etcd_ca, flags.etcd_password_file) == tuple(str(mounted / path) for path in files)
        user, trusted = only["env"]
        # Only these two can be written to, and Kubernetes opens both to everybody.
        assert trusted["name"] == "OMNI_TRUSTED_FOLDERS"
        assert set(trusted["value"].split(":")) == {
            each["mountPath"] for each in only["volumeMounts"] if each["name"] in {"state", "tmp"}
        }
        assert flags.etcd_user == f"$({user['name']})"
        assert user["valueFrom"]["secretKeyRef"] == {"name": f"omni-etcd-{kind}", "key": "username"}
        assert all(f"create secret generic {secret} " in told for secret in files.values())
        if kind == "stage":
            asked = only["startupProbe"]["exec"]["command"][-1].partition("|")[0]
            words = shlex.split(asked)
            for flag in ("--etcd-ca", "--etcd-password-file"):
                assert words[words.index(flag) + 1] == only["args"][only["args"].index(flag) + 1]
            assert words[words.index("--etcd-user") + 1] == f"${user['name']}"

"""compose/docker-compose.yaml on a real Docker engine: each profile comes up, answers and stops as it should."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from omni_discovery.etcd.admin import grant_namespace
from omni_discovery.etcd.config import RegistrySecurity, RegistryTls
from tests.support.binaries import require_compose
from tests.support.certificates import make_certificates
from tests.support.container_image import docker, etcd_image, product_image
from tests.support.processes import wait_for
from tests.support.registry import etcdctl, quiet_port
from tests.support.running_scenarios import COUNTS, PARTS, assert_answered
from tests.support.scenarios import ROOT, Client, Settings

pytestmark = [pytest.mark.e2e, pytest.mark.docker]

FILE = ROOT / "compose" / "docker-compose.yaml"
BASE = ROOT / "compose" / "kubernetes" / "base"
PAIR = Path("compose/pair-echo.yaml")
_UP_S = 120
#: The user of the namespace, which hubs and stages share here.
USER, PASSWORD = "omni-default", "a-password"


@dataclass(frozen=True, slots=True)
class Images:
    """Tags of images that were built here, in place of those that the file would build and pull."""

    product: str
    etcd: str


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    require_compose()
    with product_image() as product, etcd_image() as etcd:
        yield Images(product, etcd)


class Composed:
    """One profile of the file, as a project of its own."""

    def __init__(self, profile: str, images: Images, port: int) -> None:
        self.profile = profile
        self._project = f"omni-test-{profile}-{uuid.uuid4().hex[:8]}"
        self._settings = {
            "OMNI_IMAGE": images.product,
            "ETCD_IMAGE": images.etcd,
            "PORT": str(port),
            "PAIR": str(PAIR),
        }

    def run(self, *words: str, code: int | None = 0) -> str:
        """What a sub-command of docker compose prints; ``code`` None takes any end."""
        command = ["docker", "compose", "-p", self._project, "-f", str(FILE), "--profile", self.profile, *words]
        ran = subprocess.run(
            command, env=os.environ | self._settings, capture_output=True, text=True, timeout=300, check=False
        )
        assert code in (None, ran.returncode), f"{' '.join(words)}: {ran.stdout}{ran.stderr}\n{self.log()}"
        return ran.stdout

    def log(self) -> str:
        """The last words of all containers."""
        return self.run("logs", "--tail", "40", "--no-color", code=None)

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """Each container's state as Docker has it, by service."""
        listed = (json.loads(line) for line in self.run("ps", "--all", "--format", "json").splitlines())
        return {each["Service"]: each for each in listed}


@contextmanager
def composed(profile: str, images: Images, port: int) -> Iterator[Composed]:
    project = Composed(profile, images, port)
    try:
        project.run("up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", str(_UP_S))
        yield project
    finally:
        project.run("down", "--volumes", "--timeout", "20", code=None)


@pytest.mark.parametrize("scenario", PARTS)
def test_a_profile_comes_up_answers_and_stops(images: Images, scenario: str) -> None:
    """1. docker compose waits until every container runs, and the hub's own health check passes
    2. all replicas of the scenario can be picked, and the page's question gets its text and its picture
    3. SIGTERM drains everything within the grace period: no container is killed, none has failed
    """
    port = quiet_port()
    with composed(scenario.lower(), images, port) as project:
        client = Client(Settings(PAIR, "127.0.0.1", port))
        client.wait_ready(COUNTS[scenario])
        assert_answered(client.ask())
        services = [f"{part}-{scenario.lower()}" for part in PARTS[scenario]]
        project.run("stop", *services)
        ended = project.states()
        assert {name: ended[name]["ExitCode"] for name in services} == dict.fromkeys(services, 0), project.log()
        assert "Traceback" not in project.log()


# ---- the pods of Kubernetes


def manifest(name: str) -> dict[str, Any]:
    """The first object of a file of the base."""
    first: dict[str, Any] = next(yaml.safe_load_all((BASE / f"{name}.yaml").read_text(encoding="utf-8")))
    return first


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a Deployment and its container, with the pipeline that needs no models."""
    pod = manifest(name)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["args"] = [str(PAIR) if word == "compose/pair.yaml" else word for word in container["args"]]
    return pod, container


def flags_of(pod: Mapping[str, Any], container: Mapping[str, Any], secrets: Path) -> list[str]:
    """The pod's settings and restrictions as flags of docker run; ``secrets`` has the files of its Secrets."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    flags = ["--user", str(pod["securityContext"]["runAsUser"]), "--init", "--read-only"]
    flags += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    flags += ["--memory", container["resources"]["limits"]["memory"].removesuffix("i").lower()]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
    for mount in container["volumeMounts"]:
        if mount["name"] == "etcd":
            assert mount["readOnly"]
            flags += ["--volume", f"{secrets}:{mount['mountPath']}:ro"]
            continue
        size = volumes[mount["name"]].get("sizeLimit", "1Gi").removesuffix("i").lower()
        # As fsGroup leaves an emptyDir.
        flags += ["--tmpfs", f"{mount['mountPath']}:exec,mode=2777,gid={pod['securityContext']['fsGroup']},size={size}"]
    for source in container["envFrom"]:
        assert source["configMapRef"]["name"] == manifest("etcd")["metadata"]["name"]
        flags += [word for name, value in manifest("etcd")["data"].items() for word in ("--env", f"{name}={value}")]
    own = {each["name"]: each.get("value", USER) for each in container["env"]}
    return [*flags, *(word for name, value in own.items() for word in ("--env", f"{name}={value}"))]


def words_of(container: Mapping[str, Any]) -> list[str]:
    """The container's arguments, with its variables in their places as Kubernetes puts them."""
    user = container["env"][0]["name"]
    return [word.replace(f"$({user})", USER) for word in container["args"]]


class Pods:
    """One pod of each Deployment of the manifests, as a container under the same restrictions; all on one network."""

    def __init__(self, images: Images, folder: Path) -> None:
        self._images = images
        self._folder = folder
        self._secrets = folder / "secrets"
        self._network = f"omni-test-{uuid.uuid4().hex[:8]}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        docker("network", "create", self._network)
        self._stack.callback(docker, "network", "rm", self._network)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_etcd(self) -> None:
        """An etcd where the pods look for it, with TLS and users."""
        host, _, port = manifest("etcd")["data"]["OMNI_ETCD_ENDPOINTS"].removeprefix("https://").rpartition(":")
        files = make_certificates(self._folder, f"DNS:{host},IP:127.0.0.1")
        urls = ("--listen-client-urls", f"https://0.0.0.0:{port}", "--advertise-client-urls", f"https://{host}:{port}")
        flags = ("--network-alias", host, "--publish", f"127.0.0.1::{port}", "--volume", f"{self._folder}:/tls:ro")
        pems = ("--cert-file", "/tls/server.crt", "--key-file", "/tls/server.key")
        etcd = self._run("etcd", *flags, self._images.etcd, "etcd", "--data-dir", "/data", *urls, *pems)
        endpoint = docker("port", etcd, port).split()[0]
        tls = [f"--cacert={files.ca}"]
        wait_for("etcd to answer", lambda: _answers(endpoint, *tls))
        security = RegistrySecurity(tls=RegistryTls(ca_file=files.ca))
        asyncio.run(grant_namespace([endpoint], security, "default", USER, PASSWORD))
        for words in (("user", "add", "root:secret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
            etcdctl(endpoint, *tls, *words)
        self._secrets.mkdir()
        shutil.copy(files.ca, self._secrets / "ca.crt")
        (self._secrets / "password").write_text(PASSWORD, encoding="utf-8")
        for path in self._secrets.iterdir():
            path.chmod(0o444)

    def start(self, name: str) -> str:
        """Start the pod of a Deployment; return its container."""
        pod, container = pod_of(name)
        flags = flags_of(pod, container, self._secrets)
        return self._run(name, *flags, self._images.product, *words_of(container))

    def _run(self, name: str, *words: str) -> str:
        container = f"{self._network}-{name}"
        self._stack.callback(docker, "rm", "--force", "--volumes", container)
        docker("run", "--detach", "--name", container, "--hostname", name, "--network", self._network, *words)
        return container


def _answers(endpoint: str, *tls: str) -> bool:
    try:
        etcdctl(endpoint, *tls, "endpoint", "health")
    except subprocess.SubprocessError:
        return False
    return True


def passes(container: str, command: Sequence[str]) -> bool:
    """Whether a command within a container ends with 0, as a probe or a hook of Kubernetes has to."""
    ran = subprocess.run(["docker", "exec", container, *command], capture_output=True, timeout=60, check=False)
    return ran.returncode == 0


def test_the_pods_run_under_their_restrictions_and_pass_their_probes(images: Images, tmp_path: Path) -> None:
    """What the manifests ask of a node, on Docker: user, read-only root, no capabilities, memory, volumes, settings,
    and an etcd with TLS that asks for a login.

    1. the startup probes of the stages pass once their replicas are up; the hub's `/health` and `/ready` answer
    2. the page's question is answered
    3. the hub's preStop hook can run in the image, and SIGTERM ends each pod with 0
    """
    with Pods(images, tmp_path) as pods:
        pods.start_etcd()
        stages = [pods.start(name) for name in ("stage-0", "stage-1")]
        hub = pods.start("hub")
        for stage, name in zip(stages, ("stage-0", "stage-1"), strict=True):
            probe = pod_of(name)[1]["startupProbe"]["exec"]["command"]
            wait_for(f"{name}'s probe", lambda stage=stage, probe=probe: passes(stage, probe), 60)
        address = docker("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", hub).strip()
        client = Client(Settings(PAIR, address, 8000))
        client.wait_ready({0: 1, 1: 1})
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = pod_of("hub")[1][probe]["httpGet"]["path"]
            assert client.status(path) == 200
        assert_answered(client.ask())
        assert passes(hub, pod_of("hub")[1]["lifecycle"]["preStop"]["exec"]["command"])
        for container in (hub, *stages):
            docker("stop", "-t", "60", container)
            code = docker("inspect", "--format", "{{.State.ExitCode}}", container).strip()
            assert code == "0", docker("logs", container)

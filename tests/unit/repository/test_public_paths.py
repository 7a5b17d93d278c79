"""What programs of others import goes on working: the packages' faces, the public modules, and old paths until 0.3."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

#: Names by the module from which programs may import them.
PUBLIC = {
    "omni_discovery": (
        "OmniCoordClientForHub OmniCoordClientForStage ReplicaInfo ReplicaList ReplicaStatus ReplicaEvent LoadBalancer"
        " RandomBalancer RoundRobinBalancer LeastQueueLengthBalancer LoadBalancingPolicy Task"
    ),
    "omni_discovery.clients": "OmniCoordClientForHub OmniCoordClientForStage",
    "omni_discovery.data_urls": "read_picture",
    "omni_discovery.deploy.document": "StageConfig",
    "omni_discovery.errors": "OmniError ConfigError InvalidRequestError RegistryUnavailableError",
    "omni_discovery.testing": "FakeKV",
    "omni_discovery.wire": "Resume TokenLogprobs FailureKind",
    "hub": "Omni AsyncOmni Orchestrator StagePool",
    "hub.async_omni": "AsyncOmni",
    "hub.omni": "Omni",
    "stage_runtime": "Engine EngineOutput OmniConnectorBase StageRequest",
    "stage_runtime.connectors": (
        "MooncakeConnector ConnectorSpec MooncakeStoreConnector MooncakeTransferEngineConnector OmniConnectorBase"
        " OmniConnectorFactory OmniTransferConfig SharedMemoryConnector YuanrongConnector"
        " YuanrongTransferEngineConnector load_omni_transfer_config AutoConnector TcpConnector EdgeFullError"
        " TransferError TransferTimeoutError TransferCancelledError"
    ),
    "stage_runtime.connectors.base": "OmniConnectorBase",
    "stage_runtime.engines.base": (
        "Engine PieceEngine SegmentEngine ControlEngine CheckedEngine ThreadedEngine DescribedEngine StageRequest"
        " EngineOutput Report create_engine checked_args check_model_folder"
    ),
    "stage_runtime.testing": "EngineContract",
}
#: Where they were before 0.2: modules of their own that re-export, then folders that took a module's name.
OLD = {
    "omni_discovery.balancers": (
        "LoadBalancer LoadBalancingPolicy RandomBalancer RoundRobinBalancer LeastQueueLengthBalancer Task"
        " LeastLoadBalancer PowerOfTwoBalancer PrefixHashBalancer build_load_balancer_factory"
    ),
    "omni_discovery.messages": "ReplicaEvent ReplicaInfo ReplicaList ReplicaStatus ReplicaRecord HubRecord",
    "omni_discovery.picture_urls": "MAX_PIXELS picture_parts picture_url read_picture",
    "omni_discovery.deploy": (
        "ConnectorConfig DeployConfig EdgeConfig RayConfig RuntimeConfig StageConfig decode_deploy encode_deploy"
        " parse_deploy read_deploy"
    ),
    "hub.orchestrator": "Orchestrator",
    "stage_runtime.connectors.shm": "SharedMemoryConnector",
    "stage_runtime.connectors.tcp": "TcpConnector",
    "stage_runtime.connectors.yuanrong": "YuanrongConnector",
}
EVERY = {**PUBLIC, **OLD}
FACES = ("omni_discovery", "hub", "stage_runtime", "stage_runtime.connectors")


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("module", EVERY)
def test_every_public_name_can_be_imported(module: str) -> None:
    names = EVERY[module].split()
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


def test_every_public_name_can_be_imported_first_of_all_and_warns_of_nothing() -> None:
    """In fresh interpreters: what a name needs must not have been imported by something else before."""
    lines = [f"from {module} import {name}" for module, names in EVERY.items() for name in names.split()]
    program = (
        "import os, sys\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        try:\n"
        "            exec(line)\n"
        "        except BaseException as error:\n"
        "            sys.stderr.write(f'{line}: {error!r}\\n')\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"
        "    if os.waitpid(pid, 0)[1]:\n"
        "        sys.exit('failed')\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    # One name of each module is enough: what they have in common is what the first import needs.
    chosen = "\n".join({line.split()[1]: line for line in lines}.values())
    ended = subprocess.run(command, input=chosen, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("module", [*FACES, *(name for name in OLD if file_of(name).name == "__init__.py")])
def test_a_face_says_the_same_to_readers_type_checkers_and_the_interpreter(module: str) -> None:
    """``__all__``, the imports for type checkers and ``dir()`` agree, and each name is what the import says."""
    face = importlib.import_module(module)
    declared: dict[str, tuple[str, str]] = {}
    for block in ast.parse(file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name):
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                declared |= {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
    assert sorted(declared) == [name for name in face.__all__ if not name.startswith("__")]
    assert set(face.__all__) <= set(dir(face))
    for name, (home, original) in declared.items():
        assert getattr(face, name) is getattr(importlib.import_module(home), original)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nothing'"):
        _ = face.Nothing


def test_the_faces_alone_load_nothing() -> None:
    program = (
        f"import sys, {', '.join(FACES)}; print(*sorted(m for m in sys.modules if m.split('.')[0] in {FACES[:3]}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.split() == ["hub", "omni_discovery", "omni_discovery.lazy", *FACES[2:]]


def test_there_is_no_other_old_module() -> None:
    marked = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in FACES[:3]
        for path in (ROOT / package).rglob("*.py")
        if "emoved in 0.3" in path.read_text(encoding="utf-8")
    }
    assert marked == set(OLD)

"""The walls between the rooms, checked on the imports as they are written."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("omni_discovery", "stage_runtime", "hub")

#: Files that decide. They import nothing that waits, draws lots, reads a clock or talks.
PURE_CORES = (
    "omni_discovery/errors.py",
    "omni_discovery/records/schema.py",
    "omni_discovery/wire/frames.py",
    "omni_discovery/wire/messages.py",
    "omni_discovery/wire/messages.py",
    "omni_discovery/wire/messages.py",
    "omni_discovery/records/keys.py",
    "omni_discovery/records/control.py",
    "omni_discovery/commands/checks.py",
    "omni_discovery/commands/history_log.py",
    "omni_discovery/deploy/document.py",
    "omni_discovery/deploy/load.py",
    "omni_discovery/deploy/dialect.py",
    "omni_discovery/deploy/document.py",
    "omni_discovery/text.py",
    "omni_discovery/data_urls.py",
    "omni_discovery/commands/checks.py",
    "omni_discovery/deploy/fingerprint.py",
    "omni_discovery/deploy/fingerprint.py",
    "omni_discovery/deploy/dialect.py",
    "omni_discovery/deploy/overrides.py",
    "omni_discovery/deploy/topology.py",
    "omni_discovery/registration/lease.py",
    "omni_discovery/view/table.py",
    "omni_discovery/view/mass_loss.py",
    "omni_discovery/view/freshness.py",
    "omni_discovery/view/known_hubs.py",
    "stage_runtime/server/control.py",
    "stage_runtime/connectors/store/registered.py",
    "stage_runtime/server/credits.py",
    "stage_runtime/server/ledger.py",
    "stage_runtime/engine_loop/running.py",
    "stage_runtime/server/updates.py",
    "stage_runtime/lifecycle.py",
    "stage_runtime/lifecycle.py",
    "stage_runtime/server/outbox.py",
    "stage_runtime/server/router.py",
    "stage_runtime/supervisor/restarts.py",
    "omni_discovery/backoff.py",
    "stage_runtime/supervisor/devices.py",
    "stage_runtime/replica/failures.py",
    "hub/correlator.py",
    "hub/outputs.py",
    "hub/pace.py",
    "hub/pipeline.py",
    "hub/records.py",
    "hub/releases.py",
    "omni_discovery/balancing/base.py",
    "omni_discovery/balancing/prefix.py",
    "omni_discovery/balancing/weighted.py",
    "hub/outliers.py",
    "hub/pool_core.py",
    "hub/pool_entry.py",
    "hub/pool_members.py",
    "hub/pool_withheld.py",
    "hub/absence.py",
    "hub/pool_options.py",
    "hub/pool_places.py",
    "hub/waiting.py",
    "hub/companions.py",
    "hub/piece_events.py",
    "hub/piece_relay.py",
    "hub/request_pieces.py",
    "hub/companion_events.py",
    "stage_runtime/engine_loop/check_output.py",
    "stage_runtime/engine_loop/backpressure.py",
    "stage_runtime/engine_loop/pieces.py",
    "stage_runtime/engines/echo/speech.py",
    "stage_runtime/engines/diffusers/batches.py",
    "hub/request.py",
    "hub/request_body.py",
    "hub/request_losses.py",
    "hub/request_events.py",
    "hub/request_state.py",
    "hub/retry.py",
    "hub/segment_events.py",
    "hub/segment_flow.py",
    "hub/segments.py",
    "hub/timings.py",
    "hub/retry_budget.py",
    "hub/results.py",
    "hub/sound.py",
    "hub/pooled.py",
    "stage_runtime/engines/files.py",
    "stage_runtime/engines/files.py",
    "stage_runtime/engines/callable/typed_input.py",
    "stage_runtime/engines/callable/engine.py",
    "hub/api/parts.py",
    "hub/api/vllm_params.py",
)
IMPURE = {"asyncio", "threading", "zmq", "grpc", "time", "random", "os", "subprocess", "socket", "uvloop"}
#: The balancers draw lots and lock themselves, as the system described has them do.
BALANCERS_MAY = {"random", "threading"}

ZMQ_FILES = {
    "omni_discovery/curve.py",
    "stage_runtime/server/router.py",
    "stage_runtime/server/server.py",
    "hub/zmq_loop.py",
    "hub/stage_client.py",
}
WEB = {"starlette", "uvicorn", "fastapi", "aiohttp"}


def imports_of(path: Path, *, module_level_only: bool = False) -> Iterator[str]:
    """Every module that a file imports, dotted; with ``module_level_only`` without those inside functions."""
    tree = tree_of(path)
    nodes: list[ast.AST] = list(_module_level(tree)) if module_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _module_level(child)


def files_of(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py"))


def tops(names: Iterator[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in names}


@pytest.mark.parametrize("name", PURE_CORES)
def test_a_pure_core_imports_nothing_that_acts(name: str) -> None:
    assert not tops(imports_of(ROOT / name)) & IMPURE


def test_the_balancers_import_chance_and_locks_and_nothing_else_that_acts() -> None:
    assert not tops(imports_of(ROOT / "omni_discovery/balancing/policies.py")) & (IMPURE - BALANCERS_MAY)


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("omni_discovery", {"hub", "stage_runtime"}),
        ("hub", {"stage_runtime"}),
        ("stage_runtime", {"hub"}),
    ],
)
def test_the_rooms_only_know_the_rooms_that_they_may(room: str, forbidden: set[str]) -> None:
    for name in files_of(room):
        assert not tops(imports_of(ROOT / name)) & forbidden, name


def test_only_the_etcd_files_talk_grpc() -> None:
    for name in files_of(*ROOMS):
        if not name.startswith("omni_discovery/etcd/"):
            assert not tops(imports_of(ROOT / name)) & {"grpc", "etcd3"}, name


def test_only_the_data_plane_drivers_talk_zmq() -> None:
    for name in files_of(*ROOMS):
        if name not in ZMQ_FILES and "/connectors/" not in name:
            assert "zmq" not in tops(imports_of(ROOT / name)), name


def test_torch_stays_in_engines_connectors_and_demo() -> None:
    for name in files_of(*ROOMS):
        if not name.startswith(("stage_runtime/engines/", "stage_runtime/connectors/", "stage_runtime/demo/")):
            assert not tops(imports_of(ROOT / name)) & {"torch", "diffusers"}, name


def test_connectors_and_the_engine_list_import_torch_and_vllm_only_when_used() -> None:
    lazy = files_of("stage_runtime/connectors")
    lazy += [
        "stage_runtime/engines/__init__.py",
        "stage_runtime/engines/base.py",
        "stage_runtime/engines/echo/engine.py",
    ]
    for name in lazy:
        assert not tops(imports_of(ROOT / name, module_level_only=True)) & {"torch", "vllm"}, name


#: What puts vLLM's own server in front of a hub. Imported only where it is asked for.
_VLLM_PARTS = ("adapters", "client", "control", "errors", "logprobs", "pictures", "pooling", "server")
VLLM_API = tuple(f"hub/api/vllm_{part}.py" for part in _VLLM_PARTS)


def test_vllm_stays_in_the_engines_and_behind_its_own_api() -> None:
    for name in files_of(*ROOMS):
        if not name.startswith("stage_runtime/engines/") and name not in VLLM_API:
            assert "vllm" not in tops(imports_of(ROOT / name)), name


def test_a_hub_that_does_not_show_vllms_api_never_imports_it() -> None:
    modules = {name.removesuffix(".py").replace("/", ".") for name in VLLM_API}
    for name in files_of("hub"):
        if name not in VLLM_API:
            assert not set(imports_of(ROOT / name, module_level_only=True)) & modules, name


def test_the_web_framework_stays_in_the_api() -> None:
    for name in files_of(*ROOMS):
        if not name.startswith("hub/api/"):
            assert not tops(imports_of(ROOT / name)) & WEB, name


def test_only_cli_files_read_arguments_and_environment() -> None:
    for name in files_of(*ROOMS):
        if Path(name).name in {"cli.py", "__main__.py"} or name.startswith("stage_runtime/demo/"):
            continue
        for node in ast.walk(tree_of(ROOT / name)):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "argv", "getenv"}
            assert not reads or name in ENVIRONMENT_PASSED_ON, f"{name}:{getattr(node, 'lineno', 0)}"


#: The actor of a Ray cluster hands its own environment on to the replica that it starts.
#: And gRPC reads one setting of its own from there, as it is imported.
ENVIRONMENT_PASSED_ON = {"stage_runtime/supervisor/ray_actor.py", "omni_discovery/etcd/fork.py"}


def test_no_pickle_anywhere() -> None:
    for name in files_of(*ROOMS):
        assert not tops(imports_of(ROOT / name)) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, name


def test_the_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    agreed = {"pyproject.toml", "Makefile", "LICENSE", "README.md", "docs", "tests", "compose", *ROOMS}
    left_by_tools = {"demo-output", "build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))}
    assert found - left_by_tools == agreed

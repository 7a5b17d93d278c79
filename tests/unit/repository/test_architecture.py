"""The walls between the rooms, checked on the imports as they are written. A folder is a noun; rules go by folder."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("omni_discovery", "stage_runtime", "hub")
#: Modules that only re-export what moved elsewhere, until 0.3; test_public_paths.py imports each.
OLD_MODULES = ("omni_discovery.messages", "omni_discovery.balancers", "omni_discovery.picture_urls")

#: What waits, draws lots, reads a clock or talks.
IMPURE = {"asyncio", "threading", "zmq", "grpc", "time", "random", "os", "subprocess", "socket", "uvloop"}
#: Folders that decide, but for the drivers among their files.
PURE_FOLDERS = {
    "omni_discovery/records": (),
    "omni_discovery/wire": (),
    "omni_discovery/inputs": ("reading_time.py",),
    "omni_discovery/deploy": ("load.py",),
    "hub/request": (),
    "hub/pool": ("stage_pool.py",),
}

#: What a folder's modules may import of their own package, from left to right: a layer knows those before it.
LAYERS = {
    "omni_discovery": (
        (
            "",
            "errors",
            "kv",
            "clock",
            "text",
            "backoff",
            "loop_thread",
            "processes",
            "sockets",
            "curve",
            "data_urls",
            "log_once",
            "failure_log",
            "lazy",
            "logs",
            "plugins",
            "list_watch",
            "stories",
        ),
        ("inputs",),
        ("records", "wire", "metrics"),
        ("etcd", "deploy", "balancing"),
        ("registration", "receipts"),
        ("view",),
        ("clients",),
        ("commands", "testing", "__main__"),
    ),
    "hub": (
        ("", "config", "media", "asked", "engine_protocol", "exposition", "json_memory"),
        ("request", "pool"),
        ("replicas", "metrics", "receipts"),
        ("orchestrator",),
        ("async_omni", "output_queue", "engine_control", "results"),
        ("jobs",),
        ("api",),
        ("serve",),
        ("cli", "command", "omni", "joining"),
    ),
    "stage_runtime": (
        ("", "config", "lifecycle", "addresses", "status_pipe", "private_folders"),
        ("engines", "connectors", "supervisor"),
        ("engine_loop",),
        ("server",),
        ("replica",),
        ("cli", "testing", "__main__"),
        ("demo",),
    ),
}
#: Arrows that go back up, each to be turned round. Nothing is ever added here.
ARROWS_UP: frozenset[tuple[str, str]] = frozenset()
#: Siblings with one prefix that are not a folder waiting to be made.
PREFIXES: frozenset[str] = frozenset()
#: Class names that two modules of one package share. Nothing is ever added here.
SHARED_CLASS_NAMES: dict[str, frozenset[str]] = {}

WEB = {"starlette", "uvicorn", "fastapi", "aiohttp"}
VLLM_FOLDERS = ("stage_runtime/engines/vllm/", "stage_runtime/engines/vllm_omni/", "hub/api/vllm/")
ZMQ_PLACES = (
    "omni_discovery/curve.py",
    "stage_runtime/server/router.py",
    "stage_runtime/server/server.py",
    "hub/replicas/sockets.py",
    "stage_runtime/connectors/",
)
#: Who reads arguments and environment; the last two hand their own on, to a replica and to gRPC.
ENVIRONMENT_READERS = (
    "hub/cli.py",
    "stage_runtime/cli.py",
    "omni_discovery/commands/main.py",
    "omni_discovery/commands/registry.py",
    "omni_discovery/commands/output.py",
    "stage_runtime/demo/",
    "stage_runtime/supervisor/ray_actor.py",
    "omni_discovery/etcd/fork.py",
)


def imports_of(name: str, *, module_level_only: bool = False) -> Iterator[str]:
    """Every module that a file imports, dotted; with ``module_level_only`` without those inside functions."""
    tree = tree_of(name)
    nodes: list[ast.AST] = list(_module_level(tree)) if module_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@functools.cache
def tree_of(name: str) -> ast.Module:
    """A file's syntax tree, parsed once."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _module_level(child)


@functools.cache
def files_of(*folders: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")))


def tops(names: Iterator[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in names}


def imported_modules(name: str) -> Iterator[str]:
    """Every module of ours that a file imports, also where a package is named and the module is what is taken."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


@functools.cache
def _is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def claims_to_be_pure(name: str) -> bool:
    """Whether a paragraph of the module's docstring ends in "Pure."."""
    docstring = ast.get_docstring(tree_of(name)) or ""
    return any(paragraph.rstrip().endswith("Pure.") for paragraph in docstring.split("\n\n"))


def pure_files() -> list[str]:
    """The files in pure folders, and the files whose docstring claims it."""
    by_place = [
        name for folder, drivers in PURE_FOLDERS.items() for name in files_of(folder) if Path(name).name not in drivers
    ]
    by_word = [name for name in files_of(*PACKAGES) if claims_to_be_pure(name)]
    return sorted({*by_place, *by_word})


@pytest.mark.parametrize("name", pure_files())
def test_a_pure_core_imports_nothing_that_acts(name: str) -> None:
    assert not tops(imports_of(name)) & IMPURE


def test_the_policies_import_chance_and_locks_and_nothing_else_that_acts() -> None:
    """The balancers draw lots and lock themselves, as the system described has them do."""
    assert not tops(imports_of("omni_discovery/balancing/policies.py")) & (IMPURE - {"random", "threading"})


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("omni_discovery", {"hub", "stage_runtime"}),
        ("hub", {"stage_runtime"}),
        ("stage_runtime", {"hub"}),
    ],
)
def test_the_packages_only_know_the_packages_that_they_may(package: str, forbidden: set[str]) -> None:
    for name in files_of(package):
        assert not tops(imports_of(name)) & forbidden, name


def _layer_of(dotted: str) -> tuple[int, str]:
    """How far to the right a module of ours stands, and what it is called there."""
    package, _, inside = dotted.partition(".")
    room = inside.split(".", 1)[0]
    for index, layer in enumerate(LAYERS[package]):
        if room in layer:
            return index, room
    raise AssertionError(f"{dotted} stands in no layer")


def arrows_up(package: str) -> set[tuple[str, str]]:
    """Imports of a layer to the right, or of another room of the same layer but the first; faces are exempt."""
    found = set()
    for name in files_of(package):
        here = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if here in PACKAGES or here in OLD_MODULES:
            continue
        mine, room = _layer_of(here)
        for target in imported_modules(name):
            if not target.startswith(f"{package}."):
                continue
            theirs, other = _layer_of(target)
            beside = theirs == mine and other != room
            if theirs > mine or (beside and not _exempt(room, other)):
                found.add((here, target))
    return found


def _exempt(room: str, other: str) -> bool:
    """Modules of one layer that are files, not folders, may know each other."""
    return not {room, other} <= _folder_names()


@functools.cache
def _folder_names() -> set[str]:
    return {Path(name).parent.name for name in files_of(*PACKAGES)}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_from_right_to_left(package: str) -> None:
    assert arrows_up(package) == {(a, b) for a, b in ARROWS_UP if a.startswith(package)}


def test_only_the_etcd_folder_talks_grpc() -> None:
    for name in files_of(*PACKAGES):
        if not name.startswith("omni_discovery/etcd/"):
            assert not tops(imports_of(name)) & {"grpc", "etcd3"}, name


def test_only_the_data_plane_drivers_talk_zmq() -> None:
    for name in files_of(*PACKAGES):
        if not name.startswith(ZMQ_PLACES):
            assert "zmq" not in tops(imports_of(name)), name


def test_torch_stays_in_engines_connectors_and_demo() -> None:
    for name in files_of(*PACKAGES):
        if not name.startswith(("stage_runtime/engines/", "stage_runtime/connectors/", "stage_runtime/demo/")):
            assert not tops(imports_of(name)) & {"torch", "diffusers"}, name


def test_connectors_and_the_engine_list_import_torch_and_vllm_only_when_used() -> None:
    lazy = files_of("stage_runtime/connectors", "stage_runtime/engines/echo")
    for name in [*lazy, "stage_runtime/engines/__init__.py", "stage_runtime/engines/base.py"]:
        assert not tops(imports_of(name, module_level_only=True)) & {"torch", "vllm"}, name


def test_vllm_stays_in_its_own_folders() -> None:
    for name in files_of(*PACKAGES):
        if not name.startswith(VLLM_FOLDERS):
            assert "vllm" not in tops(imports_of(name)), name


def test_a_hub_that_does_not_show_vllms_api_never_imports_it() -> None:
    for name in files_of("hub"):
        if not name.startswith("hub/api/vllm/"):
            imported = set(imports_of(name, module_level_only=True))
            assert not any(module.startswith("hub.api.vllm") for module in imported), name


def test_the_web_framework_stays_in_the_api() -> None:
    for name in files_of(*PACKAGES):
        if not name.startswith("hub/api/"):
            assert not tops(imports_of(name)) & WEB, name


def test_only_command_lines_read_arguments_and_environment() -> None:
    for name in files_of(*PACKAGES):
        if name.startswith(ENVIRONMENT_READERS) or Path(name).name == "__main__.py":
            continue
        for node in ast.walk(tree_of(name)):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "argv", "getenv"}
            assert not reads, f"{name}:{getattr(node, 'lineno', 0)}"


@pytest.mark.attack("C20")
def test_no_pickle_anywhere() -> None:
    for name in files_of(*PACKAGES):
        assert not tops(imports_of(name)) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, name


#: What runs code that it is given: functions and methods by name, wherever they come from.
RUNS_CODE = {"eval", "exec", "compile", "__import__", "system", "popen", "getoutput"}
#: What unpickles: `load` of these modules.
UNPICKLES = {"torch", "joblib", "pandas", "yaml"}


@pytest.mark.attack("C20")
def test_no_bytes_become_code() -> None:
    """No eval and no shell; no torch.load, no yaml.load, and NumPy's never with pickles."""
    for name in files_of(*PACKAGES):
        found = [f"{name}:{node.lineno} {ast.unparse(node)[:80]}" for node in code_of_bytes(tree_of(name))]
        assert found == []


def code_of_bytes(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owner, _, called = ast.unparse(node.func).rpartition(".")
        flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        # `re.compile` makes no code.
        is_code = called in RUNS_CODE and (owner in {"", "os", "subprocess", "builtins"})
        unpickles = called in {"load", "load_all", "unsafe_load", "read_pickle"} and owner in UNPICKLES
        unpickles = unpickles and flags.get("weights_only") != "True"
        with_pickles = owner in {"np", "numpy"} and called == "load" and flags.get("allow_pickle") != "False"
        if is_code or unpickles or with_pickles or flags.get("shell", "False") != "False":
            yield node


@pytest.mark.parametrize(
    "line",
    [
        *("eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)", "torch.load(file)"),
        *("yaml.load(text)", "yaml.unsafe_load(text)", "np.load(file)", "__import__(name)", "os.popen(text)"),
    ],
)
def test_what_becomes_code_would_be_seen(line: str) -> None:
    assert list(code_of_bytes(ast.parse(line)))


def test_only_the_request_machine_writes_a_phase() -> None:
    """A phase is written in StageRun.to, which checks it against ALLOWED, and only machine.py calls that."""
    writes = {place for name in files_of("hub") for place in phase_writes(name, tree_of(name))}
    assert writes == {"hub/request/state.py StageRun.to"}
    callers = {name for name in files_of("hub") for _ in phase_requests(tree_of(name))}
    assert callers == {"hub/request/machine.py"}


@pytest.mark.parametrize(
    "line",
    [
        "run.phase = Phase.DONE",
        "run.phase: Phase = Phase.DONE",
        "run.phase |= 1",
        "run.phase, run.attempt = Phase.DONE, 1",
        "[run.phase, *rest] = phases",
        "(run.phase) = Phase.DONE",
        "run._phase = Phase.DONE",
        "setattr(run, 'phase', Phase.DONE)",
        "object.__setattr__(run, '_phase', Phase.DONE)",
        "setattr(run, name, Phase.DONE)",
        "for run.phase in phases: pass",
        "with held() as run.phase: pass",
        "del run.phase",
        "replace(run, phase=Phase.DONE)",
        "run = StageRun(0, phase=Phase.DONE)",
        "vars(run)['phase'] = Phase.DONE",
    ],
)
def test_every_way_to_write_a_phase_is_seen(line: str) -> None:
    assert list(phase_writes("x.py", ast.parse(line)))


@pytest.mark.parametrize("line", ["run.to(Phase.DONE)", "to = run.to", "StageRun.to(run, phase)", "run.to(phase)"])
def test_every_way_to_ask_for_a_phase_is_seen(line: str) -> None:
    assert list(phase_requests(ast.parse(line)))


def phase_writes(name: str, tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Where a phase is written, as ``file Class.function``; whatever can't be read counts as one."""
    for node in ast.iter_child_nodes(tree):
        is_scope = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if _writes_phase(node):
            yield f"{name} {inside or getattr(node, 'lineno', 0)}"
        yield from phase_writes(name, node, f"{inside}.{node.name}".lstrip(".") if is_scope else inside)


def _writes_phase(node: ast.AST) -> bool:
    names = {"phase", "_phase"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant) and node.slice.value in names
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called in {"setattr", "__setattr__"}:
        attribute = node.args[1] if len(node.args) > 1 else None
        return not isinstance(attribute, ast.Constant) or attribute.value in names
    if called in {"replace", "StageRun"}:
        return any(keyword.arg in names for keyword in node.keywords)
    return False


def phase_requests(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every use of a method ``to``, called or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "to":
            yield node


def test_a_folder_holds_about_fifteen_modules_at_most() -> None:
    old = {f"{module.replace('.', '/')}.py" for module in OLD_MODULES}
    counts = Counter(
        str(Path(name).parent)
        for name in files_of(*PACKAGES)
        if Path(name).name not in ("__init__.py", "__main__.py") and name not in old
    )
    assert {folder: n for folder, n in counts.items() if n > 16} == {}


def test_three_siblings_with_one_prefix_are_a_folder() -> None:
    siblings: defaultdict[str, list[str]] = defaultdict(list)
    for name in files_of(*PACKAGES):
        path = Path(name)
        prefix, separator, _ = path.stem.partition("_")
        if separator and prefix:
            siblings[f"{path.parent}/{prefix}_"].append(path.name)
    assert {prefix for prefix, names in siblings.items() if len(names) > 2} == PREFIXES


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_stands_twice_in_a_package(package: str) -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for name in files_of(package):
        for node in tree_of(name).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(name)
    assert {name for name, files in places.items() if len(files) > 1} == SHARED_CLASS_NAMES.get(package, frozenset())


#: Files of packages that do more than say what is in the folder: they export names, most of them lazily.
FACES = {
    *(f"{package}/__init__.py" for package in PACKAGES),
    "hub/orchestrator/__init__.py",
    "omni_discovery/clients/__init__.py",
    "omni_discovery/deploy/__init__.py",
    "omni_discovery/wire/__init__.py",
    *(f"stage_runtime/connectors{folder}/__init__.py" for folder in ("", "/shm", "/tcp", "/yuanrong")),
}


def test_the_file_of_a_package_says_what_is_in_the_folder_and_holds_nothing() -> None:
    packages = {name for name in files_of(*PACKAGES) if Path(name).name == "__init__.py"}
    assert {name for name in packages if not ast.get_docstring(tree_of(name))} == set()
    assert {name for name in packages if len(tree_of(name).body) > 1} == FACES


#: Pure modules of data alone: the golden bytes and the tests of the machine hold them.
TESTED_ELSEWHERE = {"omni_discovery/wire/messages.py", "hub/request/events.py"}


def test_each_module_of_a_pure_folder_has_a_test_of_its_name() -> None:
    names = [name for folder in PURE_FOLDERS for name in files_of(folder) if Path(name).name != "__init__.py"]
    lacking = {
        name for name in names if not (ROOT / "tests/unit" / Path(name).with_name(f"test_{Path(name).name}")).exists()
    }
    assert lacking == TESTED_ELSEWHERE


def test_the_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    agreed = {"pyproject.toml", "Makefile", "LICENSE", "README.md", "docs", "tests", "compose", *PACKAGES}
    left_by_tools = {"demo-output", "build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))}
    assert found - left_by_tools == agreed


def test_no_pattern_of_a_field_lets_a_line_break_pass_at_its_end() -> None:
    """``$`` matches before a last line break, too: fields have the anchor that is the very end."""
    loose = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("hub", "omni_discovery", "stage_runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"""Meta\(.*pattern=[rf]*["'].*\$["']""", line)
    ]
    assert loose == []

"""The pages of docs/reference that the code makes: flags, metrics, keys and log events.

``python -m tests.support.reference`` writes them; ``unit/repository/test_reference`` compares them with the code.
"""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client import Counter, Histogram

from hub.metrics import HubMetrics
from hub.serve.vllm_omni import flags as vllm_omni_flags
from omni_discovery.metrics.collector import REPLICA_FAMILIES, SUPERVISOR_FAMILIES, Family
from omni_discovery.records import jobs, keys
from omni_discovery.records.api_key import ApiKeyRecord
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.control import ControlSpec, HubControlSpec
from omni_discovery.records.health import (
    MOST_REASON,
    MOST_TROUBLES,
    HubHealth,
    ReplicaTrouble,
    StageFailures,
    StageLoad,
    TroubleKind,
    UnreadAnswers,
)
from omni_discovery.records.schema import MOST_WEIGHT, HubRecord, ReplicaRecord
from omni_discovery.records.waits import WaitKind, WaitRecord
from stage_runtime.cli import build_parser
from tests.support.events import events_page

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs" / "reference"

_MADE: Final = "<!-- Generated from the code by `python -m tests.support.reference`; changes by hand are lost. -->"
_DEFAULT: Final = re.compile(r"default: ([^)]*)\)")


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {
        "flags.md": flags_page(),
        "metrics.md": metrics_page(),
        "keys.md": keys_page(),
        "events.md": events_page(_MADE, table),
    }


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with an empty line behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines), ""]


def plain(text: str) -> str:
    """Text of the code as Markdown that shows the same characters."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


def code(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"`{text}`" if text else ""


# ---- flags

_SERVE: Final = "serve"
_FLAGS_HEAD: Final = ("flag", "value", "default", "meaning")
#: Groups that are the same for many commands, and how a command refers to them.
_SHARED: Final = ("the registry", "a secured etcd")

_FLAGS_INTRO: Final = """\
# Flags

{made}

Every command and every flag, as `--help` shows them. How the flags of `omni serve` work together: [omni
serve](../serve.md). Variables that stand in for flags: [environment](environment.md).

Flags that most commands share are described once, under [the registry](#common-the-registry) and
[a secured etcd](#common-a-secured-etcd).
"""


def commands() -> dict[str, Any]:
    """The sub-commands of ``omni`` by name, from the entry points that this project declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared: dict[str, str] = project["entry-points"]["omni_discovery.commands"]
    found = {}
    for name, target in declared.items():
        module, _, attribute = target.partition(":")
        found[name] = getattr(importlib.import_module(module), attribute)()
    return found


def flags_page() -> str:
    """docs/reference/flags.md."""
    of_omni = commands()
    serve = of_omni.pop(_SERVE)
    shared = {str(group.title): _rows(group) for group in _groups(_parser("hubs", of_omni["hubs"]))}
    shared = {title: shared[title] for title in _SHARED}
    lines = [_FLAGS_INTRO.format(made=_MADE)]
    lines += ["## `omni serve`", "", _sentence(serve.summary), ""]
    for group in _groups(_parser(_SERVE, serve)):
        lines += [f"### {_capital(str(group.title))}", "", *table(_FLAGS_HEAD, _rows(group))]
    lines += _foreign()
    lines += ["## Flags of every command that talks to etcd", ""]
    for title, rows in shared.items():
        lines += [f"### Common: {title}", "", *table(_FLAGS_HEAD, rows)]
    for name, command in sorted(of_omni.items()):
        parser = _parser(name, command)
        actions = _actions_of(parser)
        lines += [f"## `omni {name}`", "", _sentence(command.summary), ""]
        lines += _of_parser(parser, shared)
        for action, summary, its_parser in actions:
            lines += [f"### `omni {name} {action}`", "", _sentence(summary), "", *_of_parser(its_parser, shared)]
    stage = build_parser()
    lines += ["## `python -m stage_runtime`", "", _sentence(str(stage.description)), ""]
    lines += ["It is what `omni serve --headless` and a hub's local stages run.", "", *_of_parser(stage, shared)]
    return "\n".join(lines)


_FOREIGN: Final = """\
## Flags of vLLM-Omni without a meaning here

`omni serve` refuses them with what to do in their place. Its other flags, and those of `vllm serve`: [omni
serve](../serve.md#commands-of-vllm-serve-and-of-vllm-omni).
"""


def _foreign() -> list[str]:
    answers = {**vllm_omni_flags.VALUES, **vllm_omni_flags.LISTS, **vllm_omni_flags.SWITCHES}
    by_answer: dict[str, list[str]] = {}
    for flag, answer in answers.items():
        by_answer.setdefault(answer, []).append(flag)
    rows = [[", ".join(map(code, sorted(flags))), plain(answer)] for answer, flags in by_answer.items()]
    return [*_FOREIGN.splitlines(), "", *table(("flags", "in their place"), rows)]


def _parser(name: str, command: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"omni {name}")
    command.add_arguments(parser)
    return parser


def _of_parser(parser: argparse.ArgumentParser, shared: Mapping[str, list[list[str]]]) -> list[str]:
    """The flags of one command: its own as a table, the shared ones as links."""
    own: list[list[str]] = []
    links = []
    for group in _groups(parser):
        rows, title = _rows(group), str(group.title)
        if rows == shared.get(title):
            links.append(f"[{title}](#common-{title.replace(' ', '-')})")
        else:
            own += rows
    lines = table(_FLAGS_HEAD, own) if own else []
    return [*lines, f"Also the flags of {' and '.join(links)}.", ""] if links else lines


def _groups(parser: argparse.ArgumentParser) -> Iterator[argparse._ArgumentGroup]:
    return (group for group in parser._action_groups if _shown(group))


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [each for each in group._group_actions if each.help != argparse.SUPPRESS and not isinstance(each, hidden)]


def _actions_of(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """The actions of a command with several, ``revoke`` of ``omni hub`` for one: name, summary and parser."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found += [(name, summaries[name], of_it) for name, of_it in action.choices.items()]
    return found


def _rows(group: argparse._ArgumentGroup) -> list[list[str]]:
    formatter = argparse.HelpFormatter("")
    rows = []
    for action in _shown(group):
        text = formatter._expand_help(action) if action.help else ""
        names = ", ".join(code(name) for name in action.option_strings or [str(action.metavar or action.dest)])
        rows.append([names, _value(action), code(_default(action, text)), plain(_without_default(text))])
    return rows


def _value(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    if action.choices:
        return ", ".join(code(str(choice)) for choice in action.choices)
    return code(str(action.metavar or action.dest.upper()).replace("|", "\\|"))


def _default(action: argparse.Action, text: str) -> str:
    """What the help says, else what the parser has. A default of the environment is in the help of its flag."""
    said = _DEFAULT.search(text)
    if said:
        return said[1]
    if action.default in (None, False, "", [], argparse.SUPPRESS):
        return ""
    return f"{action.default:g}" if isinstance(action.default, float) else str(action.default)


def _without_default(text: str) -> str:
    return re.sub(r" \(default: [^)]*\)|; default: [^)]*(?=\))", "", text)


def _sentence(text: str) -> str:
    return f"{_capital(plain(text)).rstrip('.')}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- metrics

#: What a label of a metric says.
_LABELS: Final = {
    "code": "the code of [an error](../http-api.md#errors), or one of OpenAI's for events of a session:"
    " `input_audio_buffer_full`, `conversation_already_has_active_response` ...",
    "change": "of a replica's record: `added`, `updated` or `removed`; another life of it is removed and added",
    "component": "`hub` or `supervisor`",
    "device": "the devices that the replica was shown",
    "engine": "the engine of the stage",
    "event": "what a replica's sockets counted: `refused_handshakes`, `bad_frames`, `wrong_epoch`, `replayed`,"
    " `rejected_<failure kind>`, `hubs_given_up`, `hubs_held_back`, `unread_requests`, `hoarded_credits`,"
    " `revoked` ...",
    "hub": "the id of a hub",
    "gpu": "the GPU's number among those that the replica sees",
    "kind": "of what `/v1/realtime` has refused: `session` or `event`",
    "key": "the name of an API key, or `admin` or `metrics` for those tokens; never a key",
    "model": "the model of the stage",
    "namespace": "the namespace in etcd",
    "outcome": "of a hub: `ok`, `cancelled`, or the type of the error: `OverloadedError`, `StageUnavailableError`,"
    " `ReplicaLostError`, `EngineFailedError`, `DeadlineExceededError`, `InvalidRequestError` ...; of a replica: `ok`,"
    " `cancelled`, or the failure kind: `engine`, `deadline`, `invalid`, `payload`, `overloaded`, `draining`,"
    " `not_resumable`",
    "pid": "the process id of the replica",
    "python": "the version of Python",
    "replica": "the replica as everywhere else, `<stage>/<replica id>`; of a hub's failed requests empty where none had"
    " the request",
    "torch": "the version of torch in the replica; empty: not loaded",
    "type": "of tokens: `prompt` or `completion`",
    "version": "the release of omni-discovery",
    "vllm": "the version of vLLM in the replica; empty: not loaded",
    "part": "a part of a stage's time: `queue`, `submit`, `first_output`, `generate`, `transfer`; or `total`"
    " ([what they mean](../operations/watch.md#where-the-time-goes))",
    "reason": "why a frame was dropped: `malformed`, `misplaced` (wrong socket), `session`, `epoch`, `stale` (of an"
    " earlier attempt), `duplicate`, `gap`, `piece`, `window` (a piece too early), `reference` (to a hand-off) or"
    " `content` that can't be, `reference_memory` (an attempt whose references take too much), `late`; or a client's"
    " connection"
    " closed: `header_timeout`, `body_timeout`, `send_timeout`, `displaced` (for a newcomer), `refused` (no place),"
    " `unread_memory` (its answer lay unread, and all together were too much),"
    " `body_memory`, `malformed` (no HTTP), `many_lines` (in a header),"
    " `tiny_pieces` (chunks or frames of a few bytes), `too_fast` (messages of a WebSocket),"
    " `tls_records` (hardly any HTTP in them), `answered` (sends on after that)",
    "stage": "the stage's number",
    "way": "`in`: HTTP request to first dispatch; `out`: last frame of a replica to HTTP answer",
}

_METRICS_INTRO: Final = """\
# Metrics

{made}

In the format of Prometheus:

- `GET /metrics` of a hub has its own metrics and those of its local replicas and supervisors. With `--api vllm`, those
  of vLLM's own server follow. With `--api-server-count` above 1 it has those of all servers, and each metric of a hub
  or of vLLM's server has a label `server` with the number of its server; 0 is the first.
- `GET /metrics` at `--metrics-port` of `omni serve --headless` has those of that supervisor and its replicas. A hub
  with `--metrics-port` has its own there, and none at the port of its API.

[What to watch, and the alerts](../operations/watch.md#metrics-and-alerts) · `compose/monitoring` has rules for
Prometheus and a dashboard for Grafana.
"""


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    metrics = sorted(_metrics(), key=_metric_name)
    hosts = [*_family_rows(REPLICA_FAMILIES, ("stage", "replica"))]
    hosts += _family_rows(SUPERVISOR_FAMILIES, ("namespace", "stage"))
    labels = {label for metric in metrics for label in metric._labelnames}
    labels |= {label for of_replica in REPLICA_FAMILIES for label in of_replica.labels}
    labels |= {label for of_supervisor in SUPERVISOR_FAMILIES for label in of_supervisor.labels}
    rows = [
        [
            code(_metric_name(metric)),
            str(metric._type),
            ", ".join(map(code, metric._labelnames)),
            plain(metric._documentation),
        ]
        for metric in metrics
    ]
    head = ("metric", "type", "labels", "meaning")
    lines = [_METRICS_INTRO.format(made=_MADE), "## Of a hub", "", *table(head, rows)]
    lines += ["## Of replicas and supervisors", "", _SAMPLES, "", *table(head, sorted(hosts))]
    told = [[code(label), _LABELS[label]] for label in sorted(labels | {"namespace"})]
    lines += ["## Labels", "", *table(("label", "values"), told)]
    lines += ["## Buckets", "", "Upper bounds of the histograms, in seconds. Each also has `_count` and `_sum`.", ""]
    for metric in metrics:
        if isinstance(metric, Histogram):
            bounds = ", ".join(f"{bound:g}" for bound in metric._kwargs["buckets"])
            lines.append(f"- {code(_metric_name(metric))}: {bounds}")
    return "\n".join([*lines, ""])


#: How these metrics come about.
_SAMPLES: Final = """\
A replica reports once a second. One that has not for 15 s, because it hangs or its host is overloaded, has no metrics
until it does; nor has one without a replica id. Counters begin at 0 with each process."""


def _family_rows(families: Sequence[Family[Any]], labels: tuple[str, ...]) -> Iterator[list[str]]:
    for family in families:
        kind, suffix = ("counter", "_total") if family.is_counter else ("gauge", "")
        yield [code(family.name + suffix), kind, ", ".join(map(code, (*labels, *family.labels))), plain(family.text)]


def _metrics() -> list[Any]:
    """The metric objects that a hub makes."""
    return list(HubMetrics().registry._collector_to_names)


def _metric_name(metric: Any) -> str:
    if isinstance(metric, Counter):
        return f"{metric._name}_total"
    return f"{metric._name}_bucket" if isinstance(metric, Histogram) else str(metric._name)


# ---- keys


@dataclass(frozen=True, slots=True)
class _Key:
    """What stands under one key. ``record`` is the struct of its value, None where another page describes it."""

    path: str
    is_leased: bool
    value: str
    writers: str
    readers: str
    record: type[Any] | None
    fields: Mapping[str, str]


_SCHEMA: Final = "version of this format"
_REPLICA_FIELDS: Final = {
    "schema": _SCHEMA,
    "stage_id": "the stage, as in the key",
    "replica_id": "the replica, as in the key",
    "input_addr": "where hubs send work: the ZMQ address of the input socket",
    "output_addr": "where hubs read output: the ZMQ address of the output socket",
    "status": "only `up` is picked",
    "epoch": "creation revision of the key: one life of the replica",
    "phase": "what a `starting` replica does now, or `asleep`",
    "progress": "how far `phase` is, 1 is done",
    "reason": "why it is in `error`, waits or drains, or how the process before it ended",
    "queue_length": "requests on the replica; written within the [write budget](../registry.md#the-write-budget)",
    "capacity": "requests that run at the same time",
    "weight": "share of the requests beside the other replicas",
    "registered_at": "wall clock of the first write, seconds",
    "updated_at": "wall clock of the last write, seconds",
    "host": "host name",
    "pid": "process id of the replica",
    "device": "devices that it was shown",
    "model": "the stage's model",
    "fingerprint": "hash of what the deploy document says of the stage: its version",
    "version": "release of omni-discovery",
    "labels": "`--label` of the replica",
    "curve_public_key": "public half of its CURVE key; empty with `--zmq-security none`",
    "connectors": "by edge, where a connector's consumers reach the replica, for connectors that need it",
    "control_revision": "mod revision of the control value that was applied last; 0 while there is no control key",
    "control_error": "why a control value was not applied, as `revision N: reason`",
    "cordoned": "takes no new work",
    "revision": "of the model that was loaded; empty: not known",
    "dtype": "of the model that was loaded; empty: not known",
    "tokenizer": "hash of the tokenizer that was loaded; empty: not known",
    "content": "hash of the model's files: names, sizes, small files whole, samples of weights; empty: not known",
    "code": "the code that serves the model; empty: not known",
    "deterministic": "whether its output is a function of a request's input and seed; absent: no, or not known",
    "lost_slots": "slots that serve nobody though requests wait, as `reason` says; absent for none",
    "process": "boot, process id namespace, id and start of its process, for `omni chaos`; absent: not known",
    "wire_version": "the newest [version of messages](wire.md#frames) that it takes and sends; absent: 1",
    "partial_images": "whether it can put out unfinished pictures before a finished one; absent: no",
    "voices": "the names of the voices that it speaks with; absent: none",
    "params": "what each parameter of a request may be, in JSON Schema's words; of stages of video; absent: not told",
}
_API_KEY_FIELDS: Final = {
    "schema": _SCHEMA,
    "sha256": "the SHA-256 of the key, in hexadecimal: 64 digits",
    "created_at": "wall clock when it was made, seconds",
}
_HUB_FIELDS: Final = {
    "hub_id": "the hub, as in the key",
    "curve_public_key": "replicas accept connections from this key only; empty with `--zmq-security none`",
    "schema": _SCHEMA,
    "address": "of its HTTP API",
    "host": "host name",
    "pid": "process id",
    "version": "release of omni-discovery",
    "started_at": "wall clock of its start, seconds",
    "admin": "the URL of its port for operators, where other machines reach it; what is behind it asks for a token",
    "wire_version": "the newest [version of messages](wire.md#frames) that it takes and sends; absent: 1",
}
_BEAT_FIELDS: Final = {
    "schema": _SCHEMA,
    "counter": "counts the beats of one life of the hub",
    "revision": "the hub's picks follow every change up to this revision",
    "written_at": "wall clock of the hub, seconds",
    "pipeline": "fingerprint of the deploy document that the hub serves; empty: not known",
    "health": "what the hub reports, below; absent: it does not report, as older releases",
}
#: The objects in a hub's report: each with its name, its type and its fields.
_HEALTH_PARTS: Final[tuple[tuple[str, type[Any], Mapping[str, str]], ...]] = (
    (
        "`health`; fields that have their default are left out",
        HubHealth,
        {
            "window_s": "the seconds that the counts are about",
            "requests": "requests that ended in that time, without those that clients cancelled",
            "failures": "those that failed, by stage; mistakes of clients are none",
            "troubles": f"replicas that the hub can't use, {MOST_TROUBLES} at most",
            "more": "how many more there are",
            "loads": "the stages that requests wait for, or were refused for; absent: not counted, as older releases",
            "unread": "clients that read too slowly; absent for none",
        },
    ),
    (
        "`unread`",
        UnreadAnswers,
        {
            "count": "the requests of which something has lain unread for 10 s",
            "since": "wall clock since when the first of them does, seconds",
        },
    ),
    (
        "One of `failures`",
        StageFailures,
        {
            "stage_id": "the stage; `null` where none was at fault",
            "failed": "how many requests it failed",
            "kinds": "how many of them by type of error, the most frequent types",
            "last_at": "wall clock of the last, seconds",
        },
    ),
    (
        "One of `loads`",
        StageLoad,
        {
            "stage_id": "the stage; `null` where the hub as a whole had no room",
            "waiting": "requests that wait for a free slot now",
            "refused": "requests that were answered 429 in that time",
            "refused_at": "wall clock of the last, seconds",
        },
    ),
    (
        "One of `troubles`",
        ReplicaTrouble,
        {
            "stage_id": "the stage",
            "replica_id": "the replica",
            "epoch": "which life of it",
            "kind": ", ".join(code(kind) for kind in TroubleKind) + "; others in later releases",
            "since": "wall clock, seconds; 0: not known",
            "until": "when the ejection ends, wall clock, seconds",
            "reason": f"why, in {MOST_REASON} characters at most, without what engines say of a request",
            "is_picked": "picked all the same: too few others are left",
            "host": "host name",
            "pid": "process id",
        },
    ),
)
_CONTROL_FIELDS: Final = {
    "cordon": "take nothing new; what runs goes on",
    "weight": f"share beside the other replicas, 0 to {MOST_WEIGHT:g}; 0 is a cordon; absent: the replica's own, 1",
    "drain": "finish what runs, withdraw, end, stay down",
    "epoch": "the life that `drain` is for; absent: the first one that reads it, which writes its epoch here",
}
_WAIT_FIELDS: Final = {
    "schema": _SCHEMA,
    "host": "host name",
    "pid": "process id",
    "waits": "objects with `who` waits, the `reason`, `since` when (wall clock, seconds), the `kind` ("
    + ", ".join(code(kind) for kind in WaitKind)
    + "; others in later releases) and the `stage_id`. `refused`: nobody waits, the process has ended for that reason",
}
_JOB_FIELDS: Final = {
    "schema": _SCHEMA,
    "job_id": "the job, as in the key",
    "state": "where it stands",
    "created_at": "wall clock of its request, seconds",
    "expires_at": "wall clock from which on it is deleted with its files, seconds",
    "client": "the name of the API key that has made it; empty where none is asked for",
    "client_mark": "what tells that key from others of its name; empty where none is asked for",
    "hub": "the hub that keeps it to itself, for lack of a job store; empty: any hub may work on it",
    "owner": "the hub that works on it; empty: none",
    "owner_lease": "the lease that the key of that hub must have; else another may claim the job",
    "claims": "how many times it was claimed; the files of each claim have its number",
    "losses": "how many of its owners were lost",
    "started_at": "wall clock of the last claim, seconds",
    "ended_at": "wall clock of its end, seconds",
    "secret": "the name of the key that its files are encrypted with",
    "result": "the claim whose file holds the video, or the text of the error; 0: none",
    "error": "the code of the error",
    "model": "the name of the pipeline",
    "seconds": "length, as asked for",
    "size": "width and height, as asked for",
}
_PROGRESS_FIELDS: Final = {
    "claim": "the claim that has come so far",
    "percent": "how far",
}
_HUB_CONTROL_FIELDS: Final = {"revoked": "replicas drop all frames of this hub and send it nothing"}

_REPLICA, _STAGE, _HUB, _WAIT = "<replica_id>", "<stage_id>", "<hub_id>", "<name>"
_SOME: Final = "namespace"


def _key(make: Callable[..., str], *parts: str) -> str:
    """The template of a key; ``keys`` checks namespaces, so one that is allowed stands in for its place."""
    return make(_SOME, *parts).replace(f"/{_SOME}/", "/<namespace>/", 1)


def key_rows() -> dict[type[Any], _Key]:
    """Every kind of key that there is, by what ``keys.parse_key`` calls it."""
    return {
        keys.ReplicaKey: _Key(
            _key(keys.replica_key, _STAGE, _REPLICA),
            True,
            "the replica's record",
            "the replica",
            "hubs; `omni replicas`, `doctor`, `history`",
            ReplicaRecord,
            _REPLICA_FIELDS,
        ),
        keys.HubKey: _Key(
            _key(keys.hub_key, _HUB),
            True,
            "the hub's record",
            "the hub",
            "replicas (which hubs may connect); hubs (how many share the replicas); `omni hubs`, `history`",
            HubRecord,
            _HUB_FIELDS,
        ),
        keys.BeatKey: _Key(
            _key(keys.beat_key, _HUB),
            True,
            "the hub's beat",
            "the hub",
            "the same hub (its view is fresh); draining replicas; `omni hubs`, `replicas`, `doctor`",
            BeatRecord,
            _BEAT_FIELDS,
        ),
        keys.ReplicaControlKey: _Key(
            _key(keys.replica_control_key, _STAGE, _REPLICA),
            False,
            "what the operator wants of a replica",
            "`omni cordon`, `weight`, `drain`; `etcdctl put`; the replica (a drain's epoch, and its end)",
            "the replica",
            ControlSpec,
            _CONTROL_FIELDS,
        ),
        keys.HubControlKey: _Key(
            _key(keys.hub_control_key, _HUB),
            False,
            "what the operator wants of a hub",
            "`omni hub revoke`, `omni hub allow`; `etcdctl put`",
            "replicas; hubs",
            HubControlSpec,
            _HUB_CONTROL_FIELDS,
        ),
        keys.WaitKey: _Key(
            _key(keys.wait_key, _WAIT),
            True,
            "what a process without a record waits for",
            "supervisors, and hubs for their local ones, after a second",
            "`omni doctor`; `omni replicas`, `hubs`, `history`, `pipeline show` of a namespace with nothing else",
            WaitRecord,
            _WAIT_FIELDS,
        ),
        keys.ApiKeyKey: _Key(
            _key(keys.api_key_key, _WAIT),
            False,
            "the hash of an API key",
            "`omni key create`; `omni key revoke` deletes it",
            "hubs with `--api-keys-from-etcd`; `omni key list`",
            ApiKeyRecord,
            _API_KEY_FIELDS,
        ),
        keys.PipelineKey: _Key(
            _key(keys.pipeline_key),
            False,
            "the [deploy document](../deploy.md) in force",
            "the first `omni serve --deploy-config`; `omni pipeline apply`",
            "hubs; supervisors and replicas (at start)",
            None,
            {},
        ),
    }


def job_rows() -> list[_Key]:
    """Every kind of key about jobs, which have a root of their own."""
    return [
        _Key(
            _key(jobs.job_key, "<job_id>"),
            False,
            "the record of a [job](../http-api.md#videos)",
            "hubs",
            "hubs",
            jobs.JobRecord,
            _JOB_FIELDS,
        ),
        _Key(
            _key(jobs.progress_key, "<job_id>"),
            True,
            "how far a job is",
            "the hub that works on it",
            "hubs",
            jobs.JobProgress,
            _PROGRESS_FIELDS,
        ),
        _Key(
            _key(jobs.sweep_key),
            True,
            "the id of the hub that deletes expired jobs, as plain text",
            "the first hub to write it",
            "hubs",
            None,
            {},
        ),
    ]


_KEYS_INTRO: Final = """\
# Keys in etcd

{made}

All values are JSON, but that of `sweep`. Readers ignore fields that they do not know; a field that is missing has its
default. A value that can't be read hides what it describes and nothing else. A leased key goes when its owner's lease
ends. A `string` has at most 4096 characters unless stated otherwise.

How hubs and replicas use the keys, and what happens when etcd is away: [the registry](../registry.md). How to write
control keys: [steer replicas](../operations/run.md#steer-replicas).
"""
_LIFE: Final = {True: "while its writer's lease lasts", False: "until it is deleted"}


def keys_page() -> str:
    """docs/reference/keys.md."""
    rows = [*key_rows().values(), *job_rows()]
    lines = [_KEYS_INTRO.format(made=_MADE)]
    head = [[code(key.path), "yes" if key.is_leased else "no", key.value] for key in rows]
    lines += table(("key", "leased", "value"), head)
    for key in rows:
        name = key.path.removeprefix("/omni/v1/<namespace>/").removeprefix(f"{keys.JOBS_ROOT}<namespace>/")
        lines += [f"## `{name}`", ""]
        lines += [
            f"- **Written by** {key.writers}",
            f"- **Read by** {key.readers}",
            f"- **Stays** {_LIFE[key.is_leased]}",
        ]
        lines.append("")
        if key.record is not None:
            lines += table(("field", "type", "default", "meaning"), _fields(key.record, key.fields))
        for title, record, notes in _HEALTH_PARTS if key.record is BeatRecord else ():
            lines += [f"{title}:", "", *table(("field", "type", "default", "meaning"), _fields(record, notes))]
    return "\n".join(lines)


def _fields(record: type[Any], notes: Mapping[str, str]) -> list[list[str]]:
    """A row for each field. Raise KeyError for a field of which nothing is said."""
    if is_dataclass(record):
        of = {field.name: field for field in fields(record) if field.name not in ("hub_id",)}
        assert of.keys() == notes.keys(), f"{record.__name__}: describe {sorted(of.keys() ^ notes.keys())}"
        hints = typing.get_type_hints(record)
        return [[code(name), _hint(hints[name]), "", notes[name]] for name in of]
    info = msgspec.inspect.type_info(record)
    assert isinstance(info, msgspec.inspect.StructType)
    named = {field.encode_name: field for field in info.fields}
    assert named.keys() == notes.keys(), f"{record.__name__}: describe {sorted(named.keys() ^ notes.keys())}"
    return [[code(name), _json_type(field.type), _json_default(field), notes[name]] for name, field in named.items()]


def _hint(hint: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number"}
    return next(kinds[each] for each in (hint, *typing.get_args(hint)) if each in kinds)


def _json_type(kind: Any) -> str:
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "integer" if isinstance(kind, msgspec.inspect.IntType) else "number"
            least = "" if kind.ge is None else f" from {kind.ge:g}"
            most = "" if kind.le is None else f" to {kind.le:g}"
            return f"{name}{least}{most}"
        case msgspec.inspect.StrType(max_length=most):
            return "string" if most in (None, 4096) else f"string, {most} characters at most"
        case msgspec.inspect.EnumType(cls=cls):
            return ", ".join(code(member.value) for member in cls)
        case msgspec.inspect.BoolType():
            return "boolean"
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(_json_type(each) for each in types)
        case msgspec.inspect.DictType(value_type=value):
            return {msgspec.inspect.StrType: "object of strings", msgspec.inspect.IntType: "object of integers"}.get(
                type(value), "object"
            )
    names: dict[type[Any], str] = {
        msgspec.inspect.StructType: "object",
        msgspec.inspect.ListType: "array",
        msgspec.inspect.VarTupleType: "array",
        msgspec.inspect.NoneType: "null",
    }
    return names[type(kind)]


def _json_default(field: Any) -> str:
    if field.default is msgspec.UNSET:
        return ""
    if field.default is not msgspec.NODEFAULT:
        return code(msgspec.json.encode(field.default).decode())
    if field.default_factory is not msgspec.NODEFAULT:
        return code(msgspec.json.encode(field.default_factory()).decode())
    return ""


if __name__ == "__main__":
    main()

"""The page of all log events: found in the calls of the code, each with the meaning that is said here.

``python -m tests.support.reference`` writes it; ``unit/repository/test_events`` compares both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("hub", "omni_discovery", "stage_runtime")
_EVENT: Final = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)+(?= |:|\n|$)")
_FIELD: Final = re.compile(r"([a-z_]+)=(?:%|\{)")
_METHODS: Final = ("debug", "info", "warning", "error", "exception", "critical", "log")
#: By which name a logger is called in the code.
_LOGGERS: Final = ("logger", "_logger", "self._logger")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a logger. ``text`` is its template, empty where it is made elsewhere."""

    place: str
    method: str
    text: str

    @property
    def event(self) -> str:
        """The event's name; empty if the template has none."""
        found = _EVENT.match(self.text)
        return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class Event:
    """One event: the levels at which it is logged, and the fields that its lines may have."""

    name: str
    levels: tuple[str, ...]
    fields: tuple[str, ...]


@cache
def calls() -> tuple[Call, ...]:
    """Every call of a logger in the packages."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(call for path in files for call in calls_in(path.read_text("utf-8"), str(path.relative_to(ROOT))))


def calls_in(source: str, file: str) -> Iterator[Call]:
    """The calls in a file; a template may be a variable that is set before, in the same function."""
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[int] = set()
    # The innermost function comes last.
    for scope in reversed(scopes):
        texts = sorted(_texts(scope))
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and _is_log(node) and id(node) not in seen:
                seen.add(id(node))
                yield Call(f"{file}:{node.lineno}", str(getattr(node.func, "attr", "")), _template(node, texts))


def _texts(scope: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each variable that is set to a text."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name) and (text := _text(node.value)):
                yield node.lineno, target.id, text


def _is_log(node: ast.Call) -> bool:
    called = node.func
    return isinstance(called, ast.Attribute) and called.attr in _METHODS and ast.unparse(called.value) in _LOGGERS


def _template(node: ast.Call, texts: list[tuple[int, str, str]]) -> str:
    at = 1 if getattr(node.func, "attr", "") == "log" else 0
    first = node.args[at]
    if isinstance(first, ast.Name):
        before = [text for line, name, text in texts if name == first.id and line <= node.lineno]
        return before[-1] if before else ""
    return _text(first)


def _text(node: ast.AST) -> str:
    """A text as it is written, with ``{...}`` for what is put in; empty for what is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) if isinstance(value, ast.Constant) else "{}" for value in values)
        case ast.BinOp(left=left, right=right):
            begun = _text(left)
            return begun + _text(right) if begun else ""
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=[first, *_])]):
            return _text(first)
        case ast.IfExp(body=body):
            return _text(body)
    return ""


@cache
def events() -> Mapping[str, Event]:
    """Every event by its name."""
    levels: dict[str, set[str]] = {}
    fields: dict[str, dict[str, None]] = {}
    for call in calls():
        if call.event:
            levels.setdefault(call.event, set()).add(call.method)
            fields.setdefault(call.event, {}).update(dict.fromkeys(_FIELD.findall(call.text)))
    made = {name: Event(name, tuple(sorted(levels[name], key=_METHODS.index)), tuple(fields[name])) for name in levels}
    return made | {event.name: event for event in COMPUTED}


#: What its calls put together elsewhere, or name by a variable.
COMPUTED: Final = (
    Event("hub.refused", ("info", "warning"), ("error", "count")),
    Event("replica.reference_refused", ("warning",), ("replica",)),
    Event("replica.content_refused", ("warning",), ("replica",)),
    Event("replica.stopped", ("info",), ("stage",)),
    Event("request.failed", ("info", "warning"), ("request", "stage", "replica", "attempt", "kind", "cause")),
    Event("requests.failed", ("warning",), ("count", "kinds", "stages", "in_s")),
    Event("server.foreign_identity", ("warning",), ("reason",)),
    Event("server.misplaced", ("warning",), ("reason",)),
    Event("server.bad_frame", ("warning",), ("reason",)),
)
#: The calls whose template does not begin with an event's name: how they begin, and what they log.
UNNAMED: Final[Mapping[str, str]] = {
    "hub/orchestrator/rejection_log.py": "hub.refused",
    "hub/replicas/stage_client.py": "replica.content_refused",
    "hub/serve/app.py": "text of --log-stats",
    "stage_runtime/server/server.py": "server.bad_frame",
}
_LEVELS: Final = {"exception": "error", "log": "as its cause asks for"}

_INTRO: Final = """\
# Log events

{made}

Every event that hubs, supervisors, replicas and commands log, with its level, fields and meaning. A line is the
event, then `key=value`, then text ([the log](../operations/watch.md#the-log)); with `--log-format json` the fields are
in `fields`. One event is one transition: a trouble that goes on is not logged again, or is counted.

- **INFO**: a state has changed. **WARNING**: the product has healed itself, or is about to. **ERROR**: a person must
  look; so it is with CRITICAL. DEBUG lines are written with `--log-level debug`.
- Names of events don't change within a release line; fields may be added.
- What engines, libraries and functions of users print themselves is not listed.
"""


def events_page(made: str, table: object) -> str:
    """docs/reference/events.md. ``made`` says how it is made; ``table`` makes a Markdown table."""
    assert callable(table)
    lines = [_INTRO.format(made=made)]
    groups: dict[str, list[Event]] = {}
    for name in sorted(events()):
        groups.setdefault(name.partition(".")[0], []).append(events()[name])
    for group, members in groups.items():
        rows = [
            (
                f"`{event.name}`",
                ", ".join(dict.fromkeys(_LEVELS.get(level, level) for level in event.levels)),
                ", ".join(f"`{field}`" for field in event.fields),
                MEANINGS[event.name],
            )
            for event in members
        ]
        lines += [f"## {group}", "", *table(("event", "level", "fields", "meaning"), rows)]
    return "\n".join(lines)


MEANINGS: Final[Mapping[str, str]] = {
    "admin.call": "an operator has called a method at the port for operators",
    "api.calls_not_read": "a parser of vLLM's took too long to read an answer for calls, and it goes out as text",
    "api.route_closed": "the server of vLLM or vLLM-Omni has a route that this release does not know: it answers 501",
    "api_keys.bad_value": "a key of the API in etcd can't be read, and opens nothing",
    "api_keys.failed": "a bug: watching the keys of the API failed; it begins anew",
    "api_keys.refused": "etcd does not let this hub read the keys of the API",
    "api_keys.relist": "the keys of the API are listed anew, after their watch broke",
    "api_keys.retrying": "etcd does not answer for the keys of the API; the known ones go on to hold",
    "api_server.ended": "a further process of --api-server-count has ended; with code 0 somebody has told it to stop",
    "api_server.killed": "such a process did not end in time, and was killed",
    "api_server.metrics_missing": "such a process did not tell its metrics: they are missing from /metrics",
    "api_server.not_started": "such a process could not be started; it is tried again",
    "api_server.ready": "such a process takes clients of the port",
    "api_server.starting": "such a process is started",
    "api_server.stopped": "such a process has stopped with its hub",
    "cache.not_kept": "a cache of this process is in a temporary folder, since its usual folder can't be used",
    "client.close_incomplete": "a client of the registry did not end in time; its lease runs out by itself",
    "client.old_name": "a program names etcd's endpoints by a name that is read until the next release line",
    "collective.call": "a method is called on all replicas of some stages",
    "collective.done": "such a call has its answers",
    "collective.unknown_stage": "such a call names a stage that the pipeline has not",
    "connector.insecure": "hand-offs can be fetched by whoever reaches the port, as the document asks",
    "connector.no_sender_token": "a fetch was refused: the two sides have no token in common",
    "connector.not_attached": "shared memory of another replica could not be opened; the network is used",
    "connector.not_listening": "hand-offs can't be fetched over the network, since no port could be opened",
    "connector.port_taken": "the wanted port of a connector is in use; another one is",
    "connector.put_failed": "a hand-off could not be stored; its request is tried again or fails",
    "control.applied": "a replica goes by what its control key says since this revision",
    "control.drain_left": "the order of a drain is left for `omni drain` to remove: this user may not",
    "control.drained": "the order of a drain is removed, since the replica has ended",
    "control.failed": "a bug: watching a control key failed; it begins anew",
    "control.listener_failed": "a bug: what follows from a control key failed",
    "control.not_put_back": "a control key that etcd has lost could not be written again",
    "control.put_back": "a control key that etcd has lost was written again by its replica",
    "control.refused": "etcd does not let this replica read its control key",
    "control.relist": "a control key is read anew, after its watch broke",
    "control.retrying": "etcd does not answer for a control key; what it said goes on to hold",
    "credits.bug": "a bug: credits could not be requested from a replica",
    "dashboard.action": "an operator acts on a replica from the dashboard",
    "dashboard.checks_failed": "a bug: the dashboard's checks could not be made; all else goes on",
    "dashboard.login": "a browser has logged in at the dashboard",
    "dashboard.snapshot_failed": "a bug: the dashboard's page stands still; requests go on",
    "deploy.async_chunk": "an edge hands over in pieces that its stages can't use as they come",
    "deploy.connector_unknown": "a connector of the document is not known on this host",
    "deploy.devices": "the devices of a stage look wrong on this host",
    "deploy.engine_unknown": "an engine of the document is not known on this host",
    "deploy.in_force": "this hub serves the document that is in etcd",
    "deploy.left_out": "a setting of vLLM-Omni's deploy file has no meaning here",
    "deploy.resolved": "vLLM-Omni's pipeline was made a deploy document",
    "deploy.resolving": "vLLM-Omni is asked which stages a model has",
    "devices.waiting": "a supervisor waits for a device that another one is about to free",
    "drain.acknowledged": "every hub has seen that this replica drains",
    "drain.failed": "a bug: waiting for the hubs' acknowledgements failed",
    "drain.not_looked": "the hubs' acknowledgements could not be read; they are read again",
    "embedded_etcd.not_restarted": "the embedded etcd has ended and could not be started again; one line a reason",
    "embedded_etcd.restarting": "the embedded etcd has ended, and is started again, empty",
    "embedded_etcd.started": "the embedded etcd of this hub runs",
    "embedded_etcd.this_machine_only": "stages are left to other hosts, which can't reach this hub's own etcd",
    "engine.add_failed": "the engine raised for a new request, which fails",
    "engine.bad_output": "the engine put out something invalid for a request, which fails",
    "engine.calls_not_read": "a model's answer could not be read as calls of functions, and goes out as text",
    "engine.control": "the engine was told by a control call",
    "engine.control_failed": "the engine raised in a control call",
    "engine.died": "the engine raised in a step: the replica ends, and its requests move",
    "engine.feed_failed": "the engine raised for a piece of a hand-off; that request fails",
    "engine.load_failed": "the engine could not be loaded",
    "engine.metrics_failed": "the engine's metrics can't be read; they are not shown any more",
    "engine.misspelled": "an engine of another package has a method whose name looks mistaken",
    "engine.output_failed": "the engine's output of a request could not be made; that request fails",
    "engine.pause_failed": "the engine raised when a request was paused or continued",
    "engine.kv_not_fetched": "a prefill's blocks are too few for its prompt, which this replica reads itself",
    "engine.port_not_sealed": "a port of the engine's ranks is open to users of this host",
    "etcd.advisories": "etcd's release has published weaknesses by which tenants break out",
    "etcd.away": "no endpoint of etcd answers; what was known goes on to hold",
    "etcd.back": "etcd answers again",
    "etcd.known_bugs": "etcd's release has bugs that matter here, each with what makes it harmless",
    "etcd.no_users": "a user was given, and etcd asks for none",
    "etcd.version": "the release of an endpoint that has answered",
    "etcd.version_refused": "etcd tells its release to administrators only",
    "etcd.version_unknown": "etcd's release could not be found out",
    "flag.api_key": "keys of the API were given on the command line, where other users could see them",
    "flag.ignored": "a flag of another product was given, and has no effect here",
    "folders.left": "temporary folders of ended processes could not be removed",
    "history.not_written": "the file behind `omni history` could not be written",
    "http.accept_failed": "new connections wait, for lack of descriptors or memory",
    "http.cut": "a client's connection was closed because it kept the hub waiting; one line a minute for each reason",
    "http.cut_unanswered": "the same, without an answer",
    "http.no_upgrade": "a client asked for another protocol than WebSocket, and got HTTP/1.1; one line a minute",
    "http.request": "one line of the access log",
    "hub.admin": "the port for operators is open",
    "hub.admin_token": "where the token of that port lies",
    "hub.allowed": "a hub was revoked, and is let in again",
    "hub.closed": "the hub has ended",
    "hub.dashboard": "where the hub's dashboard is",
    "hub.died": "a bug: the hub's main task has ended; the process does, too",
    "hub.health_not_reported": "a bug: the hub's report could not be made; requests go on",
    "hub.identity_ignored": "the saved identity of this hub can't be used; it is a new one",
    "hub.joined": "more replicas can serve",
    "hub.listening": "the hub's port is open",
    "hub.loading_vllm": "vLLM's server is loaded, in front of the hub",
    "hub.loading_vllm_omni": "vLLM-Omni's server is loaded, in front of the hub",
    "hub.metrics": "where the hub's metrics are",
    "hub.no_receipts_socket": "omni why on this machine can't ask the hub without its port for operators",
    "hub.not_ready": "a stage lacks a replica, or keeps failing",
    "hub.open": "whoever reaches the port may use the API",
    "hub.pipeline_followed": "the hub serves the new document in force",
    "hub.pipeline_not_followed": "the document in force is not one that this hub can serve: restart it with that",
    "hub.pipeline_not_put": "the document could not be written to etcd; it is tried again",
    "hub.pipeline_not_taken_back": "a document that this hub had written for a start that failed is still in etcd",
    "hub.pipeline_put": "this hub has written its document to etcd",
    "hub.ready": "every stage can serve",
    "hub.refused": "requests were refused at the door; one line in 5 s for each kind",
    "hub.revoked": "an operator has shut this hub out: no replica listens to it",
    "hub.started_from_saved_view": "etcd has given no list; the hub serves by the view of its last life",
    "hub.starting": "a hub begins",
    "hub.state_unusable": "the hub's folder can't be used: nothing is kept over a restart",
    "hub.stopping": "the hub was told to stop",
    "hub.unusable": "a hub encrypts and this replica does not, or the other way round",
    "hub.unusable_more": "more hubs than are named encrypt, and this replica does not, or the other way round",
    "hub.waiting": "what the hub waits for until every stage can serve; ever more seldom",
    "jobs.bad_record": "the record of a job can't be read, and is ignored",
    "jobs.claimed": "this hub works on a job",
    "jobs.completed": "a job is done, and its result is stored",
    "jobs.defect": "a bug: the work on a job failed",
    "jobs.deleted": "a job and its files are deleted",
    "jobs.failed": "a bug: keeping jobs failed; it begins anew",
    "jobs.fenced": "a job is another hub's by now; this one's work on it is thrown away",
    "jobs.given_up": "a job has lost too many owners, and is not tried again",
    "jobs.job_failed": "a job has failed, with the code of its error",
    "jobs.not_swept": "files of jobs could not be removed; it is tried again",
    "jobs.orphans_removed": "files without a job were removed",
    "jobs.released": "this hub gives a job back, for another to claim",
    "jobs.retrying": "etcd does not answer for the jobs; it is tried again",
    "jobs.stopped": "the work on a job was stopped, since it was cancelled or is another hub's",
    "jobs.store_asked_again": "the job store does not answer, or has no room; it is asked again for a job",
    "jobs.store_away": "the job store can't be reached; said once until it is back",
    "jobs.store_back": "the job store answers again",
    "jobs.telling": "the end of a job could not be written yet; it is tried again",
    "jobs.tried_again": "the request of a job failed in a way that may pass, and is sent again",
    "lease.gate_failed": "a bug: whether the lease may be renewed could not be decided",
    "lease.grant_defect": "a bug: asking for a lease failed; it is tried again",
    "lease.held": "the process holds a lease",
    "lease.lost": "the lease is over: its key is gone, and is registered anew",
    "lease.renew_defect": "a bug: renewing the lease failed; it is tried again",
    "lease.story": "what happened to a lease until it was lost",
    "lease.suspect": "renewals fail; the lease holds for now",
    "lease.ttl_raised": "etcd granted a longer TTL than was asked for",
    "model_code.left_aside": "a model came with code of its own, which may not run: the library's class is taken",
    "mooncake.not_removed": "Mooncake did not remove a hand-off; it ages out there",
    "omni.error": "a command has failed, with the reason",
    "orchestrator.bug": "a bug: an event of a request failed; that request ends",
    "output.bug": "a bug: an output could not be handed to its client; that request ends",
    "payload.cleanup_failed": "a bug: a hand-off could not be let go of",
    "payload.close_failed": "a connector raised when it was closed",
    "payload.closed": "what a connector has stored and fetched in the replica's life",
    "payload.health_failed": "a connector raised when it was asked whether it works",
    "payload.never_worked": "a connector was closed that had not worked before",
    "payload.no_thread": "no thread is left to fetch hand-offs; they wait",
    "payload.setting_ignored": "a setting of a connector is the replica's to set",
    "pick.bug": "a bug: a pick failed; its request ends",
    "pictures.batch_failed": "pictures could not be drawn together; each is tried alone",
    "pipeline.from_supervisor": "no etcd answers; the replica goes by the document that its supervisor had",
    "pipeline.waiting": "a supervisor waits for the deploy document",
    "process.crashed": "an error that nobody caught ends the process, or a thread of it",
    "producers.unknown": "who made a hand-off could not be looked up",
    "queue_length.unknown": "a program's own measure of its queue raised; the former length stands",
    "ray.waiting": "the Ray cluster has no room for the replicas yet",
    "realtime.bug": "a bug in a conversation by voice; it ends",
    "realtime.words_cut": "an answer in a conversation by voice had more words than one may have, and was ended",
    "registrar.failed": "a bug: keeping the key failed; it begins anew",
    "registrar.guard_failed": "a bug: watching the own key failed; it begins anew",
    "registrar.guard_retrying": "etcd does not answer for the own key; it is asked again",
    "registrar.left_to_expire": "the key could not be removed at the end; it goes with its lease",
    "registrar.listener_failed": "a bug: what follows from a registration failed",
    "registrar.lost": "the key is gone or another's; it is registered anew",
    "registrar.overwritten": "somebody has overwritten the key; its owner has written it again",
    "registrar.registered": "the process is in the registry, under this key",
    "registrar.retrying": "etcd does not take the registration; it is tried again",
    "replica.attached": "the hub has a client for a replica that the registry shows",
    "replica.close_failed": "a part of the replica raised when it was closed; the others are closed",
    "replica.close_hung": "closing took too long; the process ends without it",
    "replica.content_refused": "a hub has dropped an answer whose content is not what the wire allows",
    "replica.content_unknown": "a model's files could not be hashed: replicas can't be compared by them",
    "replica.drain_asked": "the control key asks for a drain",
    "replica.drain_unacknowledged": "these hubs did not acknowledge the drain in time; the replica ends all the same",
    "replica.ejected": "the hub leaves out a replica that failed too often",
    "replica.engine_dead": "the engine can't go on; the process ends, to be started again",
    "replica.failed": "a bug, or an error of the machine, ends the replica",
    "replica.hopeless": "the engine stands still for good, or its requests do: the process ends",
    "replica.ignored": "a replica is of a stage that the pipeline has not",
    "replica.in_reach": "the store of hand-offs answers again",
    "replica.kept": "a replica has vanished from the registry with many others, and is served all the same",
    "replica.former": "a replica of a release before: long messages of it end its connection; upgrade it",
    "replica.left_folder": "the replica runs in another folder, since others can write to this one",
    "replica.load_timeout": "loading took longer than `--stage-init-timeout`; the process ends, to be started again",
    "replica.loading": "the engine is loaded",
    "replica.lost_at_work": "a replica was lost with these requests",
    "replica.misconfigured": "the settings, the model or the devices are wrong here",
    "replica.no_session": "a replica is up by its record and does not answer, with the likely cause",
    "replica.not_published": "a bug: the record could not be made; it is tried again",
    "replica.not_refused": "a replica that was not picked for what it runs may be picked",
    "replica.not_sampled": "a bug: the replica's metrics could not be taken",
    "replica.on_cpu": "devices were asked for, and torch sees none: the stage runs on the CPU",
    "replica.out_of_reach": "the store of hand-offs does not answer",
    "replica.phase": "how far a replica's start is",
    "replica.published_again": "the record is written again, after failures",
    "replica.readmitted": "an ejected replica is picked again",
    "replica.ready": "the replica takes requests",
    "replica.reference_refused": "a hub has dropped an answer whose hand-off it must not pass on",
    "replica.refused": "a replica is not picked for what it runs",
    "replica.registration_lost": "the replica's key is gone; it registers anew",
    "replica.removed": "a replica has left the registry",
    "replica.refused_more": "so many more are refused, or no more, in the same moment, each without a line of its own",
    "replica.removed_more": "so many more have left in the same moment, each without a line of its own",
    "replica.session_down": "a session with a replica has ended, and why",
    "replica.session_up": "a session with a replica stands",
    "replica.sleep": "the engine sleeps, or is awake again",
    "replica.slots_back": "all its slots serve again",
    "replica.slots_lost": "slots that serve nobody though requests wait: its record says which",
    "replica.stall": "the engine has work and stands still",
    "replica.stopped": "the replica has ended, with what it counted",
    "replica.stopped_while_loading": "the replica was told to stop before it was up",
    "replica.unattached": "no client could be made for a replica; it is tried again",
    "replica.unsent": "a message could not be sent to a replica",
    "replica.unusable_more": "so many more lines about records were left out, since there are too many",
    "replica.unusable": "this hub can't use a replica, and why",
    "request.abort_unconfirmed": "a request whose client is gone may run on at its replica",
    "request.failed": "a request has failed: one line in a hub, one for each attempt in its replica",
    "request.failure_not_logged": "a bug: the line about a failed request could not be made",
    "request.poisonous": "a request ended several replicas that ran it; it is not tried again",
    "request.story": "the last hundred events of a request that failed",
    "requests.failed": "more requests have failed than get a line each; their sum",
    "server.bad_frame": "a message can't be read; more of them are counted",
    "server.closed": "the data plane of a replica has ended, with what it counted",
    "server.connections_paused": "no descriptor is left for new connections; they wait",
    "server.error": "a bug: a message could not be handled",
    "server.foreign_identity": "somebody uses the name of another peer; more of them are counted",
    "server.hoarded_credits": "a hub has asked for slots again and again, and used none",
    "server.not_listening": "the port can't be bound anew for a hub of a release before; it is tried again",
    "server.hub_behind": "a hub reads its outputs too slowly; its requests pause",
    "server.hub_given_up": "a hub has read nothing for too long; its requests here end",
    "server.misplaced": "a message came over the wrong socket or session; more of them are counted",
    "server.takes_long_frames": "a hub of a release before 0.2 came: strangers may send more before they are known",
    "server.revoked": "these hubs were shut out by an operator",
    "server.wrong_epoch": "a message is for another life of this replica's key",
    "shm.republish_failed": "a list of the hand-offs in shared memory could not be written",
    "shm.sweep_late": "others put too many names into shared memory to find in time what ended processes left",
    "shm.swept": "hand-offs of ended processes were removed from shared memory",
    "socket.bug": "a bug: a socket's message could not be handled",
    "stage.devices": "which devices a stage's replicas get",
    "stage.ended": "the local supervisor of a stage has ended",
    "stage.killed": "a local supervisor did not end in time, and was killed",
    "stage.not_deterministic": "a setting makes a stage not repeat its output exactly",
    "stage.not_ready": "none of a supervisor's replicas can serve any more",
    "stage.not_started": "a local supervisor could not be started; it is tried again",
    "stage.ready": "a supervisor's replicas can serve",
    "stage.starting": "the supervisor of a stage begins",
    "stage.waiting": "what a supervisor's replicas wait for; ever more seldom",
    "stories.not_kept": "a bug: what led to a failure could not be kept for `omni doctor`",
    "stories.not_written": "what led to a failure could not be written for `omni doctor`",
    "stream.bug": "a bug in a stream of answers; it ends",
    "stream.cut": "a stream of answers was cut, since its client is gone or too slow",
    "stream.key_taken_back": "the key of a client was taken back while its WebSocket /v1/stream was open; it ends",
    "supervisor.drained": "an operator has drained a replica; it stays down",
    "supervisor.draining": "the supervisor was told to stop; its replicas drain",
    "supervisor.ended": "a replica has ended while the supervisor stops",
    "supervisor.gave_up": "no replica can be kept up: the supervisor ends",
    "supervisor.imported": "the packages that all replicas share are loaded",
    "supervisor.killing": "replicas did not drain in time, and are killed",
    "supervisor.metrics": "where the supervisor's metrics are",
    "supervisor.metrics_connection_failed": "a connection to the supervisor's metrics broke",
    "supervisor.not_kept_up": "a replica is in a crash loop, or wrongly configured; it is tried every 30 s",
    "supervisor.not_started": "a replica's process could not be started; it is tried again",
    "supervisor.orphaned": "the hub of this supervisor is gone: its replicas drain",
    "supervisor.restarting": "a replica has ended, and is started again",
    "supervisor.starting": "replica processes are started",
    "tls.cut": "a client's TLS handshake was cut",
    "tls.not_renewed": "a new certificate can't be read; the old one goes on to be used",
    "tls.renewed": "a new certificate is used",
    "torch.batch_failed": "a function failed for several requests together; each is tried alone",
    "torch.close_failed": "a function raised when its request was ended",
    "torch.request_failed": "a function raised for a request, with the traceback",
    "torch.waits_for_all_pieces": "a function begins only when all pieces of its hand-off are there",
    "transfer.broken": "a fetch of a hand-off broke off; it is tried again",
    "transfer.refused": "a fetch came with a wrong token",
    "view.ignored": "the saved view of the registry can't be used",
    "view.not_saved": "the view of the registry could not be saved",
    "waits.no_last_words": "why a supervisor ends could not be written to etcd",
    "waits.not_shown": "what a process waits for could not be written to etcd",
    "waits.not_written": "what a process waits for could not be written on this machine",
    "watcher.bad_value": "a value in the registry can't be read; what it describes is hidden",
    "watcher.bad_values": "how many more such values there are",
    "watcher.failed": "a bug: watching the registry failed; it begins anew",
    "watcher.fresh": "the view of the registry is proved fresh again",
    "watcher.listener_failed": "a bug: a change of the registry could not be applied",
    "watcher.no_beat": "the hub's own beat did not come back on its watch",
    "watcher.not_compared": "the view could not be compared with etcd; it is tried again",
    "watcher.relist": "the registry is listed anew, after its watch broke",
    "watcher.repaired": "the view lacked changes that the watch had not brought",
    "watcher.own_record_not_read": "of too many hubs' records this hub's is one that replicas don't read: they let it "
    "in once others have gone",
    "watcher.too_many_hubs": "records of hubs are not read since there are too many: find who writes them",
    "watcher.too_many_records": "records of replicas are not read since there are too many: find who writes them",
    "watcher.stale": "the view of the registry can't be proved fresh any more",
    "write_budget.failed": "a bug: writes could not be counted",
    "write_budget.not_counted": "the size of a namespace could not be read",
    "yuanrong.engine_failed": "Yuanrong's engine has returned an error",
    "yuanrong.not_asked": "Yuanrong's datasystem could not be asked whether it works",
    "yuanrong.not_dropped": "Yuanrong did not drop a hand-off; it ages out there",
    "zmq.plain": "nothing is encrypted between hubs and replicas, as the flag asks",
}

"""What the pages of ``omni top`` say: a replica's last events, and the requests that took longest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_discovery.commands.history_log import Life
from omni_discovery.commands.top.rows import event_line
from omni_discovery.commands.why.waterfall import clock, seconds
from omni_discovery.receipts.receipt import ReceiptLine
from omni_discovery.records.schema import ReplicaInfo
from omni_discovery.text import harmless, one_line
from omni_discovery.view.recent_events import ShownEvent

#: What the page says in place of requests.
NO_REQUESTS = (
    "no hub has told of any request: hubs of your user on this machine are asked without a token, others with --hub URL"
    " or --all-hubs and their --admin-token-file; a hub with --receipts 0 keeps none"
)


def time_of_day(wall_s: float) -> str:
    """A moment of the wall clock without its date."""
    return clock(wall_s)[11:]


def replica_title(info: ReplicaInfo) -> str:
    """Which process it is, with what a narrow table has no column for."""
    known = (f"release {info.version}" if info.version else "", info.host, info.device)
    return ", ".join([f"replica {info.name}", f"epoch {info.epoch}", *filter(None, known)])


def history_lines(lives: Sequence[Life], events: Iterable[ShownEvent], name: str, width: int) -> list[str]:
    """The processes that a replica's id has had, the newest first, then what this screen has seen of it."""
    found = ["its processes, as omni history has them, the newest first"]
    found += [f"  {line}" for life in reversed(lives) for line in _life(life)] or ["  none is known"]
    found += ["", "since this screen was opened"]
    mine = [event for event in events if event.about == name]
    found += [f"  {event_line(event, time_of_day(event.at), width - 2)}" for event in mine] or ["  nothing has changed"]
    return [harmless(line) for line in found]


def _life(life: Life) -> list[str]:
    began = clock(life.registered_at_s) if life.registered_at_s else "-"
    until = life.end or f"{life.last_status or 'registered'} now"
    if life.is_gone and life.gone_at_s:
        until += f" at {clock(life.gone_at_s)}"
    return [f"{began}  epoch {life.epoch} on {one_line(life.host) or '-'}:{life.pid or '-'}", f"  {until}"]


def request_line(line: ReceiptLine, width: int) -> str:
    """One request of the list: how long it took, what became of it, where it went."""
    took = "-" if line.took_s is None else seconds(line.took_s)
    name = one_line(line.shown_id or line.request_id)
    went = " ".join(map(one_line, line.replicas)) or "nobody"
    outcome = line.outcome if not line.error else f"{line.outcome} {one_line(line.error)}"
    text = f"{took:>8}  {time_of_day(line.received_at)}  {outcome:<9}  {name}  {went}"
    return text if len(text) <= width else text[: width - 1] + "…"

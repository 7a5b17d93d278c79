"""``omni hubs`` shows the hubs of a namespace; ``omni hub revoke`` shuts one out, ``omni hub allow`` undoes that."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from omni_discovery.commands.output import say
from omni_discovery.commands.registry import add_registry_options, tell_if_empty, with_registry

if TYPE_CHECKING:
    from omni_discovery.kv import KVStore

#: The fields of a hub's record that the table shows.
_DESCRIBED: Final = ("address", "host", "pid", "version", "started_at")


@dataclass(frozen=True, slots=True)
class HubLine:
    """One hub as the registry has it.

    ``beat_age_s`` is the age of its last heartbeat, None before the first; ``error`` is of its record or control key.
    """

    hub_id: str
    registered: bool
    revoked: bool
    address: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    started_at: float = 0.0
    beat_age_s: float | None = None
    applied_revision: int = 0
    error: str = ""


class HubsCommand:
    """``omni hubs``."""

    summary = "show the hubs, and which of them are revoked"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_registry_options(parser)
        parser.add_argument("--json", action="store_true", help="print them as JSON lines instead")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        return with_registry(arguments, lambda kv: _show(kv, arguments))


class HubCommand:
    """``omni hub revoke HUB`` and ``omni hub allow HUB``."""

    summary = "shut a hub out of the data plane, or let it in again"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
        revoke = actions.add_parser("revoke", help="replicas drop all that comes from it, and tell it nothing")
        allow = actions.add_parser("allow", help="it may come in again")
        for action in (revoke, allow):
            action.add_argument("hub", metavar="HUB", help="its id, as `omni hubs` shows it")
            add_registry_options(action)
        revoke.add_argument("--force", action="store_true", help="also if no hub of that id is registered now")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from omni_discovery.records.keys import check_hub_id, check_namespace

        namespace, hub_id = check_namespace(arguments.namespace), check_hub_id(arguments.hub)
        if arguments.action == "allow":
            return with_registry(arguments, lambda kv: allow_hub(kv, namespace, hub_id))
        return with_registry(arguments, lambda kv: revoke_hub(kv, namespace, hub_id, force=arguments.force))


async def revoke_hub(kv: KVStore, namespace: str, hub_id: str, *, force: bool = False) -> int:
    """Write the hub's control key; return the exit code.

    Raise ConfigError for a hub that is not registered, unless ``force`` is given.
    """
    import msgspec

    from omni_discovery.errors import ConfigError
    from omni_discovery.records import keys

    is_registered = await kv.get(keys.hub_key(namespace, hub_id)) is not None
    if not is_registered and not force:
        listing = await kv.list(keys.hubs_prefix(namespace), keys_only=True)
        parsed = (keys.parse_key(namespace, item.key) for item in listing.items)
        names = [key.hub_id for key in parsed if isinstance(key, keys.HubKey)]
        there = f"there are: {', '.join(names[:20])}" if names else "no hub is"
        raise ConfigError(
            f"no hub {hub_id} is registered in namespace {namespace!r}; {there}; "
            "to revoke one that may register later, add --force"
        )
    key = keys.hub_control_key(namespace, hub_id)
    revision = await kv.put(key, msgspec.json.encode({"revoked": True}))
    say(f'hub {hub_id} is revoked: {key} says {{"revoked": true}} as of revision {revision}')
    say("replicas drop what it sends, and tell it nothing, within a second; `omni hubs` shows it")
    return 0


async def allow_hub(kv: KVStore, namespace: str, hub_id: str) -> int:
    """Delete the hub's control key; return the exit code."""
    from omni_discovery.records import keys

    key = keys.hub_control_key(namespace, hub_id)
    if await kv.delete(key):
        say(f"hub {hub_id} is revoked no more: {key} is deleted")
    else:
        say(f"hub {hub_id} was not revoked: there is no {key}; nothing to change")
    return 0


async def read_hubs(kv: KVStore, namespace: str, now_s: float) -> tuple[list[HubLine], int]:
    """Return the hubs that are registered, revoked or have an unreadable key, ordered by id.

    Also return how many records of hubs were not read, since there are too many.
    """
    from omni_discovery.records import keys
    from omni_discovery.records.beat import read_beats
    from omni_discovery.view.table import ReplicaTable

    listing = await kv.list(keys.namespace_prefix(namespace))
    table = ReplicaTable(namespace)
    table.replace(listing, now_s)
    view = table.snapshot()
    beats = read_beats(listing.items, namespace, view.hubs)
    bad = {keys.parse_key(namespace, key): error.reason for key, error in view.bad.items()}
    wrong = {key.hub_id: reason for key, reason in bad.items() if isinstance(key, keys.HubKey | keys.HubControlKey)}
    found = []
    for hub_id in sorted({*view.hubs, *view.revoked, *wrong}):
        hub, beat = view.hubs.get(hub_id), beats.get(hub_id)
        described = {} if hub is None else {name: getattr(hub, name) for name in _DESCRIBED}
        found.append(
            HubLine(
                hub_id,
                registered=hub is not None,
                revoked=hub_id in view.revoked,
                beat_age_s=None if beat is None else max(0.0, now_s - beat.written_at),
                applied_revision=0 if beat is None else beat.revision,
                error=wrong.get(hub_id, ""),
                **described,
            )
        )
    return found, view.refused_hubs


async def _show(kv: KVStore, arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.terminal import TextConsole, print_json
    from omni_discovery.view.record_bounds import too_many

    found, refused_count = await read_hubs(kv, arguments.namespace, time.time())
    if refused_count:
        say(f"{too_many(refused_count, 'hubs')}; omni doctor says what to do", error=True)
    if arguments.json:
        for line in found:
            print_json(asdict(line))
        return 0
    from omni_discovery.commands.tables import hub_table

    console = TextConsole()
    console.print(hub_table(found, arguments.namespace, time.time(), console.width))
    return 0 if found else await tell_if_empty(kv, arguments.namespace)

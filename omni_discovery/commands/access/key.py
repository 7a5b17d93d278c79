"""``omni key``: make, list and revoke the API keys of a namespace, of which etcd holds only hashes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import add_registry_options, with_registry

if TYPE_CHECKING:
    from omni_discovery.kv import KVStore

_SHOWN_ONCE = """\
This is the only time that the key is shown: etcd has its hash. Hubs that run with --api-keys-from-etcd take it from now
on, and refuse it from the moment of: omni key revoke {name}
"""


class KeyCommand:
    """``omni key create NAME``, ``omni key list`` and ``omni key revoke NAME``."""

    summary = "make, list and revoke the API keys that hubs with --api-keys-from-etcd ask for"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
        create = actions.add_parser("create", help="make a key and print it, this once")
        create.add_argument("name", metavar="NAME", help="what logs and metrics call it: who uses it, or what for")
        listing = actions.add_parser("list", help="the names of all keys, and when they were made")
        listing.add_argument("--json", action="store_true", help="print them as JSON lines instead")
        revoke = actions.add_parser("revoke", help="take a key back, within a second or two")
        revoke.add_argument("name", metavar="NAME", help="the key's name")
        for action in (create, listing, revoke):
            add_registry_options(action)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from omni_discovery.records.keys import check_key_name

        namespace = arguments.namespace
        if arguments.action == "list":
            return with_registry(arguments, lambda kv: _list(kv, namespace, as_json=arguments.json))
        name = check_key_name(arguments.name)
        work = _create if arguments.action == "create" else _revoke
        return with_registry(arguments, lambda kv: work(kv, namespace, name))


async def _create(kv: KVStore, namespace: str, name: str) -> int:
    import secrets
    import time

    from omni_discovery.errors import ConfigError
    from omni_discovery.records.api_key import KEY_BYTES, encode_api_key, make_key
    from omni_discovery.records.keys import api_key_key

    key = make_key(secrets.token_bytes(KEY_BYTES))
    claim = await kv.create(api_key_key(namespace, name), encode_api_key(key, time.time()))
    if not claim.won:
        raise ConfigError(
            f"there is a key {name!r} already, and nobody can show it again: choose another name, or take it back with"
            f" 'omni key revoke {name}' first"
        )
    # The key alone on standard output, so that a script can take it.
    sys.stdout.write(f"{key}\n")
    sys.stdout.flush()
    sys.stderr.write(_SHOWN_ONCE.format(name=name))
    return 0


async def _list(kv: KVStore, namespace: str, *, as_json: bool = False) -> int:
    from rich import box
    from rich.table import Table

    from omni_discovery.clock import utc_time
    from omni_discovery.commands.output import say
    from omni_discovery.commands.terminal import TextConsole, print_json
    from omni_discovery.records.api_key import read_api_keys
    from omni_discovery.records.keys import api_keys_prefix

    found, bad = read_api_keys(namespace, (await kv.list(api_keys_prefix(namespace))).items)
    for error in bad:
        say(f"can't be read, and opens nothing: {error}", error=True)
    if not found:
        say(f"namespace {namespace!r} has no API key: omni key create NAME", error=True)
        return 0
    if as_json:
        for name, record in sorted(found.items()):
            print_json({"name": name, "created_at": record.created_at})
        return 0
    table = Table(box=box.SIMPLE)
    table.add_column("key", overflow="fold")
    table.add_column("made")
    for name, record in sorted(found.items()):
        table.add_row(name, utc_time(record.created_at))
    TextConsole().print(table)
    return 0


async def _revoke(kv: KVStore, namespace: str, name: str) -> int:
    from omni_discovery.errors import ConfigError
    from omni_discovery.records.keys import api_key_key

    if not await kv.delete(api_key_key(namespace, name)):
        raise ConfigError(f"there is no key {name!r}: 'omni key list' names those that there are")
    sys.stdout.write(f"revoked: {name}; hubs that reach etcd refuse it within a second or two\n")
    return 0

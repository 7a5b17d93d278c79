"""``omni pipeline``: show the deploy document in force, or replace it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_discovery.commands.output import say
from omni_discovery.commands.registry import add_registry_options, with_registry
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from omni_discovery.kv import KVStore


_WHAT_NEXT: Final = """\
Replicas that run keep what they started with: restart them, one of every stage first, then the others from the first
stage to the last. Hubs follow by themselves; only where the stages, their inputs or their final outputs are others do
they have to be restarted, too, and say so. omni replicas marks who runs another document, omni doctor says what to do.
"""


class PipelineCommand:
    """``omni pipeline show`` and ``omni pipeline apply FILE``."""

    summary = "show or replace the deploy document in force"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
        show = actions.add_parser("show", help="print it as YAML")
        show.add_argument("--json", action="store_true", help="print it as one line of JSON instead")
        apply = actions.add_parser("apply", help="replace it by a file's")
        apply.add_argument("file", type=Path, metavar="YAML")
        for action in (show, apply):
            add_registry_options(action)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        if arguments.action == "show":
            return with_registry(arguments, lambda kv: _show(kv, arguments.namespace, as_json=arguments.json))
        from omni_discovery.deploy.document import encode_deploy
        from omni_discovery.deploy.load import load_deploy

        value = encode_deploy(load_deploy(arguments.file))
        return with_registry(arguments, lambda kv: apply_pipeline(kv, arguments.namespace, value))


async def _show(kv: KVStore, namespace: str, *, as_json: bool = False) -> int:
    import msgspec
    import yaml

    from omni_discovery.etcd.check import explain_empty
    from omni_discovery.records.keys import pipeline_key
    from omni_discovery.text import harmless_json

    current = await kv.get(pipeline_key(namespace))
    if current is None:
        text = f"namespace {namespace!r} has no pipeline yet: the first 'omni serve --deploy-config' puts one"
        empty = await explain_empty(kv, namespace)
        raise ConfigError(f"{text} ({empty})" if empty else text)
    try:
        document = msgspec.json.decode(current.value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{current.key}: {error}; replace it with 'omni pipeline apply FILE'") from error
    try:
        text = msgspec.json.encode(document).decode() if as_json else yaml.safe_dump(document, sort_keys=False)
    except RecursionError:
        # No pipeline that a hub serves has so many levels; what was written is shown all the same.
        text = current.value.decode()
        as_json = True
    if as_json:
        text = harmless_json(text) + "\n"
    sys.stdout.write(text)
    return 0


async def apply_pipeline(kv: KVStore, namespace: str, value: bytes) -> int:
    """Replace the document in force; return the exit code. Raise ConfigError if somebody else did so meanwhile."""
    from omni_discovery.deploy.document import decode_deploy
    from omni_discovery.deploy.load import describe_difference
    from omni_discovery.records.keys import pipeline_key

    key = pipeline_key(namespace)
    current = await kv.get(key)
    if current is not None and current.value == value:
        say("nothing to change: it was in force already")
        return 0
    # Compare-and-swap against the document just read: of two operators at once, the second gets an error.
    claim = await (kv.compare_and_put(key, value, current.mod_revision) if current else kv.create(key, value))
    if not claim.won:
        raise ConfigError("somebody else replaced the pipeline at the same moment; look at it and apply again")
    if current is None:
        say(f"namespace {namespace} has its first pipeline")
        return 0
    try:
        difference = describe_difference(decode_deploy(value, "the file"), decode_deploy(current.value, key))
    except ConfigError:
        difference = "what was there could not be read"
    say(f"replaced: {difference.replace(' in force', ' before')}")
    sys.stdout.write(_WHAT_NEXT)
    return 0

"""Where replicas hand over, by their records, and the addresses that references to hand-offs name. Pure.

A consumer connects to the address in a reference. So hubs and consumers accept only those of registered producers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from omni_discovery.records.schema import ReplicaInfo

#: Host and port as a record or a reference has them, of whatever type.
Address = tuple[Any, Any]
#: In place of a port: any.
ANY_PORT: Final = None
#: Names of the port in a record: of most connectors, and of transfer engines.
_PORTS: Final = ("port", "zmq_port")
#: The entry of a record's ``connectors`` that names the hosts of the engine's own KV transfer.
KV: Final = "kv"
#: Further hosts of a replica's KV cache that count, and the longest name of a host: others' records may have any.
MOST_KV_HOSTS: Final = 8
LONGEST_HOST: Final = 255
#: Addresses that one reference may name: it leads to one, which some connectors say twice.
MOST_ADDRESSES: Final = 4
#: ``http://host:port``, and nothing more.
_PLAIN_URL: Final = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


def registered_address(info: ReplicaInfo, to_stage: int) -> Address:
    """Where a replica hands over to a stage.

    Replicas before 0.2 registered no address for TCP: theirs is their host, with any port.
    """
    where = info.connectors.get(f"{info.stage_id}-{to_stage}")
    if not isinstance(where, Mapping) or "host" not in where:
        return host_of(info.input_addr), ANY_PORT
    return where["host"], next((where[name] for name in _PORTS if where.get(name) is not None), "")


def named_addresses(metadata: Mapping[str, Any]) -> Iterator[Address]:
    """The addresses in the metadata of a reference.

    Connectors also take a mapping from keys to the metadata of each.
    """
    for each in (metadata, *(each for each in metadata.values() if isinstance(each, Mapping))):
        if "source_host" in each or "source_port" in each:
            yield each.get("source_host"), each.get("source_port")


def is_at(named: Address, registered: Address) -> bool:
    """Whether the address that a reference names is the registered one."""
    return named[0] == registered[0] and registered[1] in (ANY_PORT, named[1])


def kv_hosts(info: ReplicaInfo) -> frozenset[str]:
    """The hosts at which a replica's KV cache may be fetched: its own, and the first it has registered for that."""
    registered = info.connectors.get(KV)
    hosts = registered.get("hosts") if isinstance(registered, Mapping) else None
    listed = hosts[:MOST_KV_HOSTS] if isinstance(hosts, list | tuple) else []
    more = [each for each in listed if isinstance(each, str) and len(each) <= LONGEST_HOST]
    return frozenset([host_of(info.input_addr), *more])


def named_kv_hosts(params: Any) -> Iterator[Any]:
    """The hosts in vLLM's ``kv_transfer_params``, from which its connectors fetch the KV cache."""
    if isinstance(params, Mapping):
        if params.get("remote_host") is not None:
            yield params["remote_host"]
        if params.get("remote_bootstrap_addr") is not None:
            named = str(params["remote_bootstrap_addr"])
            # What else a URL may hold can lead elsewhere, such as a user's name that looks like a host.
            yield host_of(named) if _PLAIN_URL.fullmatch(named) else named


def host_of(address: str) -> str:
    """The host in ``tcp://host:port`` or ``http://host:port``, without the brackets of IPv6."""
    return address.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")


def shown(address: Address) -> str:
    """An address in a message for people."""
    port = "" if address[1] is ANY_PORT else f" port {str(address[1])[:20]}"
    return f"{str(address[0])[:255]!r}{port}"

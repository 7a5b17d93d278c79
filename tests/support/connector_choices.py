"""The connectors that run on this machine, each as one line of a deploy file chooses it, and what they then counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from tests.support.mooncake import MASTER_PORT, master_on, require_mooncake
from tests.support.netns import Network, require_netns
from tests.support.yuanrong import datasystems_on, require_yuanrong

_CLOSED: Final = re.compile(r"payload\.closed edge=0-1 connector=(\S+) (.*)")
_REGISTRY: Final = Network("registry").hosts["registry"].address


def _master(network: Network) -> AbstractContextManager[None]:
    return master_on(network.hosts["registry"])


@dataclass(frozen=True)
class Choice:
    """A connector as the line names it, and what it takes."""

    connector: str
    extra: str = ""
    #: What runs beside the stages.
    beside: Callable[[Network], AbstractContextManager[None]] | None = None
    #: All on one machine, as it carries nothing between hosts that share no memory.
    on_one_machine: bool = False
    #: Which of its counts has to name every fetch.
    way: str = "gets"

    def require(self) -> None:
        """What it needs is there, or the test is not run."""
        if not self.on_one_machine:
            require_netns()
        if "Mooncake" in self.connector:
            require_mooncake()
        if "Yuanrong" in self.connector:
            require_yuanrong()

    def line(self, more: str = "") -> str:
        """The line of the document, with ``more`` settings."""
        told = ", ".join(each for each in (self.extra, more) if each)
        named = f"{{name: {self.connector}, extra: {{{told}}}}}" if told else self.connector
        return f"edges: [{{from: 0, to: 1, connector: {named}}}]"

    def counted(self, texts: Iterable[str]) -> Counter[str]:
        """What the connectors of all ``replicas`` have counted, by what these processes said; none is another one."""
        counts: Counter[str] = Counter()
        for connector, said in (closed for text in texts for closed in _CLOSED.findall(text)):
            assert connector == self.connector
            counts["replicas"] += 1
            counts.update({name: int(count) for name, _, count in (each.partition("=") for each in said.split())})
        return counts

    def assert_carried(self, counts: Counter[str], replicas: int, hand_offs: int) -> None:
        """Each hand-off was stored and fetched once by this connector; none failed, none travelled in the metadata."""
        assert counts["replicas"] == replicas
        assert (counts["gets"], counts[self.way], counts["failures"]) == (hand_offs, hand_offs, 0)
        # A dispatch that a busy machine accepts late is run a second time; nobody fetches what it stored first.
        assert hand_offs <= counts["puts"] <= 2 * hand_offs
        assert counts["segments_made"] > 0


CHOICES: Final[Mapping[str, Choice]] = {
    "auto": Choice("AutoConnector", way="by_network"),
    "auto-here": Choice("AutoConnector", on_one_machine=True, way="by_shared_memory"),
    "shared-memory": Choice("SharedMemoryConnector", on_one_machine=True),
    "tcp": Choice("TcpConnector"),
    "mooncake-transfer": Choice("MooncakeTransferEngineConnector"),
    "mooncake-store": Choice("MooncakeStoreConnector", f'master: "{_REGISTRY}:{MASTER_PORT}"', _master),
    "yuanrong": Choice("YuanrongConnector", beside=datasystems_on),
}

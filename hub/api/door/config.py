"""DoorConfig: who may use a hub's ports, and which ports it has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hub.api.door.keys import ApiKey
    from hub.api.door.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class OwnPort:
    """A port beside the API's; 0 takes a free one."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """The settings of a hub's door. It holds hashes of keys, never a key."""

    #: Keys that open the API.
    keys: tuple[ApiKey, ...] = ()
    #: Whether those in etcd open it, too.
    keys_from_etcd: bool = False
    tls: TlsFiles | None = None
    #: The port for operators; None: there is none.
    admin: OwnPort | None = None
    #: What opens it; None: a token is made at the start.
    admin_token: ApiKey | None = None
    #: Whether the dashboard at that port may be looked at without the token.
    dashboard_open: bool = False
    #: The socket to the demo that has started this hub, which kills replicas when it is asked to; None: no demo has.
    demo_fd: int | None = None
    #: The port for metrics; None: they are at the API's.
    metrics: OwnPort | None = None
    #: Whether they are at such a port of another API server of this hub.
    metrics_moved: bool = False
    #: What opens the metrics; None: they are open.
    metrics_token: ApiKey | None = None
    #: The proxies whose X-Forwarded-For is believed, as uvicorn reads them; empty: none is.
    forwarded_allow_ips: str = ""

    @property
    def asks_for_key(self) -> bool:
        """Whether the API is closed for those without a key."""
        return self.keys_from_etcd or bool(self.keys)

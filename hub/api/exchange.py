"""Exchange: one HTTP request and its answer, with the ids that name it, the replicas that serve it, and its log line.

Every answer carries ``x-omni-request-id``, the id by which the logs of hub and replicas name the request, and
``x-request-id``: the client's own, if it sent a usable one, else the same id. The client's is a label. It is shown and
logged, and no state is kept under it, so that two clients may use the same.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from starlette.responses import PlainTextResponse

from omni_discovery.errors import OmniError, RequestError
from omni_discovery.failure_log import trace_id, word
from omni_discovery.text import is_label
from omni_discovery.wire import WITH_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hub.request.outputs import OmniOutput

logger = logging.getLogger(__name__)

_LABEL: Final = "x-request-id"
_ID: Final = "x-omni-request-id"
_REPLICAS: Final = "x-omni-replicas"
_OWN: Final = frozenset(name.encode() for name in (_LABEL, _ID, _REPLICAS))
#: No path here is nearly so long, and a number in it is one that Python reads.
_LONGEST_PATH: Final = 4096
#: Replicas that the header and the log line name at most: one HTTP request may come to thousands for vLLM's server.
_MOST_NAMED: Final = 32
#: What clients are called by is made with it: it tells neither an address nor a key.
_SECRET: Final = secrets.token_bytes(16)
#: A host gets a network of this size in IPv6, and may use all of its addresses.
_IPV6_PREFIX: Final = 64
#: The key of the exchange in the ASGI scope.
_KEY: Final = "omni.exchange"


class Exchange:
    """One HTTP request, or one WebSocket connection."""

    __slots__ = (
        *("_replicas", "charge", "count_piece", "host", "key", "key_digest", "label", "most_answers", "request_id"),
    )

    def __init__(self, label: str = "", host: str = "") -> None:
        #: The hub's own name for it, which begins the ids of its requests to replicas, or is part of them.
        self.request_id = secrets.token_hex(16)
        #: The client's name for it; empty if it gave none that can be used.
        self.label = label
        #: The address that it came from, as far as it is known.
        self.host = host
        #: The name of the key that it came in with; empty where none is asked for.
        self.key = ""
        #: The SHA-256 of that key.
        self.key_digest = b""
        #: Counts further answers of this request against its client's cap, or raises; and that cap, 0 for none.
        self.charge: Callable[[int], None] = _charge_nothing
        self.most_answers = 0
        #: Counts a piece of the answer that goes past ASGI, for the log.
        self.count_piece: Callable[[bytes], None] = _count_nothing
        self._replicas: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Exchange({self.request_id}, {self.label!r}, {self.replicas})"

    def note_output(self, output: OmniOutput) -> None:
        """Remember the replicas that an output of the request names."""
        for replica in output.replicas:
            self._replicas[replica] = None
        if output.replica and output.replica not in self._replicas:
            self._replicas[output.replica] = None

    def note_error(self, error: OmniError) -> None:
        """Remember the replicas that a failed request was sent to."""
        if isinstance(error, RequestError):
            self._replicas |= dict.fromkeys(error.replicas)

    @property
    def client(self) -> str:
        """What replicas may know of its client: the same for all its requests to this process, and for no others'.

        That of an API key is the same to all hubs. Empty if nothing is known.
        """
        return _word_of_key(self.key_digest) if self.key_digest else _word_of(self.key, self.host)

    @property
    def replicas(self) -> str:
        """The replicas that have served it so far, by stage; empty for none."""
        names = sorted(self._replicas, key=_place)
        more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        return ", ".join(names[:_MOST_NAMED] + more)

    def headers(self) -> dict[str, str]:
        """The headers of the answer that name it, as far as the replicas are known now."""
        names = {_LABEL: self.label or self.request_id, _ID: self.request_id}
        return {**names, _REPLICAS: replicas} if (replicas := self.replicas) else names


def _charge_nothing(_answers: int) -> None:
    pass


def _count_nothing(_piece: bytes) -> None:
    pass


def _place(replica: str) -> tuple[int, ...]:
    return tuple(int(number) for number in replica.split("/"))


@lru_cache(maxsize=1024)
def _word_of_key(key_digest: bytes) -> str:
    return WITH_KEY + blake2b(key_digest, digest_size=8, person=b"omni-client").hexdigest()


@lru_cache(maxsize=1024)
def _word_of(key: str, host: str) -> str:
    """Made once for the many requests of a client: one HTTP request may come to thousands."""
    name = client_name(key, host)
    return blake2b(name.encode(), digest_size=8, key=_SECRET).hexdigest() if name else ""


def client_name(key: str, host: str) -> str:
    """The name of a client: of its API key, or its address, or network; empty for one without any."""
    if key:
        return f"key {key}"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


#: The exchange of the current task, for code that has no ASGI scope.
_current: Final[ContextVar[Exchange | None]] = ContextVar("exchange", default=None)


def current_exchange() -> Exchange:
    """The exchange that the current task serves; a new one where there is none."""
    return _current.get() or Exchange()


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of an ASGI scope; a new one where no middleware has begun one."""
    exchange: Exchange = scope.get(_KEY) or Exchange()
    return exchange


def host_of(scope: Scope) -> str:
    """The address of the other end of a connection; empty if there is none."""
    return str(scope["client"][0]) if scope.get("client") else ""


class Exchanges:
    """ASGI middleware that begins an Exchange for each request, adds its headers, and logs it if ``logs``."""

    def __init__(self, app: ASGIApp, *, logs: bool = False) -> None:
        self._app = app
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if len(scope["path"]) > _LONGEST_PATH and scope["type"] == "http":
            await PlainTextResponse(f"a path has at most {_LONGEST_PATH} characters", 414)(scope, receive, send)
            return
        began_s = time.perf_counter()
        exchange = scope[_KEY] = Exchange(_take_label(scope), host_of(scope))
        # vLLM's server makes its ids of this header: they are ours, whatever the client says.
        scope["headers"] = [*scope["headers"], (_LABEL.encode(), exchange.request_id.encode())]
        _current.set(exchange)
        answer = _Sent()
        if self._logs:
            exchange.count_piece = answer.count

        async def send_named(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                others = [header for header in message.get("headers", ()) if header[0] not in _OWN]
                own = [(name.encode(), value.encode("latin-1")) for name, value in exchange.headers().items()]
                message["headers"] = others + own
            if self._logs:
                answer.add(message)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            if self._logs:
                answer.log(scope, exchange, time.perf_counter() - began_s)


def _take_label(scope: Scope) -> str:
    """Remove the client's ``x-request-id`` from the scope and return it; empty unless there is one that is a label."""
    name = _LABEL.encode()
    found = [value for key, value in scope["headers"] if key == name]
    if not found:
        return ""
    scope["headers"] = [header for header in scope["headers"] if header[0] != name]
    label = found[0].decode("latin-1").strip() if len(found) == 1 else ""
    return label if is_label(label) else ""


def _client_trace(scope: Scope) -> str:
    """The id of the trace that the client's header names; empty if it names none."""
    found = [value for key, value in scope["headers"] if key == b"traceparent"]
    return trace_id(found[0].decode("latin-1").strip()) if len(found) == 1 else ""


class _Sent:
    """What was sent of one answer: for a WebSocket, its frames."""

    def __init__(self) -> None:
        self._status: int | str = "-"
        self._size_bytes = 0
        self._pieces = 0
        self._is_complete = False

    def add(self, message: Message) -> None:
        """Count one message to the client."""
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self._status = message["status"]
            case "http.response.body" | "websocket.http.response.body":
                self.count(message.get("body", b""))
                self._is_complete = not message.get("more_body", False)
            case "websocket.accept":
                self._status = 101
            case "websocket.send":
                self.count(message.get("bytes") or (message.get("text") or "").encode())
            case "websocket.close":
                self._is_complete = True
                # A connection that is closed before it was accepted is answered with 403.
                self._status = 403 if self._status == "-" else self._status

    def count(self, body: bytes) -> None:
        """Count a piece of the body."""
        self._size_bytes += len(body)
        self._pieces += bool(body)

    def log(self, scope: Scope, exchange: Exchange, duration_s: float) -> None:
        """Write the line of the access log: neither the query nor a header but the label, for they may hold secrets."""
        logger.info(
            "http.request method=%s path=%s status=%s duration_s=%.3f bytes=%d pieces=%d complete=%s request=%s "
            "trace=%s x_request_id=%s key=%s replicas=%s",
            # A WebSocket begins as a GET.
            word(scope.get("method", "GET")),
            word(scope["path"]),
            self._status,
            duration_s,
            self._size_bytes,
            self._pieces,
            "yes" if self._is_complete else "no",
            exchange.request_id,
            _client_trace(scope) or "-",
            word(exchange.label),
            word(exchange.key),
            exchange.replicas.replace(", ", ",").replace(" ", "_") or "-",
        )

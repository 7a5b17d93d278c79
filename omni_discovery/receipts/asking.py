"""Asking hubs for receipts: at a socket in this user's private folder without a token, or at a URL with one.

The socket lies beside the file of the embedded etcd, and is reached by the folder's descriptor: nobody can put another
one in its place, and the length of the folder's path does not matter.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.processes import open_private
from omni_discovery.records.keys import check_namespace
from omni_discovery.records.sizes import count_parts

#: How long a hub may take to answer, to its last byte, and how much it may say.
_TIMEOUT_S: Final = 10.0
#: How many hubs are asked at once: those that don't answer must not keep the others. Twice as many have records.
_AT_ONCE: Final = 512
#: What one hub may say, of how many parts, and all hubs that are asked together; a part counts as so many bytes.
_MOST_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 500_000
_MOST_TOGETHER_BYTES: Final = 256 << 20
_PART_BYTES: Final = 64
_READ_BYTES: Final = 64 << 10
_PID_DIGITS: Final = 10
_URL_SHOWN: Final = 200
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404


class HubUnaskableError(OmniError):
    """The operator must act: this hub does not answer, or not as a hub does; the message says what to do."""


class NoReceiptError(OmniError):
    """The hub has answered that it has none of what was asked for."""


def listen_locally(folder: Path, namespace: str) -> socket.socket:
    """Bind this process's socket for receipts; sockets of hubs that have ended are removed. Raise ConfigError, OSError.

    ``remove_local`` removes it.
    """
    with _opened(folder, make=True) as place:
        for name, pid in _sockets(place, namespace):
            if pid == os.getpid() or not _is_running(pid):
                _unlink(place, name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(_path(place, _name(namespace)))
        except OSError:
            listener.close()
            raise
    return listener


def remove_local(folder: Path, namespace: str) -> None:
    """Remove this process's socket. Idempotent."""
    with contextlib.suppress(OSError, ConfigError), _opened(folder) as place:
        _unlink(place, _name(namespace))


def local_hubs(folder: Path, namespace: str) -> list[int]:
    """The processes of this user's running hubs on this machine that can be asked, oldest number first."""
    try:
        with _opened(folder) as place:
            return sorted(pid for _, pid in _sockets(place, namespace) if _is_running(pid))
    except (OSError, ConfigError):
        return []


def ask_process(folder: Path, namespace: str, pid: int, path: str, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """What a hub of this user on this machine answers. Raise HubUnaskableError, NoReceiptError."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(_opened(folder))
        except (OSError, ConfigError) as error:
            raise HubUnaskableError(f"the hub of process {pid} can't be asked: {error}") from error
        connection = _LocalConnection(_path(place, _name(namespace, pid)), timeout_s)
        return _answer(connection, path, {}, f"the hub of process {pid}")


def ask_url(url: str, path: str, token: str, ca_file: str = "") -> dict[str, Any]:
    """What the hub at this URL of its port for operators answers. Raise ConfigError, HubUnaskableError, NoReceiptError.

    ``ca_file`` is needed where the hub's certificate is not one that this machine trusts.
    """
    connection = _connection(url, ca_file)
    return _answer(connection, path, {"Authorization": f"Bearer {token}"} if token else {}, f"the hub at {url}")


class _Room:
    """What may still be said by the hubs that are asked together. Used by the threads that ask."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._lock = threading.Lock()

    def take_bytes(self, size_bytes: int) -> bool:
        """Whether there was room for so much more."""
        with self._lock:
            self._left_bytes -= size_bytes
            return self._left_bytes >= 0


class _Asking(threading.local):
    """The room of the question that a thread asks; None for one that is asked of one hub alone."""

    room: _Room | None = None


_asking: Final = _Asking()


def ask_at_once(asks: Sequence[Callable[[str], dict[str, Any]]], path: str) -> list[dict[str, Any] | OmniError]:
    """What each hub answers, or the error that says why it has not; in the order of the hubs."""
    room = _Room(_MOST_TOGETHER_BYTES)

    def answer_of(ask: Callable[[str], dict[str, Any]]) -> dict[str, Any] | OmniError:
        _asking.room = room
        try:
            return ask(path)
        except OmniError as error:
            return error
        finally:
            _asking.room = None

    if len(asks) <= 1:
        return [answer_of(ask) for ask in asks]
    with ThreadPoolExecutor(min(len(asks), _AT_ONCE), thread_name_prefix="ask") as threads:
        return list(threads.map(answer_of, asks))


def is_proved(url: str, ca_file: str) -> bool:
    """Whether no stranger can answer at a URL that a record in etcd names, so that a token may be sent there.

    That is so where the certificate must be of the operator's own authority: of one that this machine trusts anyway
    anybody can have a certificate for an address of their own. Not on loopback: every user of this machine may listen
    there, and no hub writes such an address into its record.
    """
    try:
        return urlsplit(url).scheme == "https" and bool(ca_file)
    except ValueError:
        return False


def _connection(url: str, ca_file: str) -> http.client.HTTPConnection:
    """The connection, which is not opened yet. Raise ConfigError for what is no URL of a hub: records hold any text."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme not in {"http", "https"} or not host or parts.path.strip("/"):
            raise ValueError(url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        context = ssl.create_default_context(cafile=ca_file or None)
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    except (ValueError, http.client.InvalidURL) as error:
        raise ConfigError(
            f"{url[:_URL_SHOWN]!r} is no hub; right would be http://HOST:PORT, that of its --admin-port"
        ) from error
    except OSError as error:
        raise ConfigError(f"the certificates in {ca_file} can't be read: {error}") from error


def path_of(*parts: str, **query: str | int) -> str:
    """The path of a question; what a user has typed is quoted."""
    path = "/admin/" + "/".join(quote(part, safe="") for part in parts)
    return path + ("?" + "&".join(f"{name}={quote(str(value))}" for name, value in query.items()) if query else "")


class _LocalConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def _cut_after(connected: socket.socket, timeout_s: float) -> Iterator[threading.Event]:
    """Shut a socket that is still in use after so long: its own timeout begins anew with each byte that drips in."""
    was_cut = threading.Event()

    def cut() -> None:
        was_cut.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield was_cut
    finally:
        timer.cancel()


def _read(answer: http.client.HTTPResponse, whom: str) -> bytes:
    """What a hub says: not more than one may, nor than there is room for. Raise HubUnaskableError, OSError."""
    room, pieces, size_bytes = _asking.room, [], 0
    while piece := answer.read(_READ_BYTES):
        pieces.append(piece)
        size_bytes += len(piece)
        taken_bytes = len(piece) + count_parts(piece) * _PART_BYTES
        if size_bytes > _MOST_BYTES or not (room is None or room.take_bytes(taken_bytes)):
            raise HubUnaskableError(f"{whom} is not heard: too much is said")
    content = b"".join(pieces)
    if count_parts(content) > _MOST_PARTS:
        raise HubUnaskableError(f"{whom} is not heard: too much is said")
    return content


def _answer(connection: http.client.HTTPConnection, path: str, headers: dict[str, str], whom: str) -> dict[str, Any]:
    try:
        connection.connect()
        with _cut_after(connection.sock, connection.timeout or _TIMEOUT_S) as cut:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            content = _read(answer, whom)
    # A name of a host that can be none is a UnicodeError.
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise HubUnaskableError(f"{whom} does not answer ({error}): omni hubs shows which there are") from error
    finally:
        connection.close()
    if cut.is_set():
        raise HubUnaskableError(f"{whom} does not answer (not all of it came in time)")
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HubUnaskableError(f"{whom} does not answer as a hub does: is that its --admin-port?") from error
    if answer.status == http.client.OK:
        return body
    error_body = body.get("error")
    text = str(error_body.get("message", "")) if isinstance(error_body, dict) else ""
    if answer.status == _NOT_FOUND and text:
        raise NoReceiptError(text)
    if answer.status == _UNAUTHORIZED:
        raise HubUnaskableError(f"{whom} wants its token: give --admin-token-file, or set OMNI_ADMIN_TOKEN")
    raise HubUnaskableError(f"{whom} says: {text or answer.status}")


def _name(namespace: str, pid: int | None = None) -> str:
    return f"{check_namespace(namespace)}.receipts-{pid or os.getpid()}.sock"


def _path(place: int, name: str) -> str:
    """A path by the descriptor of its folder, short enough for a socket."""
    return f"/proc/self/fd/{place}/{name}"


def _sockets(place: int, namespace: str) -> list[tuple[str, int]]:
    begin, end = f"{check_namespace(namespace)}.receipts-", ".sock"
    with os.scandir(place) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(begin) and entry.name.endswith(end)]
    found = [(name, name.removeprefix(begin).removesuffix(end)) for name in names]
    return [(name, int(pid)) for name, pid in found if pid.isascii() and pid.isdigit() and len(pid) <= _PID_DIGITS]


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _unlink(place: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=place)


@contextmanager
def _opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    place = open_private(folder, make=make)
    try:
        yield place
    finally:
        os.close(place)

"""Where a hub of this user is asked, and what is said where none answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.receipts import asking
from omni_discovery.receipts.asking import (
    HubUnaskableError,
    NoReceiptError,
    ask_at_once,
    ask_process,
    ask_url,
    listen_locally,
    local_hubs,
    path_of,
    remove_local,
)

NOBODY = 2**22 + 1


def test_the_socket_of_a_running_hub_is_found_however_long_its_path_is(tmp_path: Path) -> None:
    """And by nobody else: the folder is made of mode 0700."""
    folder = tmp_path / ("long" * 20) / ("longer" * 20) / "omni"
    with listen_locally(folder, "mine"):
        assert local_hubs(folder, "mine") == [os.getpid()]
        assert local_hubs(folder, "min") == []
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_local(folder, "mine")
        assert local_hubs(folder, "mine") == []
        remove_local(folder, "mine")


def test_what_a_killed_hub_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "omni"
    folder.mkdir(mode=0o700)
    left = folder / f"mine.receipts-{NOBODY}.sock"
    left.touch()
    assert local_hubs(folder, "mine") == []
    with listen_locally(folder, "mine"):
        assert not left.exists()


def test_a_folder_that_others_may_change_holds_no_hub(tmp_path: Path) -> None:
    folder = tmp_path / "omni"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / f"mine.receipts-{os.getpid()}.sock").touch()
    assert local_hubs(folder, "mine") == []
    with pytest.raises(ConfigError, match="omni"):
        listen_locally(folder, "mine")


def test_no_folder_is_no_hub(tmp_path: Path) -> None:
    assert local_hubs(tmp_path / "nothing", "mine") == []
    with pytest.raises(HubUnaskableError, match="can't be asked"):
        ask_process(tmp_path / "nothing", "mine", 1, "/admin/requests")


def test_what_is_no_hub_is_told_with_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match="right would be http://HOST:PORT"):
        ask_url("ftp://there", "/", "")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(HubUnaskableError, match="omni hubs shows"):
        ask_url(f"http://127.0.0.1:{port}", "/", "")


@pytest.mark.attack("N7")
@pytest.mark.parametrize(
    "url", ["http://x:99999", "http://x:-1", "http://[::1", "http://a b:80", "http://x\x00:80", "https://", "x" * 9000]
)
def test_an_address_that_can_be_none_is_told_as_such_and_briefly(url: str) -> None:
    """Whoever may write hubs' records may write any."""
    with pytest.raises(ConfigError, match="right would be http://HOST:PORT") as caught:
        ask_url(url, "/", "")
    assert len(str(caught.value)) < 500


@pytest.mark.attack("N7")
def test_a_name_that_no_host_can_have_does_not_answer() -> None:
    with pytest.raises(HubUnaskableError, match="does not answer"):
        ask_url("http://" + "\u0635" * 70 + ".example:80", "/", "")


def test_what_a_user_types_is_no_path() -> None:
    assert path_of("requests", "../x?y", limit=3) == "/admin/requests/..%2Fx%3Fy?limit=3"


@pytest.mark.attack("R4")
@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n{", b"HTTP/1.1 200 OK\r\nX-A: "]
)
def test_a_hub_that_answers_byte_by_byte_is_left_after_the_time_that_it_has(tmp_path: Path, begin: bytes) -> None:
    folder = tmp_path / "omni"
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(begin)
            while not is_over.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with listen_locally(folder, "mine") as listener:
        listener.setblocking(True)
        listener.listen()
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        began_s = time.monotonic()
        try:
            with pytest.raises(HubUnaskableError, match="does not answer"):
                ask_process(folder, "mine", os.getpid(), "/admin/requests", timeout_s=0.5)
            # Its own time, and that of a busy machine: without a bound it would go on for ever.
            assert time.monotonic() - began_s < 20
        finally:
            is_over.set()
            dripping.join()


@pytest.mark.attack("R4")
def test_hubs_are_asked_at_once_and_answer_in_their_order() -> None:
    """Each waits until the others are asked: one after the other, none would ever answer."""
    all_asked = threading.Barrier(3)

    def answering(number: int) -> Callable[[str], dict[str, Any]]:
        def ask(path: str) -> dict[str, Any]:
            all_asked.wait(timeout=60)
            if number == 1:
                raise NoReceiptError("none")
            return {"hub": f"{path}-{number}"}

        return ask

    first, second, third = ask_at_once([answering(number) for number in range(3)], "p")
    assert (first, third) == ({"hub": "p-0"}, {"hub": "p-2"})
    assert isinstance(second, NoReceiptError)
    assert ask_at_once([], "p") == []


@pytest.mark.attack("V6")
def test_hundreds_of_hubs_that_say_nothing_keep_nobody_waiting() -> None:
    """None of them answers before all are asked; in groups of a few dozen, each would take its 10 s in turn."""
    all_asked = threading.Barrier(300)

    def ask(path: str) -> dict[str, Any]:
        return {"number": all_asked.wait(timeout=60)}

    assert len(ask_at_once([ask] * 300, "p")) == 300


def _hub_that_says(content: bytes) -> socket.socket:
    """A hub that answers so, once for each connection; closing it ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.attack("V6")
def test_an_answer_of_millions_of_lists_is_not_decoded() -> None:
    """A list of a few bytes takes some dozens of memory: 60 MB of them took gigabytes, of each of many hubs."""
    bomb = b'{"requests":[' + b"[]," * 700_000 + b"[]]}"
    with _hub_that_says(bomb) as listener, pytest.raises(HubUnaskableError, match="too much"):
        ask_url(f"http://127.0.0.1:{listener.getsockname()[1]}", "/admin/requests", "")


@pytest.mark.attack("V6")
def test_all_hubs_together_say_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_MOST_TOGETHER_BYTES", 5_000_000)
    with _hub_that_says(b'{"hub":"' + b"x" * 1_000_000 + b'"}') as listener:
        ask = partial(ask_url, f"http://127.0.0.1:{listener.getsockname()[1]}", token="")
        answers = ask_at_once([lambda path: ask(path=path)] * 20, "/admin/requests")
    whole = [each for each in answers if isinstance(each, dict)]
    # Perhaps none: what each has begun to say counts, too.
    assert len(whole) <= 5
    assert {str(each).rpartition(": ")[2] for each in answers if not isinstance(each, dict)} == {"too much is said"}

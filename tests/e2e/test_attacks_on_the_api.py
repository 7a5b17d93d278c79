"""Hostile clients of `omni serve`, and other users of its host, with everything as it is by default."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stage_runtime.demo.processes import alive
from tests.support.hub import Hub
from tests.support.processes import wait_for

pytestmark = pytest.mark.e2e

#: A prompt that the engine of the first stage fails on: what fails is what gets into logs.
FAILS = "please-fail"
PAIR = f"""
model: echo-pair
stages:
  - {{stage_id: 0, engine: echo, engine_args: {{capacity: 8, fail_on: {FAILS}}}, runtime: {{num_replicas: 2}},
     final_output: text}}
  - {{stage_id: 1, engine: echo, engine_args: {{modality: image}}, final_output: image}}
"""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("attacked-api"), PAIR)
    try:
        running.wait_ready()
        tree = running.tree()
        yield running
        # No attack has ended a process, found a bug, or left a request behind.
        assert alive(tree) == tree
        wait_for("no request to be left", lambda: not sum(each["queue_length"] for each in running.replicas()))
        assert "Traceback" not in running.text
        assert "orchestrator.bug" not in running.text
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@pytest.fixture(autouse=True)
def serves_on(hub: Hub) -> Iterator[None]:
    """After each attack clients are served."""
    yield
    status, body = hub.ask("still there", modalities=["text", "image"])
    assert (status, body["choices"][0]["message"]["content"]) == (200, "still there")


def said_of(hub: Hub, raw: bytes) -> tuple[int, str]:
    """The status of a POST with these bytes as JSON, and its text."""
    status, body = hub.post(raw)
    return status, json.dumps(body)


def message(content: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


# ---- what would have the hub fetch or open something


@contextmanager
def a_listener() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a server on this machine, and what it hears."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(1.0)
                    try:
                        heard.append(client.recv(1000))
                    except OSError:
                        heard.append(b"")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)


@pytest.mark.attack("C12")
def test_nothing_that_a_client_names_is_fetched_or_opened(hub: Hub) -> None:
    """Pictures, sound, video, files, models, adapters by URL and by path: each a 4xx, and a listener hears nothing."""
    with a_listener() as (port, heard):
        at = f"127.0.0.1:{port}"
        svg = base64.b64encode(f'<svg><image href="http://{at}/x.png"/></svg>'.encode()).decode()
        drawing = {"type": "image_url", "image_url": {"url": f"data:image/svg+xml;base64,{svg}"}}
        # The echo does not look at it.
        assert said_of(hub, message([drawing]))[0] in {200, 400}
        urls = [f"{scheme}://{at}/x.png" for scheme in ("http", "https", "ftp", "gopher", "HTTP", "jar:http")]
        urls += ["file:///etc/passwd", f"//{at}/x.png", "/etc/passwd", f"data:text/html,http://{at}/", ""]
        urls += [f"data:,http://{at}/", f"http://[::ffff:127.0.0.1]:{port}/x"]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        parts += [
            {"type": "video_url", "video_url": {"url": f"http://{at}/x.mp4"}},
            {"type": "audio_url", "audio_url": {"url": f"http://{at}/x.wav"}},
            {"type": "input_audio", "input_audio": {"data": f"http://{at}/x.wav", "format": "wav"}},
            {"type": "file", "file": {"file_url": f"http://{at}/x"}},
            {"type": "image_embeds", "image_embeds": "gASVAAAA"},
        ]
        for part in parts:
            status, text = said_of(hub, message([{"type": "text", "text": "see"}, part]))
            assert status == 400, (part, text)
        for model in ("/etc/passwd", "../../etc", f"http://{at}/model", "file:///", "echo-pair/../x"):
            assert said_of(hub, message("hi", model=model))[0] == 404, model
        adapter = {"lora": {"name": "a", "path": f"http://{at}/adapter"}}
        assert said_of(hub, message("hi", sampling_params_list=[adapter]))[0] == 400
    assert heard == []


# ---- bodies


def with_field(name: str, raw: str) -> bytes:
    return f'{{"messages": [{{"role": "user", "content": "hi"}}], "modalities": ["text"], "{name}": {raw}}}'.encode()


@pytest.mark.attack("C15")
def test_json_of_any_shape_is_answered(hub: Hub) -> None:
    """Nested, of huge numbers, of half characters, of what is no JSON: refused, or served where it is harmless."""
    bodies = [with_field("sampling_params_list", "[" * depth + "]" * depth) for depth in (64, 900, 975, 998, 50_000)]
    bodies += [with_field("messages", '[{"a":' * depth + "1" + "}]" * depth) for depth in (400, 499, 20_000)]
    for number in ("1" + "0" * 30, "9" * 5000, "-" + "9" * 5000, "1e999", "NaN", "Infinity", "-0", "0x10"):
        bodies += [with_field(name, number) for name in ("seed", "max_tokens", "temperature", "timeout", "priority")]
    for text in (r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', '"\\x"', '"' + "a" * 100_000 + '"'):
        bodies += [with_field(name, text) for name in ("model", "user", "stop")]
        bodies.append(f'{{"messages": [{{"role": "user", "content": {text}}}]}}'.encode())
    bodies += [b"", b"null", b"[]", b'"x"', b"\xff\xfe{}", b"{" * 1000, message("hi")[:-1], message("hi") * 2]
    for raw in bodies:
        status, text = said_of(hub, raw)
        assert status == 200 or 400 <= status < 500, (status, raw[:100], text[:300])


@pytest.mark.attack("C18")
@pytest.mark.parametrize(
    "fields",
    [
        {"companions": {f"c{number}": "x" for number in range(9)}},
        {"companions": {"a": 1}},
        {"n": 17},
        {"n": 10**9},
        {"timeout": -1},
        {"timeout": 0},
        {"timeout": 1e300},
        {"seed": -1},
        {"seed": 1 << 62},
        {"modalities": []},
        {"modalities": ["smell"]},
        {"modalities": ["text"] * 10_000},
        {"max_tokens": -1},
        {"max_tokens": 1 << 70},
        {"priority": 1 << 62},
        {"sampling_params_list": [{}] * 1000},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_what_is_out_of_range_is_refused(hub: Hub, fields: Mapping[str, Any]) -> None:
    status, text = said_of(hub, message("hi", **fields))
    assert status == 400, text


# ---- framing


def send_raw(hub: Hub, *parts: bytes) -> bytes:
    """What a connection that sends these bytes hears, until the hub hangs up or says nothing for a while."""
    at = urlsplit(hub.url)
    heard = b""
    with socket.create_connection((at.hostname, at.port), 10.0) as client:
        try:
            for part in parts:
                client.sendall(part)
            # The answer may come in two parts, and a connection that is kept open says no more.
            client.settimeout(10.0)
            heard = client.recv(65536)
            client.settimeout(0.3)
            while part := client.recv(65536):
                heard += part
        except (TimeoutError, ConnectionError):
            pass
    return heard


def request(head: str, body: bytes = b"", method: str = "POST", path: str = CHAT) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode("latin-1") + body


JSON = "Content-Type: application/json\r\n"
ASK = message("framed", modalities=["text"])
RAW = {
    "negative length": request(f"{JSON}Content-Length: -1\r\n", ASK),
    "length of words": request(f"{JSON}Content-Length: ten\r\n", ASK),
    "two lengths": request(f"{JSON}Content-Length: 3\r\nContent-Length: {len(ASK)}\r\n", ASK),
    "length of 2^70": request(f"{JSON}Content-Length: {1 << 70}\r\n", ASK),
    "a chunk that is no number": request(f"{JSON}Transfer-Encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n"),
    "a chunk of 2^100": request(f"{JSON}Transfer-Encoding: chunked\r\n", b"f" * 25 + b"\r\n{}"),
    "an unknown encoding": request(f"{JSON}Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    "a header without end": request("X: " + "a" * 200_000 + "\r\n"),
    "thousands of headers": request("".join(f"X-{number}: 1\r\n" for number in range(20_000))),
    "a path without end": request("", path="/" + "a" * 200_000),
    "a folded header": request(f"{JSON}X: a\r\n b\r\nContent-Length: 2\r\n", b"{}"),
    "a space before the colon": request(f"Content-Length : {len(ASK)}\r\n{JSON}", ASK),
    "a name with a zero": request("X\0Y: 1\r\n"),
    "a path with line ends": request("", path="/health%0d%0aX:1"),
    "a path that climbs": request("", method="GET", path="/../../../etc/passwd"),
    "a path that climbs, encoded": request("", method="GET", path="/v1/%2e%2e/%2e%2e/etc/passwd"),
    "an unknown method": request("", method="BREW"),
    "TRACE": request("", method="TRACE", path="/health"),
    "CONNECT": request("", method="CONNECT", path="127.0.0.1:22"),
    "a proxy's form": request("", method="GET", path="http://127.0.0.1:22/"),
    "no version": b"GET /health\r\n\r\n",
    "a future version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "TLS": b"\x16\x03\x01\x02\x00\x01" + bytes(100),
    "line ends alone": b"\r\n" * 5000,
    "zeros": bytes(5000),
}
#: Odd, and harmless: answered as what they are.
PLAIN = {"a folded header", "a future version", "a proxy's form"}


@pytest.mark.attack("C16")
@pytest.mark.parametrize("name", RAW)
def test_odd_framing_is_refused_or_served_plainly(hub: Hub, name: str) -> None:
    heard = send_raw(hub, RAW[name])
    statuses = [int(line.split()[1]) for line in heard.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert b"root:" not in heard
    if name in PLAIN and statuses == [200]:
        return
    # Nothing behind a refused head is taken for a request.
    assert all(400 <= status < 500 for status in statuses), heard[:500]
    assert len(statuses) <= 1, heard[:500]


@pytest.mark.attack("C26")
def test_a_body_has_a_bound_however_it_is_framed(hub: Hub) -> None:
    large = message("x" * (4 << 20))
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (large[:2_000_000], large[2_000_000:]))
    for framed in (
        request(f"{JSON}Content-Length: {len(large)}\r\n", large),
        request(f"{JSON}Content-Length: {1 << 40}\r\n", large[:1000]),
        request(f"{JSON}Transfer-Encoding: chunked\r\n", chunked + b"0\r\n\r\n"),
    ):
        assert send_raw(hub, framed).startswith(b"HTTP/1.1 413 ")


# ---- WebSockets


def frame(opcode: int, payload: bytes, *, fin: bool = True, reserved: int = 0, mask: bool = True) -> bytes:
    first = (fin << 7) | (reserved << 4) | opcode
    length = len(payload)
    size = bytes([length]) if length < 126 else b"\x7e" + length.to_bytes(2, "big")
    head = bytes([first, size[0] | (mask << 7)]) + size[1:]
    # A mask of zeros changes nothing.
    return head + (bytes(4) if mask else b"") + payload


FRAMES = {
    "2^62 bytes": bytes([0x81, 0xFF]) + (1 << 62).to_bytes(8, "big") + bytes(4),
    "2^63 bytes": bytes([0x81, 0xFF]) + (1 << 63).to_bytes(8, "big") + bytes(4),
    "unmasked": frame(1, b"{}", mask=False),
    "no UTF-8": frame(1, b"\xff\xfe\xc0"),
    "half a character": frame(1, b"\xed\xa0\x80"),
    "a reserved bit": frame(1, b"{}", reserved=2),
    "compressed, which was not agreed": frame(1, b"{}", reserved=4),
    "an unknown kind": frame(3, b"{}"),
    "a continuation of nothing": frame(0, b"{}"),
    "a long ping": frame(9, bytes(126)),
    "a ping in pieces": frame(9, b"x", fin=False),
    "fragments without end": frame(1, b"{", fin=False) + frame(0, b" " * 60_000, fin=False) * 80,
    "binary": frame(2, bytes(100)),
    "a close of one byte": frame(8, b"\x00"),
}


@pytest.mark.attack("C17")
@pytest.mark.parametrize("name", FRAMES)
def test_odd_frames_end_their_connection(hub: Hub, name: str) -> None:
    at = urlsplit(hub.url)
    upgrade = (
        "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection((at.hostname, at.port), 30.0) as client:
        client.sendall(upgrade.encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 101 ")
        heard = b""
        try:
            client.sendall(FRAMES[name])
            while not has_close(heard) and (part := client.recv(65536)):
                heard += part
        except ConnectionError:
            pass
    assert b'"delta"' not in heard


def has_close(heard: bytes) -> bool:
    """Whether a frame of the hub's says that the connection is closed; it then waits a while for ours."""
    while len(heard) >= 2:
        if heard[0] & 0x0F == 8:
            return True
        size = int.from_bytes(heard[2:4], "big") + 2 if heard[1] == 126 else heard[1]
        heard = heard[2 + size :]
    return False


# ---- what is left lying about


@pytest.mark.attack("C21")
def test_no_prompt_no_key_and_no_control_character_gets_into_the_log(hub: Hub) -> None:
    """1. requests that fail and that succeed, with a secret prompt, key, file, and names full of control characters
    2. the log has the failures, none of the secrets, no escape sequence, no forged line, and no line of megabytes
    """
    secrets = ["my-secret-prompt", "my-secret-key", "bXktc2VjcmV0LWZpbGU="]
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{secrets[2]}"}}
    text = {"type": "text", "text": f"{secrets[0]} {FAILS}"}
    odd = "\x1b]0;owned\x07\x1b[2J\r\n2026-01-01 ERROR forged line=1\u2028\x9b31m"
    head = f"{JSON}Authorization: Bearer {secrets[1]}\r\nX-API-Key: {secrets[1]}\r\nX-Request-Id: a\x1b[2Jb\r\n"
    for fields in ({}, {"stream": True}, {"model": odd}, {"user": odd}, {"model": "m" * 2_000_000}, {odd: 1}):
        for content in ([text], [text, picture], secrets[0]):
            body = message(content, **{"modalities": ["text"], **fields})
            send_raw(hub, request(f"{head}Content-Length: {len(body)}\r\n", body))
    send_raw(hub, request("", method="GET", path="/v1/%1b%5d0;owned%07?key=" + secrets[1]))
    wait_for("the failures to be in the log", lambda: hub.text.count("request.failed") >= 2)
    log = hub.text
    for secret in secrets:
        assert secret not in log
    strange = {character for character in log if not (character.isprintable() or character == "\n")}
    assert strange == set()
    assert "\n2026-01-01 ERROR forged" not in log
    assert max(map(len, log.splitlines())) < 5000


@pytest.mark.attack("C22")
def test_other_users_can_read_nothing_that_it_leaves(hub: Hub) -> None:
    """Neither what a hub keeps and tells its user's commands, nor etcd's data, nor hand-offs in shared memory."""
    assert hub.ask("a b c", modalities=["image"])[0] == 200
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in hub.tree()]
    environments = [Path(f"/proc/{pid}/environ").stat().st_mode for pid in hub.tree()]
    assert not any(mode & 0o077 for mode in environments)
    folders = [hub.folder / "omni", hub.folder / "state"]
    folders += [
        Path(os.fsdecode(word.partition(b"=")[2])) for words in arguments for word in words if b"data-dir=" in word
    ]
    assert len(folders) >= 2
    found = [path for folder in folders if folder.exists() for path in readable_by_others(folder)]
    mine = os.geteuid()
    shared = [path for path in Path("/dev/shm").glob("omni-*") if path.lstat().st_uid == mine]
    assert found + [path for path in shared if path.lstat().st_mode & 0o077] == []


def readable_by_others(path: Path) -> list[Path]:
    """Files below that another user could open: none where the folder itself is closed."""
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        return [path] if mode & 0o077 else []
    return [found for each in path.iterdir() for found in readable_by_others(each)] if mode & 0o077 else []


@pytest.mark.attack("C26")
def test_what_is_open_by_default(hub: Hub) -> None:
    """Loopback alone, no place for operators, no line for each request."""
    assert urlsplit(hub.url).hostname == "127.0.0.1"
    for method in ("list_loras", "sleep", "collective_rpc"):
        assert hub.post({}, f"/admin/{method}")[0] in {404, 405}
    hub.ask("not for the log", modalities=["text"])
    assert f"POST {CHAT}" not in hub.text
    assert CHAT not in hub.text
    pids = set(hub.tree())
    assert {address for address, pid in listening() if pid in pids} <= {"127.0.0.1", "::1"}


def listening() -> Iterator[tuple[str, int]]:
    """Addresses on which TCP is listened, with the process."""
    inodes = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                raw = bytes.fromhex(words[1].partition(":")[0])
                packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                inodes[words[9]] = socket.inet_ntop(family, packed)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            targets = [str(each.readlink()) for each in (process / "fd").iterdir()]
        except OSError:
            continue
        for target in targets:
            if target.startswith("socket:[") and target[8:-1] in inodes:
                yield inodes[target[8:-1]], int(process.name)

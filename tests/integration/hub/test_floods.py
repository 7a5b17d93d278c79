"""What strangers send to a running hub takes no slot, no place and no memory for ever, and costs others nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from omni_discovery.etcd.store import EtcdKV
from tests.support.attackers import GONE, PING, Attacker, attackers, descriptors, frame, rss_bytes
from tests.support.certificates import make_certificates
from tests.support.hub import Hub
from tests.support.processes import wait_for
from tests.support.registry import EtcdServer, etcdctl

#: Two slots only, so that two clients can hold all of them.
ECHO = "{model: echo, stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 2}, final_output: text}]}"
LIMITS = {
    "--header-timeout": "3",
    "--body-timeout": "3",
    "--send-timeout": "3",
    "--stream-idle-timeout": "3",
    "--max-connections": "60",
    "--max-unfinished-bytes": str(8 << 20),
    "--allowed-origins": "https://good.example",
}
MIB = 1 << 20
REPLICAS = "/omni/v1/test/replicas/0/"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    hub = Hub.of_yaml(folder, ECHO, *(word for pair in LIMITS.items() for word in pair))
    try:
        yield hub.wait_ready()
    finally:
        hub.stop()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def must_serve(hub: Hub, text: str = "one two") -> None:
    """An honest client is served, with time enough on a busy machine."""
    status, answer = hub.ask(text, timeout=30)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)


def cuts(hub: Hub, reason: str) -> float:
    """How many connections the hub says that it has closed for a reason."""
    line = f'omni_hub_http_cut_total{{reason="{reason}"}} '
    return next((float(each.split()[1]) for each in hub.get("/metrics")[1].splitlines() if each.startswith(line)), 0.0)


@pytest.mark.attack("A9")
def test_a_silent_stream_gives_its_slot_back_and_is_told_why(hub: Hub) -> None:
    """1. two streams take both slots, and send no second segment; 2. an honest client waits, and is served
    3. each stream has got an error that says why, and is closed
    """
    address = hub.url.replace("http", "ws", 1) + "/v1/stream"
    with connect(address) as first, connect(address) as second:
        for client in (first, second):
            client.send(json.dumps({"type": "segment", "prompt": "a b", "timeout": 3600}))
            while json.loads(client.recv(30))["type"] != "segment_end":
                pass
        must_serve(hub)
        for client in (first, second):
            said = json.loads(client.recv(30))
            assert (said["type"], said["status"], said["error"]["code"]) == ("error", 408, "input_timeout")
            assert "no segment came for 3 s after the last was answered" in said["error"]["message"]
            with pytest.raises(ConnectionClosed):
                client.recv(30)
            assert client.close_code == 1008


@pytest.mark.attack("A9")
def test_a_client_that_keeps_sending_keeps_its_slot(hub: Hub) -> None:
    """The limit counts the client's silence, not the age of its request."""
    with connect(hub.url.replace("http", "ws", 1) + "/v1/stream") as client:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 4.5:
            client.send(json.dumps({"type": "segment", "prompt": "a"}))
            while json.loads(client.recv(30))["type"] != "segment_end":
                pass
            time.sleep(0.5)
        client.send(json.dumps({"type": "end"}))
        assert json.loads(client.recv(30))["type"] == "stage_end"


@pytest.mark.attack("A9", "A17")
def test_what_a_client_may_ask_for_is_the_operators(hub: Hub) -> None:
    status, answer = hub.ask("a", timeout=86400)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert "'timeout' is 86400 s; this hub allows at most 3600 (--max-timeout)" in answer["error"]["message"]
    status, answer = hub.ask("a", priority=-1)
    assert status == 400
    assert "'priority' is -1; this hub allows 0 to 1000000 (--priority-range)" in answer["error"]["message"]
    for asked in ({"timeout": 86400}, {"priority": -1000000}):
        with connect(hub.url.replace("http", "ws", 1) + "/v1/stream") as client:
            client.send(json.dumps({"type": "segment", "prompt": "a", **asked}))
            said = json.loads(client.recv(30))
            assert (said["type"], said["status"]) == ("error", 400)


@pytest.mark.attack("A17")
def test_a_flood_of_the_best_priority_starves_nobody(hub: Hub) -> None:
    """Twelve threads ask for the best priority that there is; those who ask for none are served among them."""
    refused = served = 0
    is_over = False

    def flood() -> None:
        nonlocal refused, served
        with httpx.Client(timeout=60) as client:
            while not is_over:
                body = {"messages": [{"role": "user", "content": "x"}], "priority": -1000000 if not refused else 0}
                status = client.post(f"{hub.url}/v1/chat/completions", json=body).status_code
                refused, served = refused + (status == 400), served + (status == 200)

    with ThreadPoolExecutor(12) as threads:
        floods = [threads.submit(flood) for _ in range(12)]
        try:
            wait_for("the flood", lambda: served > 20)
            for _ in range(3):
                must_serve(hub)
        finally:
            is_over = True
        for each in floods:
            each.result(30)
    assert refused


@pytest.mark.attack("A12")
def test_headers_that_do_not_end_are_cut(hub: Hub) -> None:
    """With a line of header every half second, too: the whole header has a time-out."""
    with attackers(hub.url, 30) as slow, attackers(hub.url, 1) as silent, attackers(hub.url, 1) as later:
        for each in slow:
            each.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        later[0].send(f"GET /health HTTP/1.1\r\nHost: {later[0].host}\r\n\r\nGET /hea".encode())
        with suppress(*GONE):
            for _ in range(60):
                must_serve(hub)
                slow[0].send(b"a")
                time.sleep(0.5)
                if slow[0].is_closed():
                    break
            else:
                raise AssertionError("a header of half a minute was let go on")
        answers = [each.answer() for each in slow[1:]]
        assert {status_of(each) for each in answers} == {408}
        assert b"the header of the request did not come in time" in answers[0]
        # A client that has sent nothing gets nothing, and the second request of a connection has the same time.
        assert silent[0].answer() == b""
        assert b'"status":"ok"' in (both := later[0].answer())
        assert b" 408 " in both
    assert cuts(hub, "header_timeout") >= 32


@pytest.mark.attack("A12")
def test_bodies_that_do_not_end_are_cut_and_their_memory_is_bounded(hub: Hub) -> None:
    """1. eight bodies of 2.5 MiB without their last byte: beyond 8 MiB together the largest are given up at once
    2. the others when their time is over; honest bodies of 2 MiB are served all the while
    """
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (5 * MIB // 2)}]}).encode()
    before = rss_bytes(hub.process.pid)
    with attackers(hub.url, 8) as slow:
        for each in slow:
            with suppress(*GONE):
                each.request(body[:-1], Content_Length=str(len(body)))
        must_serve(hub, "y" * (2 * MIB))
        assert rss_bytes(hub.process.pid) - before < 64 * MIB
        statuses = sorted(status_of(each.answer()) for each in slow)
    # A client whose connection was reset while it was sending may have got no answer.
    assert set(statuses) <= {0, 408, 503}
    assert statuses.count(408) >= 2
    assert cuts(hub, "body_memory") >= 4
    assert cuts(hub, "body_timeout") >= 2


@pytest.mark.attack("A12")
def test_a_slow_body_that_goes_on_is_let_in(hub: Hub) -> None:
    """A second more for each 16 KiB: 128 KiB in five seconds are no attack, though the time-out is three."""
    body = json.dumps({"messages": [{"role": "user", "content": "z" * (128 << 10)}]}).encode()
    with attackers(hub.url, 1) as clients:
        clients[0].request(None, Content_Length=str(len(body)), Connection="close")
        for start in range(0, len(body), len(body) // 9):
            clients[0].send(body[start : start + len(body) // 9])
            time.sleep(0.5)
        assert status_of(clients[0].answer()) == 200


@pytest.mark.attack("A13")
def test_answers_that_nobody_reads_do_not_pile_up(hub: Hub) -> None:
    """Pings whose pongs are not read, and requests whose answers are not: the memory stays, and both are closed.

    The pings are too many, too.
    """
    before = rss_bytes(hub.process.pid)
    with attackers(hub.url, 2, receive_buffer=4096) as (pinger, reader):
        pinger.open_stream()
        page = f"GET /metrics HTTP/1.1\r\nHost: {reader.host}\r\n\r\n".encode()
        deadline_s = time.monotonic() + 40
        pinger.socket.settimeout(1.0)
        reader.socket.settimeout(1.0)
        closed = set()
        while len(closed) < 2:
            assert time.monotonic() < deadline_s, f"only {len(closed)} of 2 are closed"
            for each, data in ((pinger, PING * 1000), (reader, page * 500)):
                try:
                    if each not in closed:
                        each.socket.send(data)
                except TimeoutError:
                    continue
                except OSError:
                    closed.add(each)
        assert rss_bytes(hub.process.pid) - before < 64 * MIB
    assert cuts(hub, "send_timeout") >= 1
    assert cuts(hub, "tiny_pieces") >= 1
    must_serve(hub)


@pytest.mark.attack("A13")
def test_pings_of_a_client_that_reads_are_answered(hub: Hub) -> None:
    with attackers(hub.url, 1) as (client,):
        client.open_stream()
        client.send(frame(9, b"are you there?"))
        assert client.socket.recv(64) == b"\x8a\x0eare you there?"


@pytest.mark.attack("A12")
def test_a_flood_of_connections_keeps_nobody_out(hub: Hub) -> None:
    """Twice as many as there are places: those that have sent nothing the longest go first."""
    began_s = time.monotonic()
    with attackers(hub.url, 40) as old, attackers(hub.url, 80) as young:
        must_serve(hub)
        assert all(each.answer() == b"" for each in old)
        # Before any of them was too slow; else the test shows nothing on so busy a machine.
        assert cuts(hub, "displaced") >= 60 or time.monotonic() - began_s > 3
        assert len(young) == 80
    must_serve(hub)


def flood_until_closed(attacker: Attacker, data: bytes, seen: Callable[[], object]) -> None:
    """Send the same again and again; ``seen`` is called now and then, and may assert something."""
    deadline_s = time.monotonic() + 30
    attacker.socket.settimeout(30.0)
    with suppress(*GONE):
        while time.monotonic() < deadline_s:
            attacker.send(data)
            seen()
        raise AssertionError(f"{attacker.sent_bytes} bytes were let in")


@pytest.mark.attack("D6")
def test_bodies_in_tiny_chunks_are_cut(hub: Hub) -> None:
    """Chunks of one byte cost the hub a thousand times what they cost the client. A body of 1000 of them is let in."""
    before = cuts(hub, "tiny_pieces")
    with attackers(hub.url, 4) as clients:
        for each in clients:
            each.request(None, Transfer_Encoding="chunked")
        for each in clients[:3]:
            flood_until_closed(each, b"1\r\nx\r\n" * 42000, lambda: must_serve(hub))
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 900}]}).encode()
        clients[3].send(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
        assert b" 200 " in clients[3].socket.recv(100)
    assert cuts(hub, "tiny_pieces") >= before + 3


@pytest.mark.attack("D6")
def test_a_body_that_goes_on_after_its_answer_is_not_read(hub: Hub) -> None:
    with attackers(hub.url, 1) as (client,):
        client.request(None, Content_Type="text/plain", Content_Length=str(1 << 20))
        assert status_of(client.answer()) == 415
    assert cuts(hub, "answered") >= 1


@pytest.mark.attack("D6")
@pytest.mark.parametrize(
    ("first", "piece"), [(b"\x01\x80abcd", b"\x00\x80abcd"), (b"", frame(9, b"")), (b"", frame(10, b""))]
)
def test_floods_of_tiny_frames_are_cut(hub: Hub, first: bytes, piece: bytes) -> None:
    """Pieces of a message that never ends, pings and pongs, all of them empty."""
    before = cuts(hub, "tiny_pieces")
    with attackers(hub.url, 1) as (client,):
        client.open_stream()
        client.send(first)
        flood_until_closed(client, piece * 42000, lambda: must_serve(hub))
    assert cuts(hub, "tiny_pieces") == before + 1


@pytest.mark.attack("D6")
def test_websockets_that_have_sent_nothing_give_their_places(hub: Hub) -> None:
    before = cuts(hub, "displaced")
    with attackers(hub.url, int(LIMITS["--max-connections"])) as clients:
        for each in clients:
            each.open_stream()
        for _ in range(3):
            must_serve(hub)
        assert clients[0].answer()[:4] == b"\x88\x23\x03\xf5"
    assert cuts(hub, "displaced") > before


@pytest.mark.attack("D6")
def test_unfinished_messages_of_websockets_are_bounded_as_bodies_are(hub: Hub) -> None:
    """Six with 3 MB each of a frame that never ends: four are too much memory, two are too slow."""
    memory, slow = cuts(hub, "body_memory"), cuts(hub, "body_timeout")
    with attackers(hub.url, 6) as clients:
        for each in clients:
            each.open_stream()
        for each in clients:
            with suppress(*GONE):
                each.send(b"\x81\xff" + (3 * MIB).to_bytes(8, "big") + bytes(4) + b"x" * 3_000_000)
        must_serve(hub)
        for each in clients:
            each.answer(25.0)
    assert cuts(hub, "body_memory") >= memory + 4
    assert cuts(hub, "body_timeout") >= slow + 1


@pytest.mark.attack("D6")
def test_what_is_no_http_is_answered_and_fills_no_log(hub: Hub) -> None:
    with attackers(hub.url, 20) as clients:
        for each in clients:
            each.send(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert status_of(each.answer()) == 400
    assert hub.text.count("http.cut reason=malformed") == 1
    assert "Invalid HTTP request" not in hub.text
    assert cuts(hub, "malformed") >= 20


@pytest.mark.attack("T1")
def test_requests_with_thousands_of_header_lines_are_refused(hub: Hub) -> None:
    with attackers(hub.url, 20) as clients:
        for each in clients:
            each.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 3000)
        must_serve(hub)
        for each in clients:
            each.send(b"a:b\r\n" * 1500 + b"\r\n")
        must_serve(hub)
        assert {status_of(each.answer()) for each in clients} == {431}
    assert cuts(hub, "many_lines") >= 20


@pytest.mark.attack("D6")
def test_clients_that_do_not_speak_tls_to_its_end_hold_no_descriptors(tmp_path: Path) -> None:
    """1. some say nothing at all; 2. some never say goodbye after half a request: all are closed soon
    3. neither they nor half requests and WebSockets lengthen the stop
    """
    pems = make_certificates(tmp_path)
    tls = ["--ssl-certfile", pems.server_cert, "--ssl-keyfile", pems.server_key]
    document = tmp_path / "deploy.yaml"
    document.write_text(ECHO)
    hub = Hub(
        tmp_path, ["--deploy-config", str(document), *tls, "--header-timeout", "3", "--stream-idle-timeout", "60"]
    )
    context = ssl.create_default_context(cafile=pems.ca)
    try:
        hub.url = wait_for("the hub to listen", hub._listening, 60.0)
        quiet = descriptors(hub.process.pid)
        with attackers(hub.url, 20) as silent, attackers(hub.url, 20) as half:
            for each in half:
                each.socket = context.wrap_socket(each.socket, server_hostname="127.0.0.1")
                each.send(b"GET /health HTTP/1.1\r\n")
            wait_for("their descriptors to be free", lambda: descriptors(hub.process.pid) < quiet + 20, 20.0)
            assert all(each.answer() == b"" for each in silent)
        with attackers(hub.url, 9) as late:
            for number, each in enumerate(late):
                each.socket = context.wrap_socket(each.socket, server_hostname="127.0.0.1")
                if number < 3:
                    each.open_stream()
                elif number < 6:
                    each.request(b"{", Content_Length="100")
                else:
                    each.send(b"GET /health HTTP/1.1\r\n")
            hub.stop()
        assert "timeout graceful shutdown exceeded" not in hub.text
    finally:
        hub.stop()


@pytest.mark.attack("A27")
def test_two_lengths_are_refused_and_the_connection_is_closed(hub: Hub) -> None:
    """A proxy that goes by the length would take what follows for part of the body; here it is no request either."""
    with attackers(hub.url, 1) as (client,):
        smuggled = f"0\r\n\r\nGET /health HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode()
        client.request(None, Content_Length=str(len(smuggled)), Transfer_Encoding="chunked")
        client.send(smuggled)
        answer = client.answer()
    assert status_of(answer) == 400
    assert b"a request has a Content-Length or a Transfer-Encoding, not both" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.attack("A30")
def test_a_body_that_is_not_said_to_be_json_is_not_read(hub: Hub) -> None:
    """What a page of any site may have a browser send unasked, and what curl -d sends."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    for given in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = httpx.post(f"{hub.url}/v1/chat/completions", content=body, headers={"Content-Type": given})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "application/json" in answer.json()["error"]["message"]
        assert ("add -H 'Content-Type: application/json'" in answer.text) == ("urlencoded" in given)
    given = "application/json; charset=utf-8"
    answer = httpx.post(f"{hub.url}/v1/chat/completions", content=body, headers={"Content-Type": given}, timeout=30)
    assert answer.status_code == 200


@pytest.mark.attack("A30", "A9")
def test_pages_of_other_sites_are_refused(hub: Hub) -> None:
    """By a foreign Origin, and by a name that was made to lead here; a page that is allowed may read its answers."""
    chat, body = f"{hub.url}/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
    addresses = [hub.url.replace("http", "ws", 1) + path for path in ("/v1/stream", "/v1/realtime")]
    for origin in ("https://evil.example", "null", "https://good.example.evil.example"):
        answer = httpx.post(chat, json=body, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert "access-control-allow-origin" not in answer.headers
        for address in addresses:
            with pytest.raises(InvalidStatus) as refused, connect(address, additional_headers={"Origin": origin}):
                pass
            assert refused.value.response.status_code == 403
    for path in ("/v1/models", "/metrics", "/v1/chat/completions"):
        answer = httpx.get(hub.url + path, headers={"Host": "evil.example"})
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    for name in (hub.url.removeprefix("http://"), "localhost", "[::1]:8000", "10.1.2.3:80"):
        assert httpx.get(f"{hub.url}/health", headers={"Host": name}).status_code == 200
    good = {"Origin": "https://good.example"}
    answer = httpx.post(chat, json=body, headers=good, timeout=30)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://good.example")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    assert httpx.options(chat, headers={**good, **asked}).status_code == 200
    assert httpx.options(chat, headers={"Origin": "https://evil.example", **asked}).status_code == 400


async def put_strangers(endpoint: str, records: list[str]) -> None:
    # A slow disk syncs each of them.
    kv = EtcdKV(endpoint, try_timeout_s=30, call_timeout_s=30)
    try:
        for start in range(0, len(records), 100):
            some = enumerate(records[start : start + 100], 1000 + start)
            await asyncio.gather(*(kv.put(f"{REPLICAS}{each}", text.encode()) for each, text in some))
    finally:
        await kv.close()


@pytest.mark.attack("A24")
async def test_records_of_nobody_take_no_descriptors_from_a_hub(tmp_path: Path, server: EtcdServer) -> None:
    """1. 3000 records name addresses where nobody is: few of them are tried at a time, and clients are served
    2. they are deleted: the descriptors are back
    """
    flags = ("--etcd-endpoints", server.endpoint, "--namespace", "test")
    hub = Hub.of_yaml(tmp_path, ECHO, *flags)
    try:
        hub.wait_ready()
        quiet = descriptors(hub.process.pid)
        record = json.loads(etcdctl(server.endpoint, "get", "--prefix", REPLICAS, "--print-value-only"))
        strangers = []
        for number in range(1000, 4000):
            address = f"tcp://127.{number // 250 % 250 + 1}.{number % 250}.1"
            fields = {"replica_id": number, "input_addr": f"{address}:9", "output_addr": f"{address}:10"}
            strangers.append(json.dumps({**record, **fields, "pid": number}))
        await put_strangers(server.endpoint, strangers)
        wait_for("the hub to try some of them", lambda: descriptors(hub.process.pid) > quiet + 500)
        for _ in range(5):
            must_serve(hub)
            assert descriptors(hub.process.pid) < quiet + 2000
        etcdctl(server.endpoint, "del", "--from-key", REPLICAS + "1000", "--prefix=false")
        wait_for("the descriptors to be free", lambda: descriptors(hub.process.pid) < quiet + 50)
        must_serve(hub)
    finally:
        hub.stop()

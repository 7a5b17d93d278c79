"""Where the samples of a supervisor go."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.metrics.samples import ReplicaSample, SupervisorSample, decode_sample
from stage_runtime.supervisor.exporter import MetricsExporter
from tests.support.loopback import HAS_IPV6

SUPERVISOR = SupervisorSample(namespace="default", stage_id=0, wanted=2, restarts=0, replica_ids=(1,))
REPLICA = ReplicaSample(stage_id=0, replica_id=1, is_up=True)


def test_prometheus_gets_the_latest_samples_and_after_the_close_nothing() -> None:
    with closing(MetricsExporter()) as exporter:
        assert not exporter.is_used
        url = exporter.serve("127.0.0.1", 0)
        assert exporter.is_used
        assert url.startswith("http://127.0.0.1:")
        exporter.export(SUPERVISOR)
        exporter.export(REPLICA)
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        assert 'omni_replica_up{replica="0/1",stage="0"} 1.0' in text
        assert 'omni_supervisor_replicas_wanted{namespace="default",stage="0"} 2.0' in text
        assert 'omni_build_info{component="supervisor"' in text
    exporter.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=30)


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.socket() as taken, closing(MetricsExporter()) as exporter:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"on 127.0.0.1 port {port}: .* choose another --metrics-port"):
            exporter.serve("127.0.0.1", port)


def test_the_hub_gets_each_sample_and_one_that_reads_nothing_or_is_gone_stops_nobody() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, closing(MetricsExporter()) as exporter:
        exporter.send_to_hub(theirs.detach())
        exporter.export(SUPERVISOR)
        exporter.export(REPLICA)
        assert [decode_sample(ours.recv(65536)) for _ in range(2)] == [SUPERVISOR, REPLICA]
        for _ in range(5000):
            exporter.export(REPLICA)
        ours.close()
        exporter.export(REPLICA)


def test_a_token_closes_the_port_to_those_without_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    with closing(MetricsExporter()) as exporter:
        with pytest.raises(ConfigError, match=f"--metrics-token-file {file} is empty"):
            exporter.serve("127.0.0.1", 0, str(file))
        file.write_text("m-key\n")
        url = exporter.serve("127.0.0.1", 0, str(file))
        for header in ("", "Bearer wrong", "Bearer m-key2", "Basic m-key", "m-key"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": header}), timeout=30)
            assert (caught.value.code, caught.value.headers["WWW-Authenticate"]) == (401, "Bearer")
            caught.value.close()
        request = urllib.request.Request(url, headers={"Authorization": "Bearer m-key"})
        assert b"omni_build_info" in urllib.request.urlopen(request, timeout=30).read()


@pytest.mark.attack("Z85")
def test_a_page_that_gives_its_own_name_this_address_reads_nothing() -> None:
    with closing(MetricsExporter()) as exporter:
        url = exporter.serve("127.0.0.1", 0)
        for host in ("localhost", "127.0.0.1:80", "[::1]:9", "a.localhost"):
            request = urllib.request.Request(url, headers={"Host": host})
            assert b"omni_build_info" in urllib.request.urlopen(request, timeout=30).read()
        for host in ("a.example", "[", "localhost.a.example:9"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}), timeout=30)
            assert caught.value.code == 403
            caught.value.close()


@pytest.mark.attack("F3")
@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
def test_whoever_says_localhost_reaches_it_by_both_addresses() -> None:
    with closing(MetricsExporter()) as exporter:
        port = int(exporter.serve("127.0.0.1", 0).rpartition(":")[2].partition("/")[0])
        for host in ("127.0.0.1", "[::1]", "localhost"):
            assert b"omni_build_info" in urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30).read()
        with pytest.raises(OSError):
            socket.create_server(("::1", port), family=socket.AF_INET6)


@pytest.mark.attack("D2")
def test_idle_connections_keep_no_thread_and_nobody_out() -> None:
    """1. strangers connect 200 times and say nothing: a bounded number of threads waits for them
    2. a scrape is answered meanwhile; 3. all strangers are hung up on
    """
    with closing(MetricsExporter()) as exporter, ExitStack() as stack:
        url = exporter.serve("127.0.0.1", 0)
        exporter.export(SUPERVISOR)
        before = threading.active_count()
        port = int(url.rpartition(":")[2].partition("/")[0])
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60.0)) for _ in range(200)
        ]
        assert "omni_supervisor_replicas_wanted" in urllib.request.urlopen(url, timeout=60).read().decode()
        assert threading.active_count() - before <= 33
        for stranger in strangers:
            assert stranger.recv(1) == b""


@pytest.mark.attack("V8")
def test_a_head_of_megabytes_is_not_read(tmp_path: Path) -> None:
    """Prometheus' library goes through each of a million formats that a client takes; before, the token is not seen."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    with closing(MetricsExporter()) as exporter:
        url = exporter.serve("127.0.0.1", 0, str(tmp_path / "token"))
        port = int(url.rpartition(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            answer = b""
            with suppress(ConnectionError):
                client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"Accept: " + b"a," * 30_000 + b"\r\n\r\n")
                answer = client.recv(4096)
            assert answer == b""
        # One with cookies and all that a proxy adds is answered.
        headers = {"Authorization": "Bearer secret", "Cookie": "c" * 4000}
        assert urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60).status == 200

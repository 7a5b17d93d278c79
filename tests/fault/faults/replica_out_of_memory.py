"""The kernel kills a replica since its cgroup has no memory left; its supervisor starts another."""

import os
from pathlib import Path

from tests.fault.faults import Fault
from tests.fault.site import Site

CGROUPS = Path("/sys/fs/cgroup/memory")


def why_not(site: Site) -> str:
    del site
    return "" if (CGROUPS / "memory.limit_in_bytes").exists() else "there is no first generation of memory cgroups"


def folder() -> Path:
    return CGROUPS / f"omni-fault-{os.getpid()}"


def break_it(site: Site) -> None:
    folder().mkdir()
    # What it has stays with its former group: the next page that it asks for is one too many.
    (folder() / "memory.limit_in_bytes").write_text("4096")
    (folder() / "cgroup.procs").write_text(str(site.pid_of(1, "right")))


def heal(site: Site) -> None:
    del site
    for pid in (folder() / "cgroup.procs").read_text().split():
        (CGROUPS / "cgroup.procs").write_text(pid)
    folder().rmdir()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=5.0, why_not=why_not)

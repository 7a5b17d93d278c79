"""The kernel kills a replica since its cgroup has no memory left; its supervisor starts another."""

import os
import time
from contextlib import suppress
from pathlib import Path

from stage_runtime.demo.processes import alive
from tests.fault.faults import Fault
from tests.fault.site import Site
from tests.support.processes import wait_for

CGROUPS = Path("/sys/fs/cgroup/memory")


def why_not(site: Site) -> str:
    del site
    return "" if (CGROUPS / "memory.limit_in_bytes").exists() else "there is no first generation of memory cgroups"


def break_it(site: Site) -> None:
    group = CGROUPS / f"omni-fault-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    pid = site.pid_of(1, "right")
    # What it has stays with its former group: the next page that it asks for is one too many.
    (group / "memory.limit_in_bytes").write_text("4096")
    (group / "cgroup.procs").write_text(str(pid))
    # An idle one asks for none for seconds.
    try:
        wait_for("a replica to ask for a page", lambda: not alive([pid]), 30.0)
    except AssertionError:
        heal(site)
        raise


def heal(site: Site) -> None:
    del site
    for group in CGROUPS.glob(f"omni-fault-{os.getpid()}-*"):
        for pid in (group / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(pid)
        # The kernel may not have let go of it yet: the next time, then.
        with suppress(OSError):
            group.rmdir()


FAULT = Fault(break_it=break_it, heal=heal, why_not=why_not)

"""A replica of the second stage gets SIGKILL; its supervisor starts another."""

import os
import signal

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    os.kill(site.pid_of(1, "left"), signal.SIGKILL)


FAULT = Fault(break_it=break_it)

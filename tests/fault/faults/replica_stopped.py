"""A replica of the first stage gets SIGSTOP for 8 s, with all its connections open."""

import os
import signal

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.victim = site.pid_of(0, "left")
    os.kill(site.victim, signal.SIGSTOP)


def heal(site: Site) -> None:
    os.kill(site.victim, signal.SIGCONT)


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, promise=Promise(stall_s=4.5))

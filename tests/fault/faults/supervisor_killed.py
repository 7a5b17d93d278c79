"""A supervisor gets SIGKILL, and its replica ends with it; both are started again 2 s later."""

import signal

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.supervisors[0, "right"].process.send_signal(signal.SIGKILL)


def heal(site: Site) -> None:
    site.supervisors[0, "right"].process.wait(10)
    site.start_supervisor(0, "right")


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=2.0)

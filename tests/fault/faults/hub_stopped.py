"""A hub gets SIGSTOP for 6 s, longer than its lease, with all its connections open."""

import signal

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.hubs["a"].process.send_signal(signal.SIGSTOP)


def heal(site: Site) -> None:
    site.hubs["a"].process.send_signal(signal.SIGCONT)


# Its streams stand still with it: nobody but their clients can know that.
FAULT = Fault(break_it=break_it, heal=heal, lasts_s=6.0, promise=Promise(stall_s=None, takes_a_hub=True))

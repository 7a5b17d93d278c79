"""The leader of etcd stands still for 0.3 s out of 0.5, for 8 s, as on a disk that is slow to sync."""

import time

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    member = site.cluster.leader()
    end_s = time.monotonic() + 8.0
    while time.monotonic() < end_s:
        member.pause()
        time.sleep(0.3)
        member.unpause()
        time.sleep(0.2)


FAULT = Fault(break_it=break_it, is_noticed=False)

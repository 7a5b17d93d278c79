"""Everything is stopped by SIGTERM and started again, one process after the other: supervisors, hubs, etcd."""

import time

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site
from tests.support.processes import wait_for


def break_it(site: Site) -> None:
    for stage, side in site.supervisors:
        site.supervisors[stage, side].stop()
        site.start_supervisor(stage, side)
        wait_for("its replica", lambda: not (site.lack() or site.lack_in_registry()), 60.0)
    for name in site.names:
        site.hubs[name].stop()
        site.start_hub(name)
        wait_for("the hub", lambda: not (site.lack() or site.lack_in_registry()), 60.0)
    for member in site.cluster.members:
        member.kill()
        time.sleep(1.0)
        member.start()
        site.cluster.wait_serving()


FAULT = Fault(break_it=break_it, promise=Promise(stall_s=2.0, stall_alone_s=17.0, takes_a_hub=True))

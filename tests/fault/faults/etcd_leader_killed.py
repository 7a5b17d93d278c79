"""The leader of etcd gets SIGKILL, and is started again 4 s later on its data."""

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.leader()
    site.member.kill()


def heal(site: Site) -> None:
    site.member.start()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=4.0, is_noticed=False)

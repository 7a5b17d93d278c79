"""The leader of etcd is frozen by `docker pause` for 8 s, and still believes to lead when it wakes."""

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.leader()
    site.member.pause()


def heal(site: Site) -> None:
    site.member.unpause()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

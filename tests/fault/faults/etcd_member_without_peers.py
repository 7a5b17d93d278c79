"""A member of etcd is cut off from the others for 8 s, and still answers hubs and replicas."""

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.leader()
    site.cluster.cut_off(site.member)


def heal(site: Site) -> None:
    site.cluster.join_again(site.member)


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

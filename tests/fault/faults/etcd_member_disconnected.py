"""The leader of etcd is taken off its networks by `docker network disconnect` for 8 s."""

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.leader()
    site.cluster.disconnect(site.member)


def heal(site: Site) -> None:
    site.cluster.connect(site.member)


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

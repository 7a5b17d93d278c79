"""A member of etcd that does not lead is frozen by `docker pause` for 8 s."""

from tests.fault.faults import Fault
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.followers()[0]
    site.member.pause()


def heal(site: Site) -> None:
    site.member.unpause()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

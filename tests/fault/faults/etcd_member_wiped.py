"""A member of etcd loses its machine and its disk; 2 s later an empty one takes its place and its addresses."""

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.member = site.cluster.leader()
    site.cluster.lose_data(site.member)


def heal(site: Site) -> None:
    site.cluster.replace(site.member)
    # The others have never made a snapshot: it writes all that was ever written, also what once filled its quota.
    site.cluster.wait_serving()
    site.make_room()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=2.0, promise=Promise(), is_noticed=False)

"""A host with a replica of each stage is off the network for 8 s; nobody is told."""

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.network.cut(site.hosts["left"])


def heal(site: Site) -> None:
    site.network.join(site.hosts["left"])


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, promise=Promise(stall_s=4.5))

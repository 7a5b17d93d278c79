"""All members of etcd get SIGKILL, and are started again on their data three TTLs later."""

from tests.fault.faults import Fault
from tests.fault.site import TTL_S, Site


def break_it(site: Site) -> None:
    for member in site.cluster.members:
        member.kill()


def heal(site: Site) -> None:
    for member in site.cluster.members:
        member.start()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=3 * TTL_S)

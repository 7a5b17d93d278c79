"""A hub can open no further file for 5 s: no connection of a client, none to etcd or a replica."""

import resource

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    pid = site.hubs["a"].process.pid
    site.limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, site.limits[1]))


def heal(site: Site) -> None:
    resource.prlimit(site.hubs["a"].process.pid, resource.RLIMIT_NOFILE, site.limits)


# Streams that run have their connections; new clients of this hub wait, or are hung up on and ask again.
FAULT = Fault(break_it=break_it, heal=heal, lasts_s=5.0, promise=Promise(takes_a_hub=True))

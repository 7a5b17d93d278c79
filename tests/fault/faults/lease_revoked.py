"""Somebody revokes the lease of a replica that serves; it registers anew."""

import json

from tests.fault.faults import Fault
from tests.fault.site import NAMESPACE, Site


def break_it(site: Site) -> None:
    found = json.loads(site.etcdctl("get", "--prefix", f"/omni/v1/{NAMESPACE}/replicas/0/", "-w", "json"))["kvs"]
    site.etcdctl("lease", "revoke", f"{found[0]['lease']:x}")


FAULT = Fault(break_it=break_it)

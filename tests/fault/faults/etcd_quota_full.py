"""etcd is full: it takes no key and grants no lease for 8 s, until an operator makes room."""

import subprocess

from tests.fault.faults import Fault
from tests.fault.site import QUOTA_BYTES, Site
from tests.support.registry import compact, etcdctl

#: Below the most that etcd takes as one value.
VALUE = b"x" * 1_000_000


def break_it(site: Site) -> None:
    for number in range(2 * QUOTA_BYTES // len(VALUE)):
        try:
            etcdctl(site.endpoints, "put", f"/filling/{number}", given=VALUE)
        except subprocess.CalledProcessError as error:
            if b"database space exceeded" in error.stderr:
                return
    raise AssertionError("etcd takes more than its quota")


def heal(site: Site) -> None:
    etcdctl(site.endpoints, "del", "--prefix", "/filling/")
    compact(site.endpoints)
    site.make_room()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

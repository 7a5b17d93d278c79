"""A hub is cut off from etcd for 6 s, and what it missed is compacted away, so that its watch can't go on."""

from tests.fault.faults import Fault, needs
from tests.fault.site import NAMESPACE, Site
from tests.support.registry import compact


def break_it(site: Site) -> None:
    site.nft("a", "out tcp dport 2379 drop\nin tcp sport 2379 drop")
    key = f"/omni/v1/{NAMESPACE}/control/0/99"
    for _ in range(3):
        site.etcdctl("put", key, '{"cordon": true}')
        site.etcdctl("del", key)
    compact(site.endpoints)


def heal(site: Site) -> None:
    site.nft_clear("a")


FAULT = Fault(why_not=needs("nft"), break_it=break_it, heal=heal, lasts_s=6.0)

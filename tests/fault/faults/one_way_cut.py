"""For 8 s a host with a replica of each stage hears nothing from hub a, which goes on hearing the host."""

from tests.fault.faults import Fault, needs
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.nft("left", f"in ip saddr {site.hosts['a'].address} drop")


def heal(site: Site) -> None:
    site.nft_clear("left")


FAULT = Fault(why_not=needs("nft"), break_it=break_it, heal=heal, lasts_s=8.0, promise=Promise(stall_s=4.5))

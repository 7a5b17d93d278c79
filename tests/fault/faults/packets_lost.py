"""For 8 s a host with a replica of each stage loses one packet in twenty, each way."""

from tests.fault.faults import Fault, needs
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.nft("left", "in numgen random mod 20 0 drop\nout numgen random mod 20 0 drop")


def heal(site: Site) -> None:
    site.nft_clear("left")


FAULT = Fault(why_not=needs("nft"), break_it=break_it, heal=heal, lasts_s=8.0, is_noticed=False)

"""Four clients ask for a megabyte each and read nothing of it for 6 s; then they are gone."""

from tests.fault.faults import Fault
from tests.fault.site import Site
from tests.fault.strangers import Stranger


def break_it(site: Site) -> None:
    site.strangers = [Stranger(site, words=60, word_bytes=20_000, reads=False) for _ in range(4)]


def heal(site: Site) -> None:
    for stranger in site.strangers:
        stranger.leave()


FAULT = Fault(break_it=break_it, heal=heal, lasts_s=6.0, is_noticed=False)

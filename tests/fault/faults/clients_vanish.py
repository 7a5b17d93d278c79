"""Thirty clients, four at a time, leave in the middle of their answers without a goodbye."""

import time

from tests.fault.faults import Fault
from tests.fault.site import Site
from tests.fault.strangers import Stranger


def break_it(site: Site) -> None:
    for _ in range(8):
        strangers = [Stranger(site, words=200, word_bytes=8, reads=True) for _ in range(4)]
        time.sleep(0.3)
        for stranger in strangers:
            stranger.leave()


FAULT = Fault(break_it=break_it, is_noticed=False)

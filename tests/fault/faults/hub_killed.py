"""A hub gets SIGKILL with streams in its hands, and is started again 1 s later."""

import signal

from tests.fault.faults import Fault
from tests.fault.judge import Promise
from tests.fault.site import Site


def break_it(site: Site) -> None:
    site.hubs["a"].process.send_signal(signal.SIGKILL)


def heal(site: Site) -> None:
    site.hubs["a"].process.wait(10)
    site.start_hub("a")


# A client waits 0.2 s, and another hub makes again what was shown, which takes as long as before: 1.2 s at most. With
# one hub it asks until that is there again, for the last time 15.2 s after the break.
FAULT = Fault(
    break_it=break_it,
    heal=heal,
    lasts_s=1.0,
    promise=Promise(stall_s=2.0, stall_alone_s=17.0, takes_a_hub=True),
)

"""The clocks of a hub and of a host with a replica of each stage jump an hour ahead, and 6 s later back."""

from pathlib import Path

from tests.fault.faults import Fault
from tests.fault.site import STAGES, Site
from tests.support.processes import wait_for

HOUR = 3600


def library() -> Path | None:
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def why_not(site: Site) -> str:
    del site
    return "" if library() else "libfaketime is not there: apt-get install libfaketime"


def clock(site: Site) -> Path:
    return site.folder / "clock"


def set_clock(site: Site, offset_s: int) -> None:
    written = clock(site).with_suffix(".new")
    written.write_text(f"{offset_s:+}s\n")
    # Whoever looks at it meanwhile sees the one or the other.
    written.replace(clock(site))


def prepare(site: Site) -> None:
    set_clock(site, 0)
    restart(
        site,
        {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(clock(site)),
            "FAKETIME_NO_CACHE": "1",
            # A clock that somebody sets is the one of the day; the other only ever goes on.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        },
    )


def restore(site: Site) -> None:
    restart(site, {})


def restart(site: Site, variables: dict[str, str]) -> None:
    for stage in STAGES:
        site.supervisors[stage, "left"].stop()
        site.start_supervisor(stage, "left", variables)
    site.hubs["a"].stop()
    site.start_hub("a", variables)
    wait_for("a whole site", lambda: not (site.lack() or site.lack_in_registry()), 60.0)


def break_it(site: Site) -> None:
    set_clock(site, HOUR)


def heal(site: Site) -> None:
    set_clock(site, 0)


FAULT = Fault(
    break_it=break_it, heal=heal, lasts_s=6.0, prepare=prepare, restore=restore, why_not=why_not, is_noticed=False
)

"""The clocks of a hub and of a host with a replica of each stage jump an hour ahead, and 6 s later back."""

import subprocess
from pathlib import Path

from tests.fault.faults import Fault, needs
from tests.fault.site import STAGES, Site
from tests.support.processes import wait_for

HOUR = 3600


def set_clock(site: Site, offset_s: int) -> None:
    # In place: the processes have mapped this very file.
    with (site.folder / "clock").open("r+b") as file:
        file.write(offset_s.to_bytes(8, "little", signed=True))


def prepare(site: Site) -> None:
    # Debian's libfaketime (0.9.10) makes time.sleep of Python 3.11 fail.
    library = site.folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    (site.folder / "clock").write_bytes(bytes(8))
    restart(site, {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(site.folder / "clock")})


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
    break_it=break_it,
    heal=heal,
    lasts_s=6.0,
    prepare=prepare,
    restore=restore,
    why_not=needs("gcc"),
    is_noticed=False,
)

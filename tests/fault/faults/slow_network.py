"""For 8 s all that a host with a replica of each stage sends goes through 256 kbit/s, late by up to 400 ms."""

import subprocess

from tests.fault.faults import Fault, needs
from tests.fault.judge import Promise
from tests.fault.site import Site


def tc(site: Site, *words: str) -> None:
    command = ["tc", "-n", site.hosts["left"].namespace, "qdisc", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def break_it(site: Site) -> None:
    tc(site, "add", "dev", "eth0", "root", "tbf", "rate", "256kbit", "burst", "4k", "latency", "400ms")


def heal(site: Site) -> None:
    tc(site, "del", "dev", "eth0", "root")


FAULT = Fault(
    why_not=needs("tc"), break_it=break_it, heal=heal, lasts_s=8.0, promise=Promise(stall_s=4.5), is_noticed=False
)

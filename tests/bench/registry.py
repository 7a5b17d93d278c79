"""The benchmarks of the control plane, beside the peer's own coordinator: ``python -m tests.bench.registry``.

``--peer-wheel`` names vLLM-Omni's wheel, as ``pip download --no-deps vllm-omni`` fetches it; without it the columns of
the peer are left out. See visibility.py, membership.py, scale.py and outage.py for what is measured and how.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.bench import membership, outage, report, scale, visibility

_PARTS = ("visibility", "lists", "bytes", "scale", "outage")


def main() -> None:
    """Measure the chosen parts, print a table for each, write all as JSON."""
    arguments = _arguments()
    results: report.Row = {"machine": report.machine()}
    began_s = time.monotonic()
    if arguments.parts != ["outage"]:
        with EmbeddedEtcd() as etcd:
            _measure_on(etcd, arguments, results)
    if "outage" in arguments.parts:
        results["outage"] = [outage.measure(arguments.outage_replicas, arguments.outage_s, 4)]
        report.show("etcd killed under load, then back on its data", results["outage"])
    results["machine"]["load_average_at_the_end"] = report.machine()["load_average"]
    results["took_s"] = round(time.monotonic() - began_s)
    report.write(arguments.out, results)


def _measure_on(etcd: EmbeddedEtcd, arguments: argparse.Namespace, results: report.Row) -> None:
    parts, wheel = arguments.parts, arguments.peer_wheel
    if "visibility" in parts:
        results["visibility"] = []
        for replicas in arguments.sizes:
            rows = visibility.measure(
                etcd, replicas, arguments.turns, arguments.paced_turns, arguments.spacing_s, wheel
            )
            report.show(f"until a hub sees it, {replicas} replicas registered", rows)
            results["visibility"] += rows
    if "lists" in parts:
        results["lists"] = membership.first_lists(etcd, max(arguments.sizes), arguments.list_rounds, wheel)
        report.show("first complete list of a new hub", results["lists"])
    if "bytes" in parts:
        results["bytes"] = membership.bytes_per_change(etcd, max(arguments.sizes), arguments.changes, wheel)
        report.show("bytes to and from one hub for one change", results["bytes"])
    if "scale" in parts:
        results["scale"] = scale.measure(etcd, arguments.scale_replicas, arguments.window_s, arguments.budget_window_s)
        for row in results["scale"]:
            report.show(f"{arguments.scale_replicas} replicas", [row])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-wheel", help="path of vLLM-Omni's wheel")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 100, 1000], help="replicas registered")
    parser.add_argument("--turns", type=int, default=50, help="changes of each kind at each size")
    parser.add_argument("--paced-turns", type=int, default=8, help="changes that wait for the write budget")
    parser.add_argument("--spacing-s", type=float, default=0.8, help="between changes of one replica's load")
    parser.add_argument("--list-rounds", type=int, default=15)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--scale-replicas", type=int, default=10_000)
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--budget-window-s", type=float, default=60.0)
    parser.add_argument("--outage-replicas", type=int, default=100)
    parser.add_argument("--outage-s", type=float, default=10.0, help="60 is the full form")
    return parser.parse_args()


if __name__ == "__main__":
    main()

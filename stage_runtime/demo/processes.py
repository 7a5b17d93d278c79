"""What the demo has to know about processes: who descends from whom, and how much memory they take together (Linux)."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """The process and all that came from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def memory_bytes(pids: list[int]) -> int:
    """Proportional set size of the processes together: pages that several share are counted once."""
    return sum(_pss_bytes(pid) for pid in pids)


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; a zombie does not."""
    return [pid for pid in pids if _state(pid) not in {None, "Z", "X"}]


def _parent(entry: Path) -> int | None:
    fields = _stat(entry)
    return int(fields[1]) if fields else None


def _state(pid: int) -> str | None:
    fields = _stat(PROC / str(pid))
    return fields[0] if fields else None


def _stat(entry: Path) -> list[str] | None:
    try:
        # The name in brackets may hold anything; what follows the last bracket is plain.
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _pss_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

"""Descendants of a process and the memory that they take together, from /proc (Linux)."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """The process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    pids = [pid]
    for parent_pid in pids:
        pids += children.get(parent_pid, [])
    return pids


def memory_bytes(pids: list[int]) -> int:
    """Proportional set size of the processes together: shared pages count once."""
    return sum(_pss_bytes(pid) for pid in pids)


def alive(pids: list[int]) -> list[int]:
    """The processes that still run; a zombie doesn't."""
    return [pid for pid in pids if _state(pid) not in {None, "Z", "X"}]


def _parent(entry: Path) -> int | None:
    fields = _stat(entry)
    return int(fields[1]) if fields else None


def _state(pid: int) -> str | None:
    fields = _stat(PROC / str(pid))
    return fields[0] if fields else None


def _stat(entry: Path) -> list[str] | None:
    try:
        # The name in brackets may hold any character; the fields follow the last bracket.
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _pss_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def run_time_s(pid: int) -> float:
    """The processor time of a process so far, all of its threads; 0 if it is gone."""
    return sum(_thread_time_ns(task) for task in _tasks(pid)) / 1e9


def _tasks(pid: int) -> list[Path]:
    try:
        return list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def _thread_time_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return 0

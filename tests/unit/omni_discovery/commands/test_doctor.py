"""How long ``omni doctor`` looks at addresses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.commands import doctor
from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.testing import some_replicas


@pytest.mark.attack("F6")
async def test_addresses_at_which_nobody_speaks_take_a_bounded_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 256 are looked at at the same time, for 4 s each: those for which there is no time are counted."""
    monkeypatch.setattr(doctor, "_ADDRESSES_S", 6.0)
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0, backlog=1024)
    try:
        address = f"tcp://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        infos = [replace(info, input_addr=address, output_addr=address) for info in some_replicas(*[0] * 256)]
        view: Any = SimpleNamespace(replicas={f"{number:03}": info for number, info in enumerate(infos)})
        *problems, last = await doctor._check_addresses(view)
    finally:
        for writer in held:
            writer.close()
        silent.close()
        # What was closed is let go of by the loop a moment later.
        await asyncio.gather(*(writer.wait_closed() for writer in held), return_exceptions=True)
    assert {each.grade for each in problems} <= {Grade.PROBLEM}
    assert len(problems) <= 128
    assert last.grade is Grade.NOTE
    assert last.text == f"{256 - len(problems)} of 256 replicas were not checked: the others took 6 s"


@pytest.mark.attack("V4")
def test_of_thousands_of_findings_of_one_kind_some_are_shown_and_all_are_counted() -> None:
    """A row takes some milliseconds to draw, and whoever may write records may write ten thousand with an error."""
    found = [Finding(Grade.PROBLEM, "replica", f"replica 0/{number} reports an error") for number in range(9000)]
    found += [Finding(Grade.NOTE, "replica", "one note"), Finding(Grade.PROBLEM, "etcd", "it is away")]
    table = doctor.findings_table(found)
    assert table.row_count < 80
    texts = [str(cell) for cell in table.columns[2].cells]
    assert texts[-1] == "9001 wrong"
    assert {"one note", "it is away", "replica 0/0 reports an error"} <= set(texts)
    assert "8936 more like these: omni doctor --json names them" in texts

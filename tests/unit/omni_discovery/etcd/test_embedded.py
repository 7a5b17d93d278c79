"""Why the embedded etcd did not start, out of its log."""

from __future__ import annotations

import pytest

from omni_discovery.etcd.embedded import what_it_said

FATAL = (
    '{"level":"fatal","ts":"2024-01-01","caller":"a.go:1","msg":"discovery failed","error":"no space\\n left",'
    '"limit":60,"stacktrace":"main.main\\n\\t/x.go:1"}'
)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (FATAL, "discovery failed: no space left (limit 60)"),
        (
            f'cut off in the midd","x":1}}\n{{"level":"warn","msg":"slow"}}\n{FATAL}',
            "discovery failed: no space left (limit 60)",
        ),
        ('{"level":"warn","msg":"slow"}\n{"level":"fa', "slow"),
        ("etcd: no such flag\nsee etcd -h\n", "etcd: no such flag see etcd -h"),
        ("", ""),
    ],
)
def test_the_last_whole_line_of_the_log_is_told_without_what_developers_read(log: str, said: str) -> None:
    assert what_it_said(log) == said

"""The alert rules of compose/monitoring, and promtool, which runs them on samples."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.binaries import require_promtool

FILE: Final = Path(__file__).resolve().parents[2] / "compose" / "monitoring" / "alerts.yaml"
#: The rules by the names of their alerts.
RULES: Final[dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}

#: Of a rule's ``for``, a range in an expression, and an offset: how long, and in which unit.
_DURATION: Final = re.compile(r"(?P<before>\bfor: |\[|\boffset )(?P<count>\d+)(?P<unit>[smh])\b")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}


def shorten_rules(text: str, times: int) -> str:
    """The rules with each duration so many times shorter, and nothing else changed."""

    def shorter(found: re.Match[str]) -> str:
        length_ms = int(found["count"]) * _UNITS_S[found["unit"]] * 1000 // times
        return f"{found['before']}{length_ms}ms"

    return _DURATION.sub(shorter, text)


def run_promtool(folder: Path, rules: Sequence[Any], tests: Sequence[Any]) -> subprocess.CompletedProcess[str]:
    """Promtool's answer to these rules and these tests, in its own notation; samples come each 15 s."""
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": list(tests)}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": list(rules)}]}))
    (folder / "test.yaml").write_text(yaml.safe_dump(document))
    command = [require_promtool(), "test", "rules", "test.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def firing_alerts(folder: Path, series: dict[str, str], at_s: int) -> set[str]:
    """The alerts that fire at a moment, of series in promtool's notation."""
    silent = [{"eval_time": f"{at_s}s", "alertname": name, "exp_alerts": []} for name in RULES]
    inputs = [{"series": name, "values": values} for name, values in sorted(series.items())]
    answer = run_promtool(
        folder, list(RULES.values()), [{"interval": "15s", "input_series": inputs, "alert_rule_test": silent}]
    )
    told = answer.stdout + answer.stderr
    found = set(re.findall(r"alertname: (\w+), time", told))
    # Nothing but an alert may have made it fail.
    assert bool(found) == bool(answer.returncode), told
    return found

"""Each alert fires when it should and is silent when it should be: promtool runs the rules on samples over time."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.alerts import FILE, RULES, run_promtool, shorten_rules

HUB = 'instance="hub:8000",job="omni-hub"'
STAGE = 'instance="stage:9100",job="omni-stage"'
ETCD = 'instance="etcd:2379",job="etcd"'


@dataclass(frozen=True)
class Case:
    """Samples, one each 15 s in the notation of promtool, and the labels of the alert at a moment; None: silent."""

    alert: str
    series: dict[str, str]
    at: str
    labels: dict[str, str] | None
    #: A part of the summary.
    says: str = ""


def of_hub(metric: str, *labels: str) -> str:
    return f"{metric}{{{','.join((HUB, *labels))}}}"


FAILURES = of_hub("omni_hub_request_failures_total", 'stage="0"', 'replica="0/1"', 'outcome="EngineFailedError"')
OTHER_FAILURES = FAILURES.replace("0/1", "0/2")
WRONG = of_hub("omni_hub_request_failures_total", 'stage="0"', 'replica="0/1"', 'outcome="InvalidRequestError"')
HUBS = f'omni_supervisor_hubs{{{STAGE},namespace="default",stage="0"}}'
OTHER_HUBS = 'omni_supervisor_hubs{instance="b:9100",job="omni-stage",namespace="default",stage="1"}'
UP = f'omni_supervisor_replicas_up{{{STAGE},namespace="default",stage="0"}}'
WANTED = f'omni_supervisor_replicas_wanted{{{STAGE},namespace="default",stage="0"}}'
USED = f"etcd_mvcc_db_total_size_in_bytes{{{ETCD}}}"
QUOTA = f"etcd_server_quota_backend_bytes{{{ETCD}}}"
ON_HUB = {"instance": "hub:8000", "job": "omni-hub"}
PER_STAGE = {"instance": "hub:8000", "stage": "0"}
ON_ETCD = {"instance": "etcd:2379", "job": "etcd"}
ON_STAGE = {"instance": "stage:9100", "job": "omni-stage"}


def gauge(metric: str) -> str:
    return of_hub(metric, 'stage="0"')


CASES = [
    Case("OmniStageWithoutReplicas", {gauge("omni_hub_replicas_pickable"): "0x8"}, "1m", {**ON_HUB, "stage": "0"}),
    Case("OmniStageWithoutReplicas", {gauge("omni_hub_replicas_pickable"): "1x8"}, "1m", None),
    Case("OmniViewStale", {of_hub("omni_hub_view_stale_seconds"): "0+15x8"}, "2m", ON_HUB),
    Case("OmniViewStale", {of_hub("omni_hub_view_stale_seconds"): "0x8"}, "2m", None),
    Case(
        "OmniRequestsRefused",
        {gauge("omni_hub_requests_refused_total"): "0+1x60"},
        "12m",
        PER_STAGE,
        "for stage 0",
    ),
    Case(
        "OmniRequestsRefused",
        {of_hub("omni_hub_requests_refused_total", 'stage=""'): "0+1x60"},
        "12m",
        {"instance": "hub:8000"},
        "for its own bounds",
    ),
    Case("OmniRequestsRefused", {gauge("omni_hub_requests_refused_total"): "0x60"}, "12m", None),
    # One at 5 min, one at 9: that is not five minutes of refusals.
    Case("OmniRequestsRefused", {gauge("omni_hub_requests_refused_total"): "0x19 1x15 2x20"}, "10m", None),
    Case("OmniSessionsLost", {gauge("omni_hub_session_losses_total"): "0+1x40"}, "10m", PER_STAGE),
    Case("OmniSessionsLost", {gauge("omni_hub_session_losses_total"): "0x20 1x20"}, "10m", None),
    Case("OmniPipelineNotFollowed", {of_hub("omni_hub_pipeline_not_followed"): "1x4"}, "1m", ON_HUB),
    Case("OmniPipelineNotFollowed", {of_hub("omni_hub_pipeline_not_followed"): "0x4"}, "1m", None),
    Case("OmniReplicasRefused", {gauge("omni_hub_replicas_refused"): "1x80"}, "16m", {**ON_HUB, "stage": "0"}),
    Case("OmniReplicasRefused", {gauge("omni_hub_replicas_refused"): "1x20 0x60"}, "16m", None),
    # Twelve failures between two scrapes, the first ever: the counter is 12 from its first sample on.
    Case("OmniRequestsFail", {FAILURES: "_x4 12x20"}, "2m", PER_STAGE, "12 requests failed at stage 0"),
    # It is old by then.
    Case("OmniRequestsFail", {FAILURES: "12x60"}, "12m", None),
    Case("OmniRequestsFail", {FAILURES: "12x40 13 14 15 16x10"}, "12m", PER_STAGE),
    Case("OmniRequestsFail", {FAILURES: "_x4 2x20"}, "2m", None),
    # Two of one that has failed before, and the first of another: three at this stage.
    Case("OmniRequestsFail", {FAILURES: "12x40 13 14x20", OTHER_FAILURES: "_x42 1x20"}, "12m", PER_STAGE, "3 requests"),
    # Clients that ask for what there is not.
    Case("OmniRequestsFail", {WRONG: "_x4 50x20"}, "2m", None),
    # One was left out for ten seconds, four minutes ago.
    Case("OmniReplicasEjected", {gauge("omni_hub_replicas_ejected"): "0x3 1 0x30"}, "5m", {**ON_HUB, "stage": "0"}),
    Case("OmniReplicasEjected", {gauge("omni_hub_replicas_ejected"): "0x60"}, "5m", None),
    Case(
        "OmniStageBelowCount",
        {gauge("omni_hub_replicas_pickable"): "1x60", gauge("omni_hub_replicas_wanted"): "2x60"},
        "11m",
        {**ON_HUB, "stage": "0"},
        "can use 1 replicas of stage 0",
    ),
    # It was back within ten minutes; more than were asked for are no reason to wake anybody.
    Case(
        "OmniStageBelowCount",
        {gauge("omni_hub_replicas_pickable"): "1x20 3x40", gauge("omni_hub_replicas_wanted"): "2x60"},
        "11m",
        None,
    ),
    Case("OmniRecordUnreadable", {of_hub("omni_hub_view_unreadable_keys"): "2x20"}, "3m", ON_HUB, "can't read 2 keys"),
    # It was written anew within the minute.
    Case("OmniRecordUnreadable", {of_hub("omni_hub_view_unreadable_keys"): "1x2 0x20"}, "3m", None),
    Case("OmniHubDown", {f"up{{{HUB}}}": "0x10"}, "2m", ON_HUB, "at hub:8000"),
    Case("OmniHubDown", {f"up{{{STAGE}}}": "1x10"}, "2m", {"job": "omni-hub"}, "at any address"),
    Case("OmniHubDown", {f"up{{{HUB}}}": "1x10"}, "2m", None),
    Case("OmniNoHub", {HUBS: "0x10", OTHER_HUBS: "0x10"}, "2m", {"namespace": "default"}, "namespace default"),
    # One host is cut off from etcd, the others see a hub.
    Case("OmniNoHub", {HUBS: "0x10", OTHER_HUBS: "1x10"}, "2m", None),
    Case(
        "OmniReplicasDown",
        {UP: "1x60", WANTED: "2x60"},
        "11m",
        {**ON_STAGE, "namespace": "default", "stage": "0"},
        "has 1 replicas of stage 0 up",
    ),
    # An operator has drained one: it is not wanted any more.
    Case("OmniReplicasDown", {UP: "2x20 1x40", WANTED: "2x20 1x40"}, "11m", None),
    Case("OmniSupervisorDown", {f"up{{{STAGE}}}": "0x10"}, "2m", ON_STAGE),
    Case("OmniSupervisorDown", {f"up{{{STAGE}}}": "1x10"}, "2m", None),
    Case("OmniEtcdNearlyFull", {USED: "1900000000x40", QUOTA: "2147483648x40"}, "6m", ON_ETCD, "88"),
    Case("OmniEtcdNearlyFull", {USED: "1000000000x40", QUOTA: "2147483648x40"}, "6m", None),
]


def test_each_alert_is_tried_both_ways() -> None:
    assert {case.alert for case in CASES if case.labels is not None} == set(RULES)
    assert {case.alert for case in CASES if case.labels is None} == set(RULES)


def test_shorter_rules_differ_in_their_durations_alone() -> None:
    """Those that a real Prometheus is given in tests/fault."""
    text = FILE.read_text()
    shorter = shorten_rules(text, 30)
    assert re.sub(r"(for: |\[|offset )\d+ms\b", r"\1", shorter) == re.sub(r"(for: |\[|offset )\d+[sm]\b", r"\1", text)
    (rule,) = yaml.safe_load(shorten_rules("[{expr: 'rate(a[5m]) > 60 unless b offset 2m', for: 30s}]", 30))
    assert rule == {"expr": "rate(a[10000ms]) > 60 unless b offset 4000ms", "for": "1000ms"}


def test_each_alert_fires_when_it_should_and_is_silent_when_it_should_be(tmp_path: Path) -> None:
    """Without what they say, which the next test reads."""
    rules = [{name: value for name, value in rule.items() if name != "annotations"} for rule in RULES.values()]
    answer = checked(tmp_path, rules, CASES)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("case", [case for case in CASES if case.says], ids=lambda case: case.alert)
def test_a_summary_names_what_it_is_about(case: Case, tmp_path: Path) -> None:
    """No summary is expected, so promtool tells the one that it got."""
    answer = checked(tmp_path, [RULES[case.alert]], [case])
    told = (answer.stdout + answer.stderr).partition("got:")[2]
    assert case.says in told, answer.stdout + answer.stderr
    assert "no value" not in told


def checked(folder: Path, rules: list[Any], cases: list[Case]) -> subprocess.CompletedProcess[str]:
    """Promtool's answer to these rules and cases."""
    tests = [
        {
            "name": case.alert,
            "interval": "15s",
            "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected(case)}],
        }
        for case in cases
    ]
    return run_promtool(folder, rules, tests)


def expected(case: Case) -> list[Any]:
    return [] if case.labels is None else [{"exp_labels": {**RULES[case.alert]["labels"], **case.labels}}]

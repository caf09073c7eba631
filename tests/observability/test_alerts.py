"""The alerts: each complete, each rule shown to fire when it should and to keep still when it should."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from benchmarks.common.live import ROOT
from deploy.autoscaling import TARGET_KV_USAGE
from deploy.config.args import Limits
from deploy.config.serve_config import OUR_DEPLOYMENT
from tests.observability.names import labels_asked_for
from tools.dashboard import ALERTS, FOLDER, RECORDED, rules
from tools.promql import Recording
from tools.promql_syntax import Aggregate, Binary, parse, seconds, walk

RULES = {rule["alert"]: rule for rule in rules()}
CONFIGS = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "deploy").glob("config*.yaml"))]
RUNBOOK = re.compile(r"docs/runbook\.md#([a-z]+(?:-[a-z]+)*)")


def test_the_file_is_a_rule_of_the_operator_whose_spec_is_a_rules_file() -> None:
    found = yaml.safe_load(ALERTS.read_text())
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    assert (found["apiVersion"], found["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert set(found["spec"]) == {"groups"}
    names = [group["name"] for group in found["spec"]["groups"]]
    assert len(set(names)) == len(names)
    assert all(set(group) == {"name", "rules"} for group in found["spec"]["groups"])
    assert len(RULES) == len(rules()), "no two of one name"


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_how_bad_it_is_for_how_long_what_it_is_and_where_to_read_on(name: str) -> None:
    rule = RULES[name]
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert 0 <= seconds(rule["for"]) <= 3600
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert 5 < len(rule["annotations"]["summary"]) < 60
    assert rule["annotations"]["description"].endswith(".")
    assert RUNBOOK.fullmatch(rule["annotations"]["runbook_url"])


def test_every_alert_has_a_place_of_its_own_in_the_runbook() -> None:
    places = [rule["annotations"]["runbook_url"] for rule in rules()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", RULES)
def test_an_alert_compares_and_names_only_labels_that_are_left(name: str) -> None:
    rule, node = RULES[name], parse(RULES[name]["expr"])
    assert labels_asked_for(node)
    assert any(isinstance(each, Binary) and each.op in (">", "<") for each in walk(node)), "or it would always fire"
    kept = [set(each.by) for each in walk(node) if isinstance(each, Aggregate)]
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    assert used <= set.intersection(*kept)


APP = {"application": "tide", "deployment": OUR_DEPLOYMENT, "replica": "r"}
MINUTES = 40


def run(**series: Any) -> Recording:
    """Forty minutes scraped every 15 s: a number stays as it is, a pair is the ends of a line; labels after `__`."""
    times = tuple(15.0 * index for index in range(4 * MINUTES + 1))
    rows = []
    for key, value in series.items():
        name, *pairs = key.split("__")
        first, last = value if isinstance(value, tuple) else (value, value)
        labels = {"__name__": f"ray_{name}", **APP, **dict(pair.split("_is_", 1) for pair in pairs)}
        labels = {key: text.replace("_dot_", ".") for key, text in labels.items()}
        values = tuple(first + (last - first) * index / (len(times) - 1) for index in range(len(times)))
        rows.append((labels, values))
    return Recording(times, tuple(rows), 15.0)


def first_tokens(late: float) -> dict[str, Any]:
    name = "tide_time_to_first_token_seconds"
    return {f"{name}_bucket__le_is_2_dot_5": (0, 1000 * (1 - late)), f"{name}_count": (0, 1000)}


def ended(wrong: str, share: float) -> dict[str, Any]:
    return {
        "tide_requests_total__finish_is_stop": (0, 1000 * (1 - share)),
        f"tide_requests_total__finish_is_{wrong}": (0, 1000 * share),
    }


def waiting(first: float, last: float) -> dict[str, Any]:
    return {"tide_num_requests_waiting": (first, last), "tide_queue_limit": 192}


HEALTHY = "serve_deployment_replica_healthy"
FIRES = [
    ("TideNoReplica", {HEALTHY: 0}),
    ("TideNoReplica", {"tide_num_requests_waiting": 0}),
    ("TideErrorRatio", ended("EngineError", 0.02)),
    ("TideErrorRatio", ended("EngineDeadError", 0.02)),
    ("TideErrorRatio", ended("error", 0.02)),
    ("TideFirstTokenSlow", first_tokens(0.06)),
    ("TideQueueGrowing", waiting(0, 60)),
    ("TideQueueFull", waiting(180, 180)),
    ("TideEngineDead", {"tide_engine_dead": 1}),
    ("TideEngineStuck", {"tide_engine_step_age_seconds": 31}),
    ("TideKvExhausted", {"tide_kv_cache_usage_perc": 0.95}),
    ("TideConfigRefused", {"tide_config_refused": 1}),
    ("TideAuditAlarm", {"tide_audit_alarms": 1}),
]
KEEPS_STILL = [
    ("TideNoReplica", {HEALTHY: 1}),
    ("TideErrorRatio", ended("EngineError", 0.005)),
    ("TideErrorRatio", ended("RequestError", 0.5)),
    ("TideErrorRatio", ended("DeadlineError", 0.5)),
    ("TideErrorRatio", ended("cancelled", 0.5)),
    ("TideFirstTokenSlow", first_tokens(0.04)),
    ("TideQueueGrowing", waiting(60, 60)),
    ("TideQueueGrowing", waiting(60, 30)),
    ("TideQueueGrowing", waiting(0, 20)),
    ("TideQueueFull", waiting(170, 170)),
    ("TideEngineDead", {"tide_engine_dead": 0}),
    ("TideEngineStuck", {"tide_engine_step_age_seconds": 5}),
    ("TideKvExhausted", {"tide_kv_cache_usage_perc": 0.85}),
    ("TideConfigRefused", {"tide_config_refused": 0}),
    ("TideAuditAlarm", {"tide_audit_alarms": 0}),
]


@pytest.mark.parametrize(("name", "series"), FIRES)
def test_an_alert_fires_when_it_should(name: str, series: dict[str, Any]) -> None:
    assert run(**series).vector(parse(RULES[name]["expr"]), 60.0 * MINUTES)


@pytest.mark.parametrize(("name", "series"), KEEPS_STILL)
def test_an_alert_keeps_still_when_it_should(name: str, series: dict[str, Any]) -> None:
    assert not run(**series).vector(parse(RULES[name]["expr"]), 60.0 * MINUTES)


def test_every_alert_was_seen_to_fire_and_to_keep_still() -> None:
    drift = {"TideExitRateDrift"}  # it needs a day: below
    assert {name for name, _ in FIRES} | drift == {name for name, _ in KEEPS_STILL} | drift == set(RULES)


@pytest.mark.parametrize(("now", "fires"), [(0.10, True), (0.25, False), (0.40, False), (0.70, True)])
def test_a_drift_of_exits_is_measured_against_the_last_day(now: float, fires: bool) -> None:
    """A day at a third of the tokens, then half an hour at another share; each application by itself."""
    times = tuple(300.0 * index for index in range(289))
    half_hour = 24 * 3600 - 1800
    exited = tuple(
        0.33 * 10 * time if time <= half_hour else 3.3 * half_hour + now * 10 * (time - half_hour) for time in times
    )
    rows = (
        ({"__name__": "ray_tide_exited_tokens_total", **APP}, exited),
        ({"__name__": "ray_tide_generation_tokens_total", **APP}, tuple(10 * time for time in times)),
    )
    found = Recording(times, rows, 300.0).vector(parse(RULES["TideExitRateDrift"]["expr"]), times[-1])
    assert bool(found) == fires


def test_the_recorded_run_raises_the_alert_that_it_earned() -> None:
    """Its few first tokens under pressure came late. Its replica was healthy throughout, although Serve tells so only
    every 10 s."""
    recording = Recording.read(RECORDED)
    fired = {name for name, rule in RULES.items() if recording.vector(parse(rule["expr"]), recording.times[-1])}
    assert fired == {"TideFirstTokenSlow"}
    for at in recording.times[1:]:
        assert not recording.vector(parse(RULES["TideNoReplica"]["expr"]), at)


def test_numbers_that_come_from_the_config_are_the_configs() -> None:
    stuck = Limits().stuck_after_s
    assert RULES["TideEngineStuck"]["expr"].endswith(f"> 0.5 * {stuck:g}")
    assert f"At {stuck:g} s it is replaced" in RULES["TideEngineStuck"]["annotations"]["description"]
    for config in CONFIGS:
        [app] = config["applications"]
        assert "stuck_after_s" not in app["args"]["limits"], "the alert has the default"
        [deployment] = app["deployments"]
        assert f'deployment="{deployment["name"]}"' in RULES["TideNoReplica"]["expr"]
    [full] = re.findall(r"> ([0-9.]+)$", RULES["TideKvExhausted"]["expr"])
    assert TARGET_KV_USAGE < float(full) < 1, "autoscaling has had its chance"
    for name in ("TideQueueGrowing", "TideQueueFull"):
        assert "* sum by (application, deployment) (ray_tide_queue_limit)" in RULES[name]["expr"], (
            "whatever max_queued is"
        )


def test_kustomize_makes_a_config_map_that_grafana_looks_for_and_keeps_the_rules() -> None:
    wanted = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    [generator] = wanted["configMapGenerator"]
    name, _, file = generator["files"][0].partition("=")
    assert wanted["resources"] == [ALERTS.name]
    assert generator["options"]["labels"] == {"grafana_dashboard": "1"}
    assert generator["options"]["disableNameSuffixHash"] is True
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        assert (FOLDER / file).exists()
        return
    made = subprocess.run([kubectl, "kustomize", str(FOLDER)], capture_output=True, text=True, check=True).stdout
    config_map, rule = sorted(yaml.safe_load_all(made), key=lambda each: each["kind"])
    assert config_map["data"] == {name: (FOLDER / file).read_text()}
    assert config_map["metadata"]["labels"] == {"grafana_dashboard": "1"}
    written = yaml.safe_load(ALERTS.read_text())
    assert rule == {**written, "metadata": {**written["metadata"], "namespace": wanted["namespace"]}}
    assert config_map["metadata"]["namespace"] == wanted["namespace"]

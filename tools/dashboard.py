"""Read the dashboard and the alert rules: panels, rules and queries, for the rendered picture and for the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "k8s" / "observability"
DASHBOARD, ALERTS = FOLDER / "dashboard.json", FOLDER / "alerts.yaml"
RECORDED = ROOT / "tests" / "observability" / "recorded.json.gz"
LABEL_VALUES = re.compile(r"label_values\((?P<selector>[^()]+), (?P<label>\w+)\)")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """All but the headings."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["templating"]["list"]
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """The location of each query, and its text with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']}/{target['refId']}", filled(target["expr"])
    for rule in rules():
        yield rule["alert"], rule["expr"]


def filled(expr: str, rate_interval_s: float = 20.0) -> str:
    """The query as Grafana sends it with all applications selected; its rate interval is four scrapes."""
    text = expr.replace("$__rate_interval", f"{rate_interval_s:g}s")
    for variable in variables():
        text = text.replace(f"${variable['name']}", ".*")
    return text

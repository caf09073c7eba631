"""The dashboard: a strict shape, a tidy grid, and every panel says what it shows and what to do about it."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import jsonschema
import pytest

from deploy.config.args import Limits
from tests.observability.dashboard_schema import DASHBOARD as SCHEMA
from tools.dashboard import DASHBOARD, LABEL_VALUES, dashboard, panels, rules, variables
from tools.promql_syntax import Selector, parse, walk

UNITS = ("s", "percentunit", "reqps", "opm", "none", "short")
WANTED = {
    "traffic": "Tokens",
    "requests": "Requests by how they ended",
    "first token": "Time to first token",
    "inter-token latency": "Inter-token latency",
    "exit layers as a heat map": "Exit layers",
    "layers saved": "Layers saved",
    "acceptance": "Acceptance",
    "tokens that differ from full depth": "Tokens that differ, by mode",
    "judged disagreement": "Judged disagreement, fast",
    "evidence": "Evidence against fast",
    "KV use": "KV use",
    "queue": "Queue",
    "engine state": "Engine state",
    "preemptions": "Preemptions",
    "prefix-cache hits": "Prefix-cache hits",
    "replica count": "Replicas",
}
TITLES = [panel["title"] for panel in panels()]


def by_title(title: str) -> dict[str, Any]:
    return next(panel for panel in panels() if panel["title"] == title)


def test_the_dashboard_holds_nothing_that_grafana_would_ignore() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(dashboard(), SCHEMA)


@pytest.mark.parametrize(
    ("where", "key"), [((), "schemaversion"), (("panels", 1), "Unit"), (("panels", 1, "targets", 0), "exp")]
)
def test_a_key_that_is_misspelt_is_found(where: tuple[Any, ...], key: str) -> None:
    broken = copy.deepcopy(dashboard())
    place = broken
    for step in where:
        place = place[step]
    place[key] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_no_two_panels_share_an_id_or_a_title_and_no_two_queries_of_one_a_name() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(TITLES)) == len(TITLES)
    for panel in panels():
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]


def test_panels_lie_side_by_side_within_24_columns_and_leave_no_hole() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        for cell in itertools.product(columns, range(place["y"], place["y"] + place["h"])):
            assert cell not in taken, f"{panel['title']} lies over {taken.get(cell)}"
            assert cell[0] < 24, f"{panel['title']} is out of the grid"
            taken[cell] = panel["title"]
    height = 1 + max(row for _, row in taken)
    assert len(taken) == 24 * height, "Grafana would move panels up into a hole"


@pytest.mark.parametrize("title", TITLES)
def test_a_panel_says_what_it_shows_and_what_to_do(title: str) -> None:
    shows, _, to_do = by_title(title)["description"].partition(" What to do: ")
    assert len(shows) > 20
    assert shows.endswith(".")
    assert len(to_do) > 40
    assert to_do.endswith(".")


@pytest.mark.parametrize("title", TITLES)
def test_a_panel_has_a_unit_that_grafana_knows(title: str) -> None:
    unit = by_title(title)["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS or re.fullmatch(r"suffix: \S+", unit)


def test_alerts_that_panels_send_to_exist_and_each_is_named_by_a_panel() -> None:
    named = {name for panel in panels() for name in re.findall(r"\bTide[A-Z]\w+", panel["description"])}
    assert named == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize("subject", WANTED)
def test_every_subject_that_was_promised_has_its_panel(subject: str) -> None:
    assert by_title(WANTED[subject])["targets"]


def test_the_exit_layers_are_a_heat_map_of_buckets() -> None:
    panel = by_title("Exit layers")
    assert panel["type"] == "heatmap"
    assert "sum by (le)" in panel["targets"][0]["expr"]


def test_variables_go_from_the_model_to_its_applications_and_deployments() -> None:
    assert [variable["name"] for variable in variables()] == ["datasource", "model", "application", "deployment"]
    for variable, before in zip(variables()[2:], variables()[1:], strict=False):
        assert f"${before['name']}" in variable["query"]["query"], "it lists only what the one before it leaves"
    for variable in variables()[1:]:
        found = LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert found is not None
        assert found["label"] == variable["name"]
        assert variable["definition"] == variable["query"]["query"]


@pytest.mark.parametrize("title", TITLES)
def test_every_query_keeps_to_the_chosen_application(title: str) -> None:
    for target in by_title(title)["targets"]:
        selectors = [node for node in walk(parse(target["expr"].replace("$__rate_interval", "1m")))]
        for selector in selectors:
            if isinstance(selector, Selector):
                assert ("application", "=~", "$application") in selector.matchers


def test_means_are_not_made_of_sums_which_ray_rounds_to_the_middle_of_a_bucket() -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert "_sum{" not in target["expr"], panel["title"]


def test_lines_in_panels_are_where_alerts_begin() -> None:
    texts = {rule["alert"]: rule["expr"] for rule in rules()}
    first, kv = (
        by_title(title)["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for title in ("Time to first token", "KV use")
    )
    assert f'le="{first}"' in texts["TideFirstTokenSlow"]
    assert texts["TideKvExhausted"].endswith(f"> {kv}")
    failed = by_title("Requests failed by us")["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
    assert texts["TideErrorRatio"].endswith(f"> {failed}")
    assert f"> bool {0.5 * Limits().stuck_after_s:g}" in by_title("Engine state")["targets"][0]["expr"]


def test_kubectl_can_keep_the_dashboard_in_an_annotation() -> None:
    assert len(DASHBOARD.read_bytes()) < 200_000, "`kubectl apply` keeps at most 256 KiB"

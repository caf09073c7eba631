"""Every name in dashboard and alerts is one that the service really exports, with the labels it really has.

Twice: against the table in code, by Ray's rules for names, and against text that was scraped from a real run."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from deploy.metrics import BY_NAME, METRICS
from tests.observability.names import OF_EVERY_REPLICA, RARE, exported_by, labels_asked_for, names_of
from tools.dashboard import RECORDED, panels, queries, rules, variables
from tools.promql import Recording
from tools.promql_syntax import Selector, parse, walk

QUERIES = dict(queries())


@pytest.fixture(scope="module")
def recorded() -> dict[str, set[str]]:
    """Names and labels that a real run exported."""
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for series, _ in Recording.read(RECORDED).series:
        labels[series["__name__"]] |= set(series) - {"__name__"}
    return labels


def test_the_recorded_run_exported_the_table_by_the_names_that_are_expected(recorded: dict[str, set[str]]) -> None:
    for metric in METRICS:
        if f"ray_{metric.name}_total" in RARE:
            continue
        for name in exported_by(metric):
            assert name in recorded
            assert recorded[name] >= {*metric.tags, *OF_EVERY_REPLICA}, name
    ours = {name for name in recorded if name.startswith("ray_tide_")}
    assert ours <= {name for metric in METRICS for name in exported_by(metric)}, "and nothing else"


@pytest.mark.parametrize("where", QUERIES)
def test_a_query_asks_for_what_is_exported(where: str, recorded: dict[str, set[str]]) -> None:
    table = {name: metric for metric in METRICS for name in exported_by(metric)}
    names = names_of(QUERIES[where])
    assert names
    for name in names:
        if name.startswith("ray_tide_"):
            assert name in table
        assert name in recorded or name in RARE


@pytest.mark.parametrize("where", QUERIES)
def test_a_query_asks_for_labels_that_its_metrics_have(where: str, recorded: dict[str, set[str]]) -> None:
    asked = labels_asked_for(parse(QUERIES[where]))
    for name, labels in asked.items():
        if name in RARE:
            bare = name.removeprefix("ray_").removesuffix("_total")
            assert labels <= {*BY_NAME[bare].tags, *OF_EVERY_REPLICA}
        else:
            assert labels <= recorded[name], name


def test_legends_name_labels_that_their_queries_keep() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = set(re.search(r"by \(([^)]*)\)", target["expr"])[1].split(", "))  # type: ignore[index]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_variables_list_labels_that_exist(recorded: dict[str, set[str]]) -> None:
    for variable in variables()[1:]:
        assert {variable["name"]} <= recorded["ray_tide_model_layers"]
        assert "ray_tide_model_layers" in variable["query"]["query"]


def test_a_bucket_that_is_named_is_one_of_its_histogram() -> None:
    named = []
    for text in QUERIES.values():
        for node in walk(parse(text)):
            if isinstance(node, Selector):
                named += [(node.name, float(value)) for label, _, value in node.matchers if label == "le"]
    assert named
    for name, bound in named:
        assert bound in BY_NAME[name.removeprefix("ray_").removesuffix("_bucket")].boundaries


def test_ways_to_end_that_are_named_are_errors_of_ours() -> None:
    import deploy.failures
    import tide_core.errors

    texts = [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels() for target in panel["targets"]]
    named = {name for text in texts for names in re.findall(r'finish!~"([^"]*)"', text) for name in names.split("|")}
    assert named == {"RequestError", "DeadlineError", "EngineBusyError"}
    for name in named:
        assert hasattr(deploy.failures, name) or hasattr(tide_core.errors, name)

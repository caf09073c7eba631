"""How metrics are called once Ray has exported them, and which of them a query asks for."""

from __future__ import annotations

from collections import defaultdict

from deploy.metrics import Metric
from tools.promql_syntax import Aggregate, Binary, Node, Selector, parse, walk

OF_EVERY_REPLICA = ("application", "deployment", "replica")
RARE = {
    "ray_tide_non_finite_scores_total": "a router gave no number: never on sound weights",
    "ray_tide_differing_tokens_total": "mode bounded kept a near tie",
    "ray_tide_judged_loss_total": "full depth disagreed with a judged answer of mode fast",
    "ray_tide_judged_dropped_total": "more answers of mode fast waited to be judged than may",
    "ray_tide_artefact_moves_total": "a pointer to a published artefact was moved",
    "ray_tide_ignored_fields_total": "a client sent a field that is not known here",
    "ray_tide_failed_authentications_total": "a call had no known key",
    "ray_tide_preemptions_total": "KV memory ran out",
}
"""Metrics that are not exported before what they tell of has happened."""


def exported_by(metric: Metric) -> list[str]:
    if metric.kind == "counter":
        return [f"ray_{metric.name}_total"]
    if metric.kind == "gauge":
        return [f"ray_{metric.name}"]
    return [f"ray_{metric.name}_{part}" for part in ("bucket", "sum", "count")]


def names_of(text: str) -> set[str]:
    return {node.name for node in walk(parse(text)) if isinstance(node, Selector)}


def labels_asked_for(node: Node, outer: frozenset[str] = frozenset()) -> dict[str, set[str]]:
    """By metric: labels that it is matched by, and that aggregations and joins around it keep."""
    asked: defaultdict[str, set[str]] = defaultdict(set)
    if isinstance(node, Selector):
        asked[node.name] |= outer | {label for label, _, _ in node.matchers}
        return asked
    kept = outer
    if isinstance(node, Aggregate):
        kept = frozenset(node.by)  # what is around it sees no other
        assert outer <= kept, f"{outer - kept} is gone after `by`"
    if isinstance(node, Binary) and node.on is not None:
        kept = outer | frozenset(node.on)
    for child in _children(node):
        for name, labels in labels_asked_for(child, kept).items():
            asked[name] |= labels
    return asked


def _children(node: Node) -> list[Node]:
    if isinstance(node, Binary):
        return [node.left, node.right]
    if isinstance(node, Aggregate):
        return [node.arg]
    return list(getattr(node, "args", ()))

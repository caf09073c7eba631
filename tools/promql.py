"""Evaluate PromQL queries on recorded samples, for the picture of the dashboard and for its tests.

Rates are extrapolated to the window as in Prometheus, so that the picture equals Grafana's.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.promql_syntax import Aggregate, Binary, Call, Node, Number, Selector

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Samples = list[tuple[float, float]]
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else math.nan if left == 0 else math.copysign(math.inf, left),
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
    "max": max,
    "min": min,
    "sum": sum,
}


@dataclass(frozen=True)
class Recording:
    """Series with a value per scrape; None where a series was absent."""

    times: tuple[float, ...]
    series: tuple[tuple[dict[str, str], tuple[float | None, ...]], ...]
    interval_s: float

    @classmethod
    def read(cls, path: Path) -> Recording:
        found = json.loads(gzip.decompress(path.read_bytes()))
        series = tuple((row["labels"], tuple(row["values"])) for row in found["series"])
        return cls(tuple(found["times"]), series, found["interval_s"])

    def evaluate(self, node: Node, at: float) -> Vector | float:
        """The value of a query at one moment: a number, or a vector without empty results."""
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Selector):
            return {_key(labels): samples[-1][1] for labels, samples in self._select(node, at, keep=1)}
        if isinstance(node, Call):
            return self._call(node, at)
        if isinstance(node, Aggregate):
            groups: defaultdict[Labels, list[float]] = defaultdict(list)
            for labels, value in self.vector(node.arg, at).items():
                groups[tuple(pair for pair in labels if pair[0] in node.by)].append(value)
            return {labels: REDUCTIONS[node.op](values) for labels, values in groups.items()}
        return _binary(node, self.evaluate(node.left, at), self.evaluate(node.right, at))

    def vector(self, node: Node, at: float) -> Vector:
        found = self.evaluate(node, at)
        return found if isinstance(found, dict) else {(): found}

    def _select(self, node: Selector, at: float, keep: int | None = None) -> Iterable[tuple[dict[str, str], Samples]]:
        """Matching series with their samples in the window, or as of the last scrape if there is no window."""
        end = at - node.offset_s
        indices = [index for index, time in enumerate(self.times) if time <= end + 1e-6]
        if node.range_s is not None:
            indices = [index for index in indices if self.times[index] > end - node.range_s]
        elif keep is not None:
            indices = indices[-keep:]
        for labels, values in self.series:
            if labels["__name__"] == node.name and all(_matches(labels, matcher) for matcher in node.matchers):
                found = [(index, values[index]) for index in indices]
                samples = [(self.times[index], value) for index, value in found if value is not None]
                if samples:
                    yield labels, samples

    def _call(self, node: Call, at: float) -> Vector:
        if node.function == "histogram_quantile":
            return _quantiles(_number(self.evaluate(node.args[0], at)), self.vector(node.args[1], at))
        if node.function in ("abs", "clamp_min", "absent"):
            values = self.vector(node.args[0], at)
            if node.function == "absent":
                return {} if values else {(): 1.0}
            least = _number(self.evaluate(node.args[1], at)) if node.function == "clamp_min" else 0.0
            change = abs if node.function == "abs" else lambda value: max(value, least)
            return {_unnamed(labels): change(value) for labels, value in values.items()}
        selector = node.args[0]
        assert isinstance(selector, Selector)
        assert selector.range_s is not None
        end, result = at - selector.offset_s, {}
        for labels, samples in self._select(selector, at):
            value = _over_time(node.function, samples, end - selector.range_s, end)
            if value is not None:
                result[_unnamed(_key(labels))] = value
        return result


def _over_time(function: str, samples: Samples, start: float, end: float) -> float | None:
    values = [value for _, value in samples]
    if function == "avg_over_time":
        return sum(values) / len(values)
    if function == "max_over_time":
        return max(values)
    if len(samples) < 2:
        return None
    if function == "deriv":
        return _slope(samples)
    gained = _increase(samples, start, end)
    return gained / (end - start) if function == "rate" else gained


def _increase(samples: Samples, start: float, end: float) -> float:
    """The increase extrapolated to the window: not below zero, and at most half a step beyond the series' ends."""
    first, last = samples[0], samples[-1]
    gained = last[1] - first[1]
    for (_, before), (_, after) in itertools.pairwise(samples):
        gained += before if after < before else 0.0  # the counter was reset
    sampled = last[0] - first[0]
    step = sampled / (len(samples) - 1)
    to_start, to_end = first[0] - start, end - last[0]
    to_start = to_start if to_start < step * 1.1 else step / 2
    to_end = to_end if to_end < step * 1.1 else step / 2
    if gained > 0 and first[1] >= 0:
        to_start = min(to_start, sampled * first[1] / gained)
    return gained * (sampled + to_start + to_end) / sampled


def _slope(samples: Samples) -> float:
    mean_time = sum(time for time, _ in samples) / len(samples)
    mean_value = sum(value for _, value in samples) / len(samples)
    over = sum((time - mean_time) * (value - mean_value) for time, value in samples)
    return over / sum((time - mean_time) ** 2 for time, _ in samples)


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    groups: defaultdict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        rest = tuple(pair for pair in labels if pair[0] not in ("le", "__name__"))
        groups[rest].append((float(dict(labels)["le"].replace("+Inf", "inf")), count))
    return {labels: _quantile(quantile, sorted(group)) for labels, group in groups.items()}


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    total = buckets[-1][1]
    if total == 0:
        return math.nan
    rank, lower, below = quantile * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * ((rank - below) / (count - below) if count > below else 1.0)
        lower, below = bound, count
    return lower


def _binary(node: Binary, left: Vector | float, right: Vector | float) -> Vector | float:
    if not isinstance(left, dict) and not isinstance(right, dict):
        return _apply(node, left, right) or 0.0
    if isinstance(left, dict) and isinstance(right, dict):
        return _join(node, left, right)
    result = {}
    for labels, value in (left if isinstance(left, dict) else right if isinstance(right, dict) else {}).items():
        pair = (value, right) if isinstance(left, dict) else (left, value)
        found = _apply(node, _number(pair[0]), _number(pair[1]))
        if found is not None:
            keeps_name = node.op in COMPARISONS and not node.as_bool
            result[labels if keeps_name else _unnamed(labels)] = value if keeps_name else found
    return result


def _join(node: Binary, left: Vector, right: Vector) -> Vector:
    def match(labels: Labels) -> Labels:
        return _unnamed(labels) if node.on is None else tuple(pair for pair in labels if pair[0] in node.on)

    others = {match(labels): value for labels, value in right.items()}
    ours = {match(labels) for labels in left}
    if node.op == "or":
        return {**{labels: value for labels, value in right.items() if match(labels) not in ours}, **left}
    if node.op in ("and", "unless"):
        return {labels: value for labels, value in left.items() if (match(labels) in others) == (node.op == "and")}
    result: Vector = {}
    for labels, value in left.items():
        key = match(labels)
        if key not in others:
            continue
        if key in result:
            raise ValueError(f"several series on the left have {key}")
        found = _apply(node, value, others[key])
        if found is not None:
            result[key] = found
    if len(others) != len(right):
        raise ValueError("several series on the right have the same labels")
    return result


def _apply(node: Binary, left: float, right: float) -> float | None:
    """None if a comparison drops the sample."""
    if node.op in ARITHMETIC:
        return ARITHMETIC[node.op](left, right)
    holds = COMPARISONS[node.op](left, right)
    return float(holds) if node.as_bool else left if holds else None


def _matches(labels: dict[str, str], matcher: tuple[str, str, str]) -> bool:
    name, op, wanted = matcher
    value = labels.get(name, "")
    if op in ("=", "!="):
        return (value == wanted) == (op == "=")
    return (re.fullmatch(wanted, value) is not None) == (op == "=~")


def _key(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _unnamed(labels: Labels) -> Labels:
    return tuple(pair for pair in labels if pair[0] != "__name__")


def _number(value: Vector | float) -> float:
    assert not isinstance(value, dict)
    return value

"""The small PromQL of the tools: what is wrong is refused, and what is right gives Prometheus' numbers."""

from __future__ import annotations

import math

import pytest

from tools.promql import Recording, Vector
from tools.promql_syntax import SyntaxProblemError, parse, seconds

A = (("host", "a"),)
B = (("host", "b"),)


def recording(**series: list[float | None]) -> Recording:
    """Scraped every 10 s; `name_host` gives name and host."""
    rows = []
    for name, values in series.items():
        metric, _, host = name.partition("_")
        rows.append(({"__name__": metric, **({"host": host} if host else {})}, tuple(values)))
    length = max(len(values) for values in series.values())
    return Recording(tuple(10.0 * index for index in range(length)), tuple(rows), 10.0)


def at_end(text: str, **series: list[float | None]) -> Vector:
    found = recording(**series)
    return found.vector(parse(text), found.times[-1])


@pytest.mark.parametrize(
    "text",
    [
        "sum(x",
        "sum x)",
        "rate(x)",
        "rate(x[5m]",
        "rate(x[5])",
        "rates(x[5m])",
        "abs(x[5m])",
        "histogram_quantile(x, 0.5)",
        "histogram_quantile(0.5)",
        'x{a="b"',
        'x{a=~"("}',
        "x{a=b}",
        'x{a="b" c="d"}',
        "x + ",
        "x y",
        "x > bool",
        "sum by a (x)",
        "x @ 5",
        "",
    ],
)
def test_what_is_no_query_is_refused(text: str) -> None:
    with pytest.raises(SyntaxProblemError):
        parse(text)


@pytest.mark.parametrize(("text", "expected"), [("0s", 0), ("15s", 15), ("2m", 120), ("1h30m", 5400), ("1d", 86400)])
def test_durations_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["5", "5x", "m5", "-5m", "", "1.5m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(SyntaxProblemError):
        seconds(text)


def test_products_bind_before_sums_before_comparisons_before_and_before_or() -> None:
    assert parse("a + b * c > d and e or f") == parse("((((a + (b * c)) > d) and e) or f)")
    assert parse("a - b - c") == parse("(a - b) - c")


def test_a_rate_is_extrapolated_to_its_window_as_prometheus_does() -> None:
    rising: list[float | None] = [100.0, 110.0, 120.0, 130.0]
    assert at_end("rate(x[30s])", x=rising) == {(): pytest.approx(1.0)}, "10 s short of the window: filled"
    assert at_end("increase(x[25s])", x=rising) == {(): pytest.approx(25.0)}
    assert at_end("increase(x[1h])", x=rising) == {(): pytest.approx(35.0)}, "half a step beyond the first sample"


def test_a_rate_does_not_reach_below_zero_and_survives_a_counter_that_begins_anew() -> None:
    assert at_end("increase(x[1h])", x=[0.0, 10.0, 20.0]) == {(): pytest.approx(20.0)}, "it began at zero"
    assert at_end("increase(x[30s])", x=[0.0, 10.0, 2.0, 12.0]) == {(): pytest.approx(18.0)}, "12 in 20 s"
    assert at_end("rate(x[1m])", x=[None, None, 5.0]) == {}, "one sample is no rate"


def test_a_counter_that_begins_above_zero_hides_its_first_gain() -> None:
    """Why no alert rests on `increase` of a rare counter alone."""
    assert at_end("increase(x[1h])", x=[None, 1.0, 1.0, 1.0]) == {(): 0.0}


def test_a_quantile_is_interpolated_inside_its_bucket() -> None:
    rows = [("0.1", 10.0), ("0.5", 30.0), ("+Inf", 40.0)]
    series = tuple(({"__name__": "x_bucket", "le": bound}, (count,)) for bound, count in rows)
    found = Recording((0.0,), series, 10.0)
    for quantile, expected in ((0.25, 0.1), (0.5, 0.3), (0.75, 0.5), (0.99, 0.5)):
        [value] = found.vector(parse(f"histogram_quantile({quantile}, sum by (le) (x_bucket))"), 0.0).values()
        assert value == pytest.approx(expected)


def test_a_quantile_of_nothing_is_no_number() -> None:
    found = Recording((0.0,), (({"__name__": "x_bucket", "le": "+Inf"}, (0.0,)),), 10.0)
    [value] = found.vector(parse("histogram_quantile(0.5, x_bucket)"), 0.0).values()
    assert math.isnan(value)


def test_series_meet_those_with_the_same_labels() -> None:
    both = {"x_a": [6.0], "x_b": [8.0], "y_a": [3.0]}
    assert at_end("sum by (host) (x) / sum by (host) (y)", **both) == {A: 2.0}
    assert at_end("x > on(host) y", **both) == {A: 6.0}
    assert at_end("sum by (host) (x) and sum by (host) (y)", **both) == {A: 6.0}
    assert at_end("sum by (host) (x) unless sum by (host) (y)", **both) == {B: 8.0}
    assert at_end("sum by (host) (y) or sum by (host) (x)", **both) == {A: 3.0, B: 8.0}
    assert at_end("2 * max by (host) (y) + count by (host) (y > bool 5)", **both) == {A: 7.0}


def test_comparisons_leave_out_or_say_so() -> None:
    assert at_end("x > 5", x=[6.0]) == {(("__name__", "x"),): 6.0}
    assert at_end("x > 6", x=[6.0]) == {}
    assert at_end("x > bool 6", x=[6.0]) == {(): 0.0}
    assert at_end("abs(x - 10) > 3", x=[6.0]) == {(): 4.0}
    assert at_end("x > 0.5 * 60", x=[31.0]) == {(("__name__", "x"),): 31.0}


def test_what_is_gone_is_absent_and_still_in_a_window() -> None:
    gone: list[float | None] = [1.0, 1.0, None]
    assert at_end("x", x=gone) == {}
    assert at_end("absent(x)", x=gone) == {(): 1.0}
    assert at_end("absent(max_over_time(x[1m]))", x=gone) == {}
    assert at_end("max_over_time(x[1m])", x=gone) == {(): 1.0}


def test_labels_are_matched_whole_and_a_missing_one_is_empty() -> None:
    two = {"x_ab": [1.0], "x_b": [2.0]}
    assert set(at_end('x{host=~"b|c"}', **two).values()) == {2.0}
    assert set(at_end('x{host!~"b"}', **two).values()) == {1.0}
    assert set(at_end('x{zone="", host!="b"}', **two).values()) == {1.0}


def test_a_slope_and_a_mean_are_over_the_window() -> None:
    values: list[float | None] = [9.0, 0.0, 2.0, 4.0]
    assert at_end("deriv(x[25s])", x=values) == {(): pytest.approx(0.2)}
    assert at_end("avg_over_time(x[25s])", x=values) == {(): pytest.approx(2.0)}
    assert at_end("clamp_min(x, 5)", x=values) == {(): 5.0}

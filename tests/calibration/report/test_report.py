"""The report: its text, its plots, its data, with and without matplotlib."""

from __future__ import annotations

import builtins
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.calibration.risk.traces_factory import made_candidate, trace_of
from tide_core.calibration.report.data import (
    Measured,
    PartSize,
    ReportData,
    TrainingPoint,
    candidate_curves,
    reliability,
)
from tide_core.calibration.report.report import CAPTIONS, add_measured, render_report, report_text
from tide_core.calibration.risk.costs import CostModel, predict_speedups
from tide_core.calibration.risk.decide import choose_fast, plan_candidates, plan_drafts, threshold_grid, verdict_lines
from tide_core.calibration.risk.simulate import acceptance_by_distance, pack
from tide_core.calibration.risk.traces import CandidateTraces
from tide_core.errors import ConfigError

COSTS = CostModel(shallow=0.1, head=0.05, deep=0.9)


def made_report() -> ReportData:
    candidates = [
        made_candidate("2:block", 2, "block", num=200, skill=0.85),
        made_candidate("2:affine", 2, "affine", num=200, skill=0.6),
        made_candidate("5:block", 5, "block", num=200, skill=0.9),
    ]
    plans = plan_candidates(candidates, {candidate.name: COSTS for candidate in candidates}, max_drafts=4)
    chosen = plans[0]
    speedups = predict_speedups(chosen.counts, COSTS, (1, 8, 64))
    best = next(candidate for candidate in candidates if candidate.name == chosen.name)
    traces = pack(best.sequences)
    drafting = {"draft_threshold": chosen.draft_threshold, "max_drafts": chosen.max_drafts}
    by_name = {plan.name: plan for plan in plans}
    return ReportData(
        model="tiny|llama",
        architecture="LlamaForCausalLM",
        num_layers=30,
        width=64,
        vocab_size=384,
        weights_digest="a" * 64,
        tokenizer_digest="b" * 64,
        tool_version="0.1.0",
        command="tide calibrate --model tiny",
        settings={"seed": 0, "data": "self", "shortlist_size": None},
        parts=(PartSize("train", 9000, 1_000_000, "c" * 64), PartSize("test", 200, 10_000, "d" * 64)),
        shortlist_size=200,
        shortlist_coverage=0.975,
        candidates=tuple(candidate_curves(candidate, by_name[candidate.name]) for candidate in candidates),
        chosen=best.name,
        acceptance=acceptance_by_distance(traces, **drafting),
        tokens_per_deep_pass=chosen.counts.tokens_per_deep_pass,
        fast=choose_fast(traces, layer=best.layer, num_layers=30, max_drafts=chosen.max_drafts),
        predicted=speedups,
        reliability=reliability(best),
        verdict=verdict_lines(chosen, speedups),
    )


@pytest.fixture(scope="module")
def data() -> ReportData:
    return made_report()


@pytest.fixture(scope="module")
def files(data: ReportData) -> dict[str, bytes]:
    pytest.importorskip("matplotlib")
    return render_report(data)


def test_the_report_states_model_data_tables_verdict_and_how_to_repeat_it(
    data: ReportData, files: dict[str, bytes]
) -> None:
    text = files["report.md"].decode()
    for expected in (
        "# Calibration of tiny|llama",
        "tiny\\|llama",
        "a" * 64,
        "| train | 9,000 | 1,000,000 |",
        "c" * 64,
        "200 tokens, 97.5% of those emitted",
        f"**{data.verdict[0]}**",
        f"**{data.chosen}**",
        f"of 30 layers a token, {data.fast.coverage:.1%} exits" if data.fast else "",
        f"| 8 | ×{data.predicted[8]:.2f} |",
        "nothing was timed yet",
        "| seed | `0` |",
        "```\ntide calibrate --model tiny\n```",
    ):
        assert expected in text
    assert all(f"]({name})" in text for name in CAPTIONS)


def test_the_report_shows_what_the_minutes_of_training_brought(data: ReportData) -> None:
    points = (TrainingPoint(400, 1.04, 1.731), TrainingPoint(800, None, 2.0))
    text = report_text(replace(data, curve=points))
    assert "| 400 | 1.0 | 1.73 |\n| 800 | – | 2.00 |" in text
    assert "## Training" not in report_text(data), "a run of an earlier version"


def test_every_plot_is_a_small_picture_with_labelled_axes(data: ReportData, files: dict[str, bytes]) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert set(files) == {"report.md", "report.json", *CAPTIONS}
    for name in CAPTIONS:
        assert len(files[name]) <= 60_000, name
        pixels = image.imread(io.BytesIO(files[name]))
        assert pixels.shape[0] > 200
        assert pixels.shape[1] > 400
        assert np.median(pixels[..., :3]) == 1.0, "a light background"


def test_axes_have_labels_with_units(data: ReportData) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from tide_core.calibration.report.plots import PLOTS

    measured = add_measured(data, Measured({1: 1.5}, "a machine"))
    for name, (draw, _) in PLOTS.items():
        axes = figure.Figure().add_subplot()
        draw(axes, measured)
        assert axes.get_xlabel(), name
        assert axes.get_ylabel(), name
        assert axes.has_data(), name


def test_the_threshold_of_fast_is_marked_on_the_curve(data: ReportData) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from tide_core.calibration.report.plots import PLOTS

    axes = figure.Figure().add_subplot()
    PLOTS["precision_coverage.png"][0](axes, data)
    assert [text.get_text() for text in axes.texts] == ["fast"]


def test_the_same_data_gives_the_same_bytes(data: ReportData, files: dict[str, bytes]) -> None:
    assert render_report(data) == files


def test_measured_speedups_join_the_predicted_ones(data: ReportData) -> None:
    timed = add_measured(data, Measured({1: 1.71, 16: 1.2}, "one GPU, median of 3", "batch 8 (90 s)"))
    files = render_report(timed)
    text = files["report.md"].decode()
    assert "| 1 | " in text
    assert "×1.71 |" in text
    assert "| 16 |  | ×1.20 |" in text
    assert "Measured 1: one GPU, median of 3. Left out: batch 8 (90 s)." in text
    assert "nothing was timed yet" not in text
    [measured] = json.loads(files["report.json"])["measured"]
    assert measured["speedups"] == {"1": 1.71, "16": 1.2}


def test_the_verdict_compares_measured_with_predicted(data: ReportData) -> None:
    timed = add_measured(data, Measured({1: 1.71, 16: 1.2}, "one GPU", "batch 8 (90 s)"))

    expected = f"measured here: x1.71 at batch 1 (predicted x{data.predicted[1]:.2f}), x1.20 at batch 16"
    assert timed.verdict == (*data.verdict, f"{expected}; left out: batch 8 (90 s)")
    assert f"{expected}; left out: batch 8 (90 s)  \n" in render_report(timed)["report.md"].decode()


def test_a_measurement_of_nothing_has_a_reason(data: ReportData) -> None:
    timed = add_measured(data, Measured({}, "one GPU", "a step takes 9 s"))

    assert timed.verdict[-1] == "measured here: nothing; left out: a step takes 9 s"
    assert "speedup.png" in render_report(timed)


def test_without_matplotlib_the_report_has_no_plots_and_a_note(
    data: ReportData, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    files = render_report(data)
    assert set(files) == {"report.md", "report.json"}
    assert "None: matplotlib is not installed here." in files["report.md"].decode()


def test_a_model_whose_exits_do_not_pay_has_a_report_too(data: ReportData) -> None:
    empty = replace(data, fast=None, reliability=(), acceptance=(0.0, math.nan))
    files = render_report(empty)
    assert "reliability.png" not in files
    assert "the mode is not offered" in files["report.md"].decode()


def test_numbers_that_are_none_are_null_in_the_data(data: ReportData) -> None:
    document = json.loads(replace(data, acceptance=(0.5, math.nan)).to_json(), parse_constant=pytest.fail)
    assert document["acceptance"] == [0.5, None]
    assert document["format_version"] == 1


@pytest.mark.parametrize("speedups", [{0: 1.5}, {1: 0.0}, {1: math.inf}, {1: math.nan}])
def test_measurements_that_are_none_are_refused(data: ReportData, speedups: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="measured speed-up at batch"):
        add_measured(data, Measured(speedups, ""))


# the numbers


def test_coverage_and_precision_are_shares_at_distance_1() -> None:
    on_the_grid = threshold_grid()[100]
    scores = [0.95, on_the_grid, 0.6, math.nan]
    trace = trace_of([[1, 0, 1, 1], [0, 0, 0, 0]], [scores, [0.99] * 4])
    candidate = CandidateTraces("2:block", 2, "block", [trace])
    curves = candidate_curves(candidate, plan_drafts(candidate, COSTS))
    assert on_the_grid in curves.thresholds
    for threshold, coverage, precision in zip(curves.thresholds, curves.coverage, curves.precision, strict=True):
        reached = [right for score, right in zip(scores, (1, 0, 1, 1), strict=True) if score >= threshold]
        assert coverage == len(reached) / 4
        assert precision == pytest.approx(sum(reached) / len(reached)) if reached else math.isnan(precision)
    assert curves.agreement == (0.75, 0.0)


def test_reliability_puts_positions_of_similar_score_together() -> None:
    trace = trace_of([[1, 0, 1, 1, 1]], [[0.05, 0.01, 0.97, 1.0, math.nan]])
    bins = reliability(CandidateTraces("2:block", 2, "block", [trace]))
    assert [(entry.num_positions, entry.agreement) for entry in bins] == [(2, 0.5), (2, 1.0)]
    assert [entry.score for entry in bins] == pytest.approx([0.03, 0.985])

"""Costs, predicted speed-ups, the choice of a candidate, the verdict, and the point for mode fast."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from tests.calibration.risk.traces_factory import made_candidate, made_traces, trace_of
from tests.calibration.train.heads import tiny_adapter
from tide_core.calibration.risk.costs import (
    RIDGE_TOKENS,
    CostModel,
    MeasuredCosts,
    costs_of,
    draft_share,
    predict_speedup,
    predict_speedups,
    prior_speedup,
)
from tide_core.calibration.risk.decide import (
    BATCH_SIZES,
    DraftPlan,
    choose_fast,
    cycle_speedups,
    measure_fast,
    measure_plan,
    plan_candidates,
    plan_drafts,
    verdict_lines,
)
from tide_core.calibration.risk.simulate import pack, simulate_all
from tide_core.calibration.risk.traces import SequenceTrace
from tide_core.calibration.train.candidates import CandidateSpec, make_candidate
from tide_core.errors import ConfigError

CHEAP = CostModel(shallow=0.1, head=0.05, deep=0.9)
RIDGE = "tide_core.calibration.risk.costs.RIDGE_TOKENS"
DEAR = CostModel(shallow=0.8, head=0.3, deep=0.2)


def priced(trace: SequenceTrace, costs: CostModel, *, draft_threshold: float, max_drafts: int) -> float:
    """Speed-up of one row, by running its cycles and paying for each pass as it is made."""
    start, cost, length = 0, 0.0, trace.agree.shape[1]
    while start < length:
        drafts = 0
        while drafts < max_drafts and start + drafts < length:
            cost += costs.draft_of(1)
            if trace.score[drafts, start + drafts] < draft_threshold:
                break
            drafts += 1
        else:
            cost += costs.shallow_of(1)  # the last draft has to go through the shallow layers too
        cost += costs.deep_of(drafts + 1)
        right = next((m for m in range(drafts) if not trace.agree[m, start + m]), drafts)
        start += right + 1
    return length * costs.full_of(1) / cost


@pytest.mark.parametrize("ridge_tokens", [2, RIDGE_TOKENS])
@pytest.mark.parametrize("max_drafts", [1, 3, 4])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8, 2.0])
def test_the_predicted_speedup_of_one_row_is_that_of_paying_pass_by_pass(
    threshold: float, max_drafts: int, ridge_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RIDGE, ridge_tokens)
    for costs in (CHEAP, DEAR):
        for trace in made_traces(5, 40, seed=2):
            counts = simulate_all(pack([trace]), draft_threshold=threshold, max_drafts=max_drafts).total()
            expected = priced(trace, costs, draft_threshold=threshold, max_drafts=max_drafts)
            assert predict_speedup(counts, costs) == pytest.approx(expected, rel=1e-12)


def test_a_perfect_head_has_the_speedup_of_the_formula() -> None:
    # Always right, always sure: every cycle is k drafts and one token more, at k drafts and a full pass.
    trace = trace_of([[1] * 40] * 4, [[0.99] * 40] * 4)
    counts = simulate_all(pack([trace]), draft_threshold=0.5, max_drafts=4).total()
    expected = 5 / (4 * draft_share(CHEAP) + 1.0)
    assert predict_speedup(counts, CHEAP) == pytest.approx(expected)


def test_rows_of_a_batch_wait_for_the_one_that_drafts_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RIDGE, 10**9)  # tokens are free, only passes cost
    counts = simulate_all(pack(made_traces(50, 60)), draft_threshold=0.7, max_drafts=4).total()
    by_batch = predict_speedups(counts, CHEAP, (1, 2, 8, 1000))
    assert list(by_batch.values()) == sorted(by_batch.values(), reverse=True)
    every_pass = 4 * CHEAP.draft_of(1) + CHEAP.shallow_of(1) + CHEAP.deep_of(1)
    assert by_batch[1000] == pytest.approx(counts.tokens_per_deep_pass * CHEAP.full_of(1) / every_pass)


def test_where_arithmetic_sets_the_time_drafts_that_fail_are_dear() -> None:
    counts = simulate_all(pack(made_traces(50, 60, skill=0.6)), draft_threshold=0.0, max_drafts=4).total()
    assert predict_speedup(counts, CHEAP, 1024) < 1.0 < predict_speedup(counts, CHEAP, 1)


def test_a_walk_without_cycles_is_as_fast_as_full_depth() -> None:
    counts = simulate_all(pack([trace_of([[]], [[]])]), draft_threshold=0.5, max_drafts=1).total()
    assert predict_speedup(counts, CHEAP) == 1.0


def test_costs_are_parameters_read() -> None:
    adapter = tiny_adapter()
    spec = CandidateSpec.parse("1:affine")
    candidate = make_candidate(adapter, spec, max_distance=3, bottleneck=8, seed=0)
    costs = costs_of(candidate, adapter, shortlist_size=10)
    width = candidate.head.spec.width
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in adapter.layers]
    own = [*candidate.head.parameters(), *candidate.router.parameters()]
    assert costs.shallow_of(1) == layers[0]
    assert costs.draft_of(1) == layers[0] + sum(parameter.numel() for parameter in own) + 10 * width
    assert costs.full_of(1) == sum(layers) + adapter.vocab_size * width


def test_measured_costs_are_on_the_line_between_measurements_and_per_token_beyond() -> None:
    costs = MeasuredCosts((1, 9), (0.1, 0.1), (0.2, 0.4), (1.0, 2.0))
    assert costs.draft_of(1) == 0.2
    assert costs.draft_of(5) == pytest.approx(0.3)
    assert costs.full_of(18) == pytest.approx(4.0)
    assert costs.deep_of(9) == pytest.approx(1.9)
    assert draft_share(costs) == pytest.approx(0.2)


def test_before_training_a_cheaper_draft_predicts_a_higher_speed_and_none_less_than_full_depth() -> None:
    speeds = [prior_speedup(CostModel(0.03, head, 0.97), 5) for head in (0.01, 0.05, 0.5, 5.0)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 2.0
    assert speeds[-1] == 1.0
    # Four drafts of which 70 % are right: 1 + .7 + .49 + .343 + .2401 tokens for 4 drafts and a pass.
    assert prior_speedup(CostModel(0.0, 0.1, 1.0), 4) == pytest.approx(2.7731 / 1.4)


def test_from_the_ridge_on_a_pass_costs_in_proportion_to_its_tokens() -> None:
    assert CHEAP.deep_of(0.5) == CHEAP.deep_of(1) == CHEAP.deep_of(RIDGE_TOKENS) == 0.9
    assert CHEAP.deep_of(1.5 * RIDGE_TOKENS) == pytest.approx(1.5 * 0.9)
    assert CHEAP.full_of(10 * RIDGE_TOKENS) == pytest.approx(10.0)


def test_the_plan_is_the_best_of_the_whole_grid() -> None:
    candidate = made_candidate(skill=0.7)
    plan = plan_drafts(candidate, CHEAP, draft_thresholds=(0.0, 0.4, 0.8))
    packed = pack(candidate.sequences)
    tried = {
        (threshold, drafts): predict_speedup(
            simulate_all(packed, draft_threshold=threshold, max_drafts=drafts).total(), CHEAP
        )
        for threshold in (0.0, 0.4, 0.8)
        for drafts in (1, 2, 3, 4)
    }
    assert plan.speedup == max(tried.values())
    assert tried[plan.draft_threshold, plan.max_drafts] == plan.speedup
    assert measure_plan(plan, packed) == plan.counts


def test_where_every_planned_draft_is_made_the_best_number_of_them_is_predicted_and_never_a_loss() -> None:
    packed = pack(made_candidate(skill=0.6).sequences)
    found = cycle_speedups(packed, CHEAP, 4)
    each = [simulate_all(packed, draft_threshold=0.0, max_drafts=drafts).total() for drafts in (1, 2, 3, 4)]
    assert found[1] == max(predict_speedup(counts, CHEAP) for counts in each)
    assert found[1] <= plan_drafts(made_candidate(skill=0.6), CHEAP).speedup, "stopping at a low score is never worse"
    assert min(cycle_speedups(packed, DEAR, 4).values()) == 1.0


def test_a_shallow_exit_that_is_right_less_often_can_beat_a_deep_one() -> None:
    shallow, deep = made_candidate(skill=0.7), made_candidate("8:affine", 8, "affine", skill=0.9)
    plans = plan_candidates([deep, shallow], {shallow.name: CHEAP, deep.name: DEAR}, max_drafts=4)
    assert [plan.name for plan in plans] == ["2:block", "8:affine"]
    assert plans[0].speedup > 1.3


def test_more_drafts_than_asked_for_are_not_planned() -> None:
    candidate = made_candidate(skill=0.95)
    assert plan_drafts(candidate, CHEAP).max_drafts == 4
    assert plan_drafts(candidate, CHEAP, limit=2).max_drafts == 2


def test_the_verdict_names_the_gain_at_each_batch_size() -> None:
    candidate = made_candidate(skill=0.9)
    plan = plan_drafts(candidate, CHEAP)
    speedups = predict_speedups(plan.counts, CHEAP, (1, 8, 4096))
    first, second, third = verdict_lines(plan, speedups)
    assert first == f"exits pay: predicted x{speedups[1]:.2f} at batch 1, x{speedups[8]:.2f} at batch 8"
    assert second.startswith("block head after layer 2, up to ")
    assert third == "no gain predicted at batch 4096: `full` is as fast or faster there"


def test_the_verdict_names_exits_that_will_not_pay() -> None:
    candidate = made_candidate(skill=0.3)
    plan = plan_drafts(candidate, DEAR)
    first, second = verdict_lines(plan, predict_speedups(plan.counts, DEAR, BATCH_SIZES))
    assert first == "exits will not pay on this model, serve it in `full`"
    assert "is predicted x" in second


def test_a_gain_of_exactly_nothing_does_not_pay() -> None:
    candidate = made_candidate()
    plan = plan_drafts(candidate, CHEAP)
    assert verdict_lines(plan, {1: 1.0})[0].startswith("exits will not pay")


def test_a_candidate_without_costs_is_refused() -> None:
    with pytest.raises(ConfigError, match="a cost model for every candidate"):
        plan_candidates([made_candidate()], {}, max_drafts=4)
    with pytest.raises(ConfigError, match="at least one candidate"):
        plan_candidates([], {}, max_drafts=4)


def test_fast_takes_the_loosest_threshold_within_its_limit() -> None:
    traces = pack(made_traces(80, 60, skill=0.8))
    point = choose_fast(traces, layer=2, num_layers=30, max_drafts=4)
    assert point is not None
    grid = [i / 50 for i in range(50)]
    coarse = choose_fast(traces, layer=2, num_layers=30, max_drafts=4, grid=grid)
    fitting = [t for t in grid if measure_fast(traces, t, layer=2, num_layers=30, max_drafts=4).disagreement <= 0.05]
    assert coarse is not None
    assert coarse.threshold == min(fitting)
    assert point.disagreement <= 0.05
    tighter = choose_fast(traces, layer=2, num_layers=30, max_drafts=4, max_disagreement=0.01)
    assert tighter is not None
    assert tighter.threshold > point.threshold
    assert tighter.layers_per_token > point.layers_per_token > 2
    json.dumps(asdict(point))


def test_fast_counts_layers_of_what_left_and_what_ran_deep() -> None:
    # 0 and 1 leave (1 wrongly), 2 runs deep, 3 scores too little, 4 leaves.
    trace = trace_of([[1, 0, 0, 1, 1], [0, 0, 1, 0, 0]], [[0.9, 0.0, 0.0, 0.2, 0.9], [0.0, 0.9, 0.0, 0.0, 0.0]])
    point = measure_fast(pack([trace]), 0.5, layer=2, num_layers=10, max_drafts=2)
    assert (point.coverage, point.disagreement) == (0.6, 0.2)
    assert point.layers_per_token == pytest.approx((3 * 2 + 2 * 10) / 5)


def test_fast_is_not_offered_where_nothing_may_leave() -> None:
    traces = made_traces(20, 30)
    for trace in traces:
        trace.agree[:] = False
        trace.score[:] = 0.999
    assert choose_fast(pack(traces), layer=2, num_layers=30, max_drafts=4) is None
    for trace in traces:
        trace.score[:] = np.nan
    assert choose_fast(pack(traces), layer=2, num_layers=30, max_drafts=4) is None


def test_a_plan_is_plain_numbers() -> None:
    plan = plan_drafts(made_candidate(), CHEAP, draft_thresholds=(0.5,))
    assert isinstance(plan, DraftPlan)
    json.dumps(asdict(plan))

"""Draws on tensors alone against the sampler and the rejection rule, which decide on the host."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.draw_cases import cycle_of, logits_of, numbers_of, params_of, settings_of
from tests.sampling.chances import token_probabilities
from tide_core.exits import verify
from tide_core.exits.row_cycle import FROM_SUFFIX, Draft
from tide_core.exits.verify import Target, rejects
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference.draw import DrawnCycle
from tide_core.request import SamplingParams
from tide_core.sampling.draw import ACCEPT_STREAM, RESIDUAL_STREAM
from tide_core.sampling.draw import draw as inverse_cdf
from tide_core.sampling.rows import SamplingRow
from tide_core.sampling.weights import token_weights

V = 1000
SHORTLIST = torch.arange(0, V, 3)


def sampled(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Steps 6 to 11 of the sampler, with a number of our choice."""
    if params.is_greedy:
        return int(logits.argmax())
    return int(inverse_cdf(token_weights(logits.unsqueeze(0), [params]), [number]))


def widened(logits: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*logits.shape[:-1], V), -torch.inf)
    wide[..., SHORTLIST] = logits
    return wide


@pytest.mark.parametrize("width", [1, 2, 7, 300, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_a_draw_is_that_of_the_sampler(width: int, ties: bool) -> None:
    params = params_of(44)
    logits, numbers = logits_of(1, 44, width, ties=ties), numbers_of(2, 44)
    tokens, heads = draw_plan.draw(logits, settings_of(params), numbers, width)
    assert tokens.tolist() == [
        sampled(row, one, number) for row, one, number in zip(logits, params, numbers.tolist(), strict=True)
    ]
    assert heads[:, draw_plan.BEST].tolist() == logits.amax(-1).tolist()


def test_a_draw_over_a_shortlist_is_that_over_a_vocabulary_where_nothing_else_can_come() -> None:
    params = params_of(44)
    logits, numbers = logits_of(3, 44, len(SHORTLIST)), numbers_of(4, 44)
    places, _ = draw_plan.draw(logits, settings_of(params), numbers, V)
    for token, row, one, number in zip(
        SHORTLIST[places].tolist(), widened(logits), params, numbers.tolist(), strict=True
    ):
        assert token == sampled(row, one, number)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_says_so_and_names_a_token_that_exists(bad: float) -> None:
    logits = logits_of(5, 3, 50)
    logits[1] = bad
    tokens, heads = draw_plan.draw(logits, settings_of([SamplingParams(temperature=0.8)] * 3), numbers_of(6, 3), 50)
    assert torch.equal(heads[1, draw_plan.BEST], torch.tensor(bad, dtype=torch.float64)) or math.isnan(bad)
    assert not math.isfinite(heads[1, draw_plan.BEST])
    assert tokens[1] == 0
    assert heads[[0, 2], draw_plan.TOTAL].gt(0).all()


def verdict(
    logits: torch.Tensor, cycle: DrawnCycle, token: int, params: SamplingParams, monkey: pytest.MonkeyPatch
) -> int:
    """What `verify` makes of a draft, with the numbers of the cycle."""
    rows = cycle.settings.shape[1]
    source = int(cycle.sources[token])
    ahead, r = divmod(source, rows)
    row = SamplingRow(params, 0, (), (), ())
    target = Target(token_probabilities(logits[token], row), row)
    proposal = token_probabilities(widened(cycle.draft_logits[ahead, r]), row)
    by_stream = {ACCEPT_STREAM: float(cycle.accept[ahead, r])}
    monkey.setattr(verify, "uniform", lambda seed, step, stream: by_stream.get(stream, float(cycle.residual[ahead, r])))
    draft = int(cycle.draft_ids[ahead, r])
    verdict = rejects(Draft(draft, 0, 1.0, proposal), logits[token], target)
    return draft if verdict.agrees else verdict.instead.token_id


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("ties", [False, True])
def test_drafts_are_judged_by_the_rejection_rule_of_the_engine(
    seed: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of(33)
    counts = sorted((r % 4 for r in range(33)), reverse=True)
    logits, cycle = cycle_of(seed, params, counts, SHORTLIST, V, ties=ties)
    best, tokens = draw_plan.verify_drawn(logits, cycle)
    assert best[:-2].tolist() == logits[:-2].amax(-1).tolist()
    stayed = replaced = token = 0
    for r, count in enumerate(counts):
        for ahead in range(count + 1):
            if params[r].is_greedy:
                expected = int(logits[token].argmax())
            elif ahead == count:
                expected = sampled(logits[token], params[r], float(cycle.plain[ahead, r]))
            else:
                expected = verdict(logits, cycle, token, params[r], monkeypatch)
                stays = expected == int(cycle.draft_ids[ahead, r])
                stayed, replaced = stayed + stays, replaced + (not stays)
            assert tokens[token] == expected
            token += 1
    assert stayed > 5
    assert replaced > 5
    assert tokens[-2:].tolist() == best[-2:].tolist() == [0, 0], "space that belongs to no row"


@pytest.mark.parametrize(("score", "least"), [(math.nan, -math.inf), (math.inf, -math.inf), (0.2, 0.5)])
def test_from_the_first_score_that_is_too_low_or_no_number_on_drafts_were_not_made(score: float, least: float) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.9)] * 6
    logits, cycle = cycle_of(21, params, [3] * 6, SHORTLIST, V, least=least)
    cycle.scores.fill_(0.9)
    _, sound = draw_plan.verify_drawn(logits, cycle)
    cycle.scores[1, 2] = score
    _, tokens = draw_plan.verify_drawn(logits, cycle)
    plain = [sampled(logits[2 * 4 + ahead], params[0], float(cycle.plain[ahead, 2])) for ahead in (1, 2)]
    assert tokens[2 * 4 + 1 : 2 * 4 + 3].tolist() == plain
    changed = torch.nonzero(tokens != sound).flatten().tolist()
    assert set(changed) <= {2 * 4 + 1, 2 * 4 + 2}
    assert changed, "the numbers of the case tell a plain draw from a verdict draft"


def test_a_draft_that_is_rejected_never_comes_back() -> None:
    params = [SamplingParams(temperature=0.9)] * 40
    logits, cycle = cycle_of(31, params, [2] * 40, SHORTLIST, V)
    tokens = cycle.draft_ids.T.flatten()  # of each row in turn
    deep = torch.arange(120).reshape(40, 3)[:, :2].flatten()
    logits[deep, tokens] = -30.0  # full depth all but excludes every draft
    _, found = draw_plan.verify_drawn(logits, cycle)
    assert (found[deep] != tokens).all()


def test_a_suffix_draft_is_judged_as_one_whose_chance_was_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95)] * 40
    logits, cycle = cycle_of(51, params, [2] * 40, SHORTLIST, V)
    cycle = cycle._replace(draft_logits=cycle.draft_logits[:0])
    cycle.draft_heads.zero_()
    _, tokens = draw_plan.verify_drawn(logits, cycle)
    stayed = 0
    for r in range(40):
        for ahead in range(2):
            token, draft = 3 * r + ahead, int(cycle.draft_ids[ahead, r])
            numbers = {ACCEPT_STREAM: float(cycle.accept[ahead, r]), RESIDUAL_STREAM: float(cycle.residual[ahead, r])}
            monkeypatch.setattr(verify, "uniform", lambda seed, step, stream, numbers=numbers: numbers[stream])
            row = SamplingRow(params[r], 0, (), (), ())
            target = Target(token_probabilities(logits[token], row), row)
            said = rejects(Draft(draft, FROM_SUFFIX, None), logits[token], target)
            assert tokens[token] == (draft if said.agrees else said.instead.token_id)
            stayed += said.agrees
    assert 5 < stayed < 75


def test_without_drafts_every_row_draws_plainly() -> None:
    params = params_of(11)
    logits, cycle = cycle_of(41, params, [0] * 11, SHORTLIST, V)
    _, tokens = draw_plan.verify_drawn(logits, cycle)
    numbers = cycle.plain[0].tolist()
    assert tokens[:-2].tolist() == [
        sampled(row, one, number) for row, one, number in zip(logits[:-2], params, numbers, strict=True)
    ]

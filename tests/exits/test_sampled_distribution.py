"""Drafts that are drawn at random leave the distribution of full depth as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import easy_model, exit_parts
from tests.factories import random_prompts
from tests.sampling.chances import token_probabilities
from tide_core.batch import ExitPolicy
from tide_core.engine.core import EngineCore
from tide_core.exits.policy import resolve_policy
from tide_core.exits.row_cycle import Draft
from tide_core.exits.verify import Target, rejects
from tide_core.request import Request, SamplingParams
from tide_core.sampling.draw import DRAFT_STREAM, draw, uniform
from tide_core.sampling.rows import SamplingRow

NUM_DRAWS = 4_000
LEAST_P = 0.001
[PROMPT] = random_prompts(1, 9)


def chi_square_p(observed: Counter[Any], expected: dict[Any, float]) -> float:
    """p-value of the counts under the probabilities; cells expected less than 8 times are taken together."""
    total = observed.total()
    statistic, cells, rest_seen, rest_due = 0.0, 0, 0, 0.0
    for outcome, probability in expected.items():
        due = probability * total
        if due < 8:
            rest_seen, rest_due = rest_seen + observed[outcome], rest_due + due
            continue
        statistic += (observed[outcome] - due) ** 2 / due
        cells += 1
    rest_seen += sum(count for outcome, count in observed.items() if outcome not in expected)
    if rest_due >= 1:
        statistic += (rest_seen - rest_due) ** 2 / rest_due
        cells += 1
    elif rest_seen > 10 * (1 + rest_due):
        return 0.0  # outcomes that cannot come
    freedom = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def exact(params: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, from the library's forward and the sampler's own filters."""
    model = easy_model()

    def grow(prefix: tuple[int, ...], mass: float) -> dict[tuple[int, ...], float]:
        if len(prefix) == num_tokens:
            return {prefix: mass}
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *prefix]])).logits[0, -1]
        row = SamplingRow(params, 0, PROMPT, prefix, ())
        found: dict[tuple[int, ...], float] = {}
        chances = token_probabilities(logits, row)
        for token in chances.nonzero().squeeze(-1).tolist():
            found |= grow((*prefix, token), mass * float(chances[token]))
        return found

    return grow((), 1.0)


def run_all(
    core: EngineCore, params: SamplingParams, policy: ExitPolicy, num_draws: int = NUM_DRAWS
) -> Counter[tuple[int, ...]]:
    texts: dict[str, list[int]] = {}
    for seed in range(num_draws):
        core.add(Request(str(seed), tuple(PROMPT), params, seed=seed, policy=policy))
    while core.has_work:
        for output in core.step():
            assert output.error is None
            texts.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    return Counter(tuple(text) for text in texts.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 4},
        {"top_k": 6, "top_p": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.7},
    ],
    ids=["top_k", "penalties"],
)
def test_verified_samples_have_the_distribution_of_full_depth(changes: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, ignore_eos=True, mode="verified", **changes)
    parts = exit_parts(drafts=2, max_rows=256, max_batch_tokens=1024, artefact={"draft_threshold": 0.0})
    policy = resolve_policy(params, parts.checkpoints, 4)
    observed = run_all(parts.core, params, policy)
    assert parts.core.exits.drafts > NUM_DRAWS, "drafts there were"
    assert 0.2 < parts.core.exits.accepted / parts.core.exits.drafts < 0.98, "and some were rejected"
    assert chi_square_p(observed, exact(params, 3)) > LEAST_P


def test_the_test_would_see_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting every draft gives the exit's distribution, and the same test finds it."""
    from tide_core.exits import verify

    always = verify.Verdict(True, verify.SampledToken(0))
    monkeypatch.setattr(verify, "rejects", lambda *arguments: always)
    params = SamplingParams(max_tokens=3, temperature=0.8, ignore_eos=True, mode="verified", top_k=4)
    parts = exit_parts(drafts=2, max_rows=256, max_batch_tokens=1024, artefact={"draft_threshold": 0.0})
    observed = run_all(parts.core, params, resolve_policy(params, parts.checkpoints, 4), NUM_DRAWS // 2)
    assert chi_square_p(observed, exact(params, 3)) < LEAST_P


@pytest.mark.parametrize("overlap", ["near", "far", "apart"])
def test_the_rejection_rule_turns_any_draft_distribution_into_that_of_full_depth(overlap: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, generator=generator)
    params = SamplingParams(temperature=0.8)
    target = token_probabilities(logits, SamplingRow(params, 0, (), (), ()))
    noise = {"near": 0.1, "far": 3.0, "apart": 0.0}[overlap]
    proposal = (logits.double() / 0.8 + noise * torch.randn(8, generator=generator).double()).softmax(-1)
    if overlap == "apart":
        proposal = torch.zeros(8, dtype=torch.float64)
        proposal[int(target.argmin())] = 1.0
    weights = (proposal * 2**40).long().unsqueeze(0)
    observed: Counter[int] = Counter()
    for seed in range(NUM_DRAWS):
        row = SamplingRow(params, seed, (), (), ())
        drafted = int(draw(weights, [uniform(seed, 0, DRAFT_STREAM)])[0])
        verdict = rejects(Draft(drafted, 0, 1.0, proposal), logits, Target(target, row))
        observed[drafted if verdict.agrees else verdict.instead.token_id] += 1
    assert chi_square_p(observed, dict(enumerate(target.tolist()))) > LEAST_P

"""Mode bounded on whole engines: every answer keeps its budget, judged by the library's own forward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, easy_model, exit_engine, exit_parts, ids, poisoned
from tests.factories import make_engine, make_parts, random_prompts
from tests.kernels.twin import engine_kernels
from tide_core.engine import assemble
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import RequestError
from tide_core.execution.graphs import branches
from tide_core.request import Audit, FinishReason, SamplingParams

PROMPTS = random_prompts(6, 11)
HARD: dict[str, Any] = {"share": 0.3, "artefact": {"kind": "identity", "draft_threshold": 0.0}}
"""An exit that is wrong now and then."""
WIDE = {"epsilon": 0.3, "margin": 0.4}
ROUNDING = 1e-4


@pytest.fixture(params=["plain", "cycles"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the plain path, and in cycles that run in one go, where the CUDA kernels' twin stands in."""
    if request.param == "cycles":
        monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return str(request.param)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "mode": "bounded", **changes})


def gaps_by_library(prompt: list[int], answer: Completion) -> list[float]:
    """By how many nats the library's forward finds its own choice likelier than each token of an answer."""
    tokens = [*prompt, *ids(answer)]
    with torch.inference_mode():
        of_places = easy_model(share=0.3)(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = of_places.gather(1, torch.tensor(ids(answer)).unsqueeze(1)).squeeze(1)
    return (of_places.max(-1).values - chosen).tolist()


def check(prompt: list[int], answer: Completion, epsilon: float, margin: float, rounding: float = ROUNDING) -> int:
    """The budget holds at every moment and each token says what the library finds; returns how many differ."""
    num = 0
    for place, (token, gap) in enumerate(zip(answer.tokens, gaps_by_library(prompt, answer), strict=True)):
        if token.gap is None:
            assert gap <= rounding
            assert token.audit is Audit.VERIFIED
        else:
            num += 1
            assert token.gap == pytest.approx(gap, abs=rounding)
            assert token.gap <= margin
            assert token.audit is Audit.DISAGREED
        assert num <= epsilon * (place + 1)
    assert answer.usage is not None
    assert answer.usage.num_differing == num
    return num


@pytest.mark.parametrize(("epsilon", "margin"), [(0.3, 0.4), (0.05, 0.2), (0.9, 3.0)])
def test_every_answer_keeps_its_budget_and_each_difference_its_margin(epsilon: float, margin: float) -> None:
    with exit_engine(**HARD) as engine:
        verified = engine.generate(PROMPTS, params(mode="verified"))
        got = engine.generate(PROMPTS, params(epsilon=epsilon, margin=margin))
        stats = engine.stats()
    num = sum(check(prompt, answer, epsilon, margin) for prompt, answer in zip(PROMPTS, got, strict=True))
    assert num > 0
    assert stats.exits["audits"]["disagreed"] == num
    assert {token.mode for answer in got for token in answer.tokens} == {"bounded"}
    assert not stats.audits, "nothing is left to audit"
    passes = [sum(answer.usage.deep_passes for answer in some if answer.usage) for some in (got, verified)]
    assert passes[0] < passes[1]


def test_a_budget_that_never_allows_anything_is_verified() -> None:
    with exit_engine(**HARD) as engine:
        verified = engine.generate(PROMPTS, params(mode="verified"))
        for tight in ({"epsilon": 1e-3, "margin": 9.0}, {"epsilon": 0.9, "margin": 1e-9}):
            got = engine.generate(PROMPTS, params(**tight))
            assert all_ids(got) == all_ids(verified)
            assert [a.usage.deep_passes for a in got if a.usage] == [a.usage.deep_passes for a in verified if a.usage]
            assert all(token.gap is None for answer in got for token in answer.tokens)


def test_the_budget_is_as_documented_where_none_is_named() -> None:
    with exit_engine() as engine:
        budget = engine.make_request(PROMPTS[0], params()).policy.budget
        assert budget is not None
        assert (budget.epsilon, budget.margin) == (0.05, 0.2)
        named = engine.make_request(PROMPTS[0], params(margin=1.5, threshold=0.3)).policy
        assert named.budget is not None
        assert (named.budget.epsilon, named.budget.margin, named.draft_thresholds) == (0.05, 1.5, (0.3,))


@pytest.mark.parametrize("field", ["epsilon", "margin"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_budget_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        params(**{field: value})
    with pytest.raises(RequestError, match=f"{field}.*mode bounded( or fast)? with it"):
        SamplingParams(**{field: 0.5}, mode="verified")  # type: ignore[arg-type]


def test_an_epsilon_of_one_bounds_nothing() -> None:
    with pytest.raises(RequestError, match="below 1"):
        params(epsilon=1.0)


def test_a_sampled_request_is_verified() -> None:
    with exit_engine(**HARD) as engine:
        got = engine.generate(PROMPTS, params(temperature=0.8, seed=1, **WIDE))
        verified = engine.generate(PROMPTS, params(temperature=0.8, seed=1, mode="verified"))
    assert {token.mode for answer in got for token in answer.tokens} == {"verified"}
    assert all_ids(got) == all_ids(verified)


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.2}, {"logit_bias": {383: 0.5}}, {"frequency_penalty": 0.4}]
)
def test_a_gap_is_one_of_the_logits_that_full_depth_chooses_by(changes: dict[str, Any]) -> None:
    """With penalties the log-probability stays the model's own."""
    with exit_engine(**HARD) as engine:
        got = engine.generate(PROMPTS, params(**WIDE, **changes, logprobs=0))
        again = engine.generate(PROMPTS, params(epsilon=0.3, margin=1e-9, **changes))
        verified = engine.generate(PROMPTS, params(mode="verified", **changes))
    assert all_ids(again) == all_ids(verified)
    kept = [token for answer in got for token in answer.tokens if token.gap is not None]
    assert kept
    assert all(0.0 <= token.gap <= WIDE["margin"] for token in kept if token.gap is not None)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        tokens = torch.tensor([[*prompt, *ids(answer)]])
        with torch.inference_mode():
            of_places = easy_model(share=0.3)(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for place, token in enumerate(answer.tokens):
            assert token.logprob == pytest.approx(float(of_places[place, token.token_id]), abs=ROUNDING)


def test_preempted_rows_come_back_with_what_they_have_spent() -> None:
    tiny = {**HARD, "kv_memory_gib": 12 * 4 * 2 * (12 + 12) * 16 * 4 / 2**30, "prefix_caching": False}
    with poisoned(exit_parts(**tiny)) as engine:
        got = engine.generate(PROMPTS, params(**WIDE))
        assert engine.stats().num_preemptions > 0
    assert sum(check(prompt, answer, **WIDE) for prompt, answer in zip(PROMPTS, got, strict=True)) > 10


def test_only_tokens_that_are_emitted_count() -> None:
    """An answer that a stop id, a stop string or its length ends within a cycle reports the differences before."""
    with exit_engine(**HARD) as engine:
        whole = engine.generate(PROMPTS, params(**WIDE))
        for prompt, answer in zip(PROMPTS, whole, strict=True):
            for place, token in enumerate(answer.tokens):
                if token.gap is None:
                    continue
                for ends in ({"max_tokens": place}, {"max_tokens": place + 1}, {"stop_ids": (token.token_id,)}):
                    [cut] = engine.generate([prompt], params(**{**WIDE, **ends}))
                    check(prompt, cut, **WIDE)
                break
        [cut] = engine.generate([PROMPTS[0]], params(**WIDE, stop=(whole[0].text[5:7],)))
        assert cut.finish_reason is FinishReason.STOP
        check(PROMPTS[0], cut, **WIDE)


def test_an_answer_that_is_aborted_reports_what_it_emitted() -> None:
    with exit_engine(**HARD) as engine:
        for prompt in PROMPTS:
            seen, last = [], None
            for output in engine.stream_blocking(prompt, params(**WIDE, max_tokens=200), request_id="r"):
                seen += output.tokens
                last = output
                if len(seen) > 30:
                    engine.abort("r")
            assert last is not None
            assert last.usage is not None
            assert last.usage.num_differing == sum(token.gap is not None for token in seen)
            assert last.usage.output_tokens >= len(seen) > 30


def test_rows_of_other_modes_and_budgets_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_BRANCHES", 1)  # a row that runs nearly alone has another chance at its draft
    kinds: list[dict[str, Any]] = [
        {**WIDE},
        {"mode": "verified"},
        {"epsilon": 0.05},
        {"mode": "full"},
        {"temperature": 0.7, "seed": 5},
        {"epsilon": 0.9, "margin": 3.0},
    ]
    with exit_engine(**HARD) as engine:
        asked = [params(**kind) for kind in kinds]
        together = engine.generate(PROMPTS, asked)
        alone = [engine.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, asked, strict=True)]
    assert all_ids(together) == all_ids(alone)
    for index in (0, 2, 5):
        check(PROMPTS[index], together[index], kinds[index]["epsilon"], kinds[index].get("margin", 0.2))


def suffix_engine() -> Engine:
    """Without an artefact, with text that repeats itself."""
    parts = dataclasses.replace(make_parts(suffix_drafts=True), suffix_drafts=True)
    return Engine.from_parts(parts)


def test_without_an_artefact_it_is_refused_unless_there_are_suffix_drafts() -> None:
    with make_engine() as engine, pytest.raises(RequestError, match="no artefact"):
        engine.make_request(PROMPTS[0], params())
    with suffix_engine() as engine:
        policy = engine.make_request(PROMPTS[0], params()).policy
        assert (policy.mode, policy.may_exit) == ("bounded", False)
        assert policy.budget is not None

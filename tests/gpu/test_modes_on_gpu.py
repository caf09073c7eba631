"""Exits on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_engine, exit_layers, exit_parts
from tests.engine.test_bounded import HARD, check
from tests.engine.test_faults import wait_until
from tests.factories import random_prompts
from tide_core.engine.engine import Engine
from tide_core.evaluation.full_depth import FullDepth
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts(4, 11)


def answers(mode: str, **settings: Any) -> list[Any]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, mode=mode)
    with exit_engine(device="cuda", **settings) as engine:
        return engine.generate(PROMPTS, params)


@pytest.mark.parametrize("artefact", [{}, {"kind": "block"}, {"kind": "block", "layers": (1, 2)}], ids=str)
def test_verified_equals_full_depth(artefact: dict[str, Any]) -> None:
    got = answers("verified", artefact=artefact)
    assert all_ids(got) == all_ids(answers("full"))


def test_drafts_are_accepted() -> None:
    got = answers("verified")
    assert max(answer.usage.tokens_per_deep_pass for answer in got) > 1.3


@pytest.mark.parametrize("mode", ["bounded", "fast"])
def test_tokens_leave_early_and_every_request_ends(mode: str) -> None:
    got = answers(mode, artefact={"draft_threshold": 0.0})
    assert all(len(answer.tokens) == 24 and answer.error is None for answer in got)
    assert 1 in {layer for answer in got for layer in exit_layers(answer)}


LADDER: dict[str, Any] = {"kind": "mlp", "taps": (2, 3), "fast_layers": (2, 3), "draft_threshold": 0.0}


def test_with_several_exits_fast_gives_the_tokens_of_plain_torch() -> None:
    """In float32, on the same device: tokens and where they left; modes beside it equal full depth, in graphs."""
    found = []
    for kernels in ("auto", "reference"):
        with exit_engine(device="cuda", artefact=LADDER, kernels=kernels) as engine:
            fast = SamplingParams(max_tokens=24, ignore_eos=True, mode="fast", threshold=0.45)
            modes = [fast, replace(fast, mode="verified", threshold=None), replace(fast, mode="full", threshold=None)]
            found.append(engine.generate(PROMPTS * 3, [params for params in modes for _ in PROMPTS]))
    ours, plain = found
    num = len(PROMPTS)
    assert all_ids(ours) == all_ids(plain)
    assert [exit_layers(answer) for answer in ours[:num]] == [exit_layers(answer) for answer in plain[:num]]
    assert len({layer for answer in ours[:num] for layer in exit_layers(answer)}) >= 3
    assert all_ids(ours[num : 2 * num]) == all_ids(ours[2 * num :])


def test_the_judge_finds_on_a_gpu_what_full_depth_would_have_chosen() -> None:
    parts = exit_parts(device="cuda", artefact={"draft_threshold": 0.0}, audit_share=1.0)
    with Engine.from_parts(parts) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True, mode="fast", threshold=0.0)
        got = engine.generate(PROMPTS, params)
        wait_until(lambda: sum(each.num_answers for each in engine.stats().audits) == len(PROMPTS))
        [audit] = engine.stats().audits
        judge = FullDepth(parts.runner.adapter, parts.kernels)
        losses = []
        for prompt, answer in zip(PROMPTS, got, strict=True):
            agreed = judge.score(prompt, all_ids([answer])[0]).agreed(all_ids([answer])[0])
            losses.append(min(0.5, agreed.count(False) / len(agreed)))
    assert audit.mean_loss == pytest.approx(sum(losses) / len(losses))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("mode", ["full", "verified", "fast"])
def test_the_kernels_give_the_tokens_of_plain_torch(mode: str, family: str) -> None:
    """In float32, on the same device: tokens, and where they left unless drafts are checked and no router is asked."""
    settings: dict[str, Any] = {"family": family, "artefact": {"draft_threshold": 0.3}}
    ours, plain = answers(mode, **settings), answers(mode, kernels="reference", **settings)
    assert all_ids(ours) == all_ids(plain)
    if mode != "verified":
        assert [exit_layers(answer) for answer in ours] == [exit_layers(answer) for answer in plain]


@pytest.mark.parametrize(("epsilon", "margin"), [(0.05, 0.2), (0.3, 0.4), (0.9, 3.0)])
def test_every_answer_of_bounded_keeps_its_budget_by_the_librarys_forward(epsilon: float, margin: float) -> None:
    """The drafts of cycles are others than those of the plain path, and so are the near ties that are kept."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, mode="bounded", epsilon=epsilon, margin=margin)
    with exit_engine(device="cuda", **HARD) as engine:
        got = engine.generate(PROMPTS, params)
    assert sum(check(prompt, answer, epsilon, margin, 1e-3) for prompt, answer in zip(PROMPTS, got, strict=True))


def test_a_budget_that_never_allows_anything_is_verified() -> None:
    tight = SamplingParams(max_tokens=60, ignore_eos=True, mode="bounded", epsilon=1e-3, margin=9.0)
    with exit_engine(device="cuda", **HARD) as engine:
        verified = engine.generate(PROMPTS, replace(tight, mode="verified", epsilon=None, margin=None))
        assert all_ids(engine.generate(PROMPTS, tight)) == all_ids(verified)


def test_a_cost_table_is_measured_and_planned_by() -> None:
    got = answers("verified", drafts=None)
    assert all_ids(got) == all_ids(answers("full"))

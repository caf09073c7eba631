"""Heads whose deep state has taps: what the engine feeds them with is what calibration trained them on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_engine, exit_parts, poisoned
from tests.factories import random_prompts
from tests.tiny_models import tiny_model
from tide_core.calibration.train.chain import features_by_distance
from tide_core.exits.artefact.router import confidence_of
from tide_core.request import SamplingParams

ARTEFACT = {"kind": "block", "taps": (2, 3)}
NARROW = {**ARTEFACT, "sizes": (("inner", 20),)}
PROMPTS = random_prompts(4, 9)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def scores_by_calibration(parts: Any, tokens: list[int]) -> list[float]:
    """What the router says of every position at distance 1, from the library's own states and the training code."""
    exits, adapter = parts.runner.exits, parts.runner.adapter
    checkpoint = exits.checkpoints[0]
    model = copy.deepcopy(tiny_model("llama"))  # the library leaves its hooks on what it is asked for states
    out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    head = checkpoint.head
    deep = head.deep_state(out.hidden_states[-1], [out.hidden_states[tap] for tap in head.spec.taps])
    features = features_by_distance(head, out.hidden_states[checkpoint.layer], deep, [1])[1]
    logits = exits._narrow_head(adapter.norm(features))
    scores: list[float] = checkpoint.router.score(features, confidence_of(logits)).tolist()
    return scores


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("artefact", [ARTEFACT, NARROW], ids=["wide", "narrow"])
def test_the_engine_drafts_by_the_scores_that_calibration_measures(artefact: dict[str, Any], kernels: str) -> None:
    parts = exit_parts(easy=False, artefact=artefact, drafts=1, kernels=kernels)
    with poisoned(parts) as engine:
        answers = engine.generate(PROMPTS, GREEDY)
    compared = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [token.token_id for token in answer.tokens]
        expected = scores_by_calibration(parts, [*prompt, *ids])
        for place, token in enumerate(answer.tokens):
            if token.score is not None and place:  # the first follows a prompt that has run in the same step
                assert token.score == pytest.approx(expected[len(prompt) + place - 1], abs=1e-4)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("sizes", [(), (("inner", 20),)], ids=["wide", "narrow"])
@pytest.mark.parametrize("layers", [(1,), (1, 2)], ids=str)
def test_verified_equals_full_depth(layers: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> None:
    artefact = {"kind": "block", "layers": layers, "taps": (3,), "draft_threshold": 0.0, "sizes": sizes}
    with exit_engine(easy=True, artefact=artefact) as engine:
        drafted = engine.generate(PROMPTS, GREEDY)
        full = engine.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True, mode="full"))
    assert all_ids(drafted) == all_ids(full)


def test_fast_leaves_early_with_taps_too() -> None:
    with exit_engine(easy=True, artefact=ARTEFACT) as engine:
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True, mode="fast", threshold=0.0))
    assert all(len(answer.tokens) == 16 for answer in answers)
    assert any(token.exit_layer == 1 for answer in answers for token in answer.tokens)


def test_a_narrow_heads_tokens_take_less_of_the_pool() -> None:
    """The deep state and K and V of the head shrink with it; the blocks that fit in the memory grow in number."""
    settings = {"easy": False, "kv_memory_gib": 2**-12}
    wide, narrow = (exit_parts(artefact=artefact, **settings) for artefact in (ARTEFACT, NARROW))
    assert [pool.shape[1] for pool in wide.runner.cache.deep_states] == [48]
    assert [pool.shape[1] for pool in narrow.runner.cache.deep_states] == [20]
    assert narrow.runner.cache.num_blocks > wide.runner.cache.num_blocks

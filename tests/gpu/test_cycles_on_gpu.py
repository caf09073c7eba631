"""Whole cycles as graphs: a replay gives the tokens of the same passes op by op, and those of full depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import random_prompts
from tide_core.engine.assemble import Parts
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.kernels import CudaKernels
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
HEAD = (("head_size", 16), ("num_heads", 4), ("num_kv_heads", 2))
BLOCK = {"kind": "block", "taps": (2, 3), "sizes": HEAD, "draft_threshold": 0.0}
GREEDY = {"max_tokens": 24, "ignore_eos": True}


def cycle_parts(artefact: dict[str, Any], *, capture: bool, dtype: str = "bfloat16", easy: bool = False) -> Parts:
    parts = exit_parts("qwen3", easy=easy, artefact=artefact, device="cuda", dtype=dtype, max_rows=8)
    runner = parts.runner
    assert runner.cycles is not None, "cycles of such a model are captured"
    assert isinstance(runner.kernels, CudaKernels)
    if not capture:
        parts_of_it = runner.adapter, runner.cache, runner.kernels, runner.exits
        runner.cycles = GraphCycles(*parts_of_it, capture=False)
    return parts


@pytest.mark.parametrize("artefact", [BLOCK, {"kind": "mlp", "draft_threshold": 0.0}], ids=["block", "mlp"])
@pytest.mark.parametrize("mode", ["full", "verified", "bounded"])
@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_a_replayed_cycle_gives_the_tokens_of_its_passes_op_by_op(
    artefact: dict[str, Any], mode: str, num_rows: int
) -> None:
    budget = {"epsilon": 0.3, "margin": 1.0} if mode == "bounded" else {}
    answers, params = [], SamplingParams(**GREEDY, mode=mode, **budget)
    for capture in (False, True):
        with poisoned(cycle_parts(artefact, capture=capture)) as engine:
            answers.append(engine.generate(random_prompts(num_rows, 11), params))
            again = engine.generate(random_prompts(num_rows, 11), params)  # every cycle is a replay now
        assert all_ids(again) == all_ids(answers[-1])
    plain, replayed = answers
    assert all_ids(replayed) == all_ids(plain)
    assert [exit_layers(answer) for answer in replayed] == [exit_layers(answer) for answer in plain]
    for one, other in zip(replayed, plain, strict=True):
        assert [token.gap for token in one.tokens] == [token.gap for token in other.tokens]
        for token, twin in zip(one.tokens, other.tokens, strict=True):
            assert token.score == (None if twin.score is None else pytest.approx(twin.score, abs=1e-3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_are_accepted_and_the_tokens_are_those_of_full_depth(dtype: str) -> None:
    prompts = random_prompts(5, 11)
    with poisoned(cycle_parts({}, capture=True, dtype=dtype, easy=True)) as engine:
        full = engine.generate(prompts, SamplingParams(**GREEDY, mode="full"))
        verified = engine.generate(prompts, SamplingParams(**GREEDY))
    assert all_ids(verified) == all_ids(full)
    assert max(answer.usage.tokens_per_deep_pass for answer in verified) > 1.3


def test_a_cycle_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = cycle_parts(BLOCK, capture=True)
    waits: list[str] = []
    with poisoned(parts) as engine:
        engine.generate(random_prompts(2, 11), SamplingParams(**GREEDY))
        wait = torch.cuda.Stream.synchronize
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: (waits.append("stream"), wait(self)))
        before = engine.stats().num_steps
        monkeypatch.setattr(torch.Tensor, "item", lambda self: waits.append("item"))
        engine.generate(random_prompts(2, 11), SamplingParams(**GREEDY))
        steps = engine.stats().num_steps - before
    assert "item" not in waits
    assert len(waits) <= steps

"""Prompts as graphs: the result of a prompt does not depend on how it was cut, nor on what ran next to it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_parts, poisoned
from tests.factories import random_prompts
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Completion
from tide_core.execution.graphs.prompts import GraphPrompts
from tide_core.kernels import CudaKernels
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
HEAD = (("head_size", 16), ("num_heads", 4), ("num_kv_heads", 2))
BLOCK = {"kind": "block", "taps": (2, 3), "sizes": HEAD, "draft_threshold": 0.0}
FIRST = SamplingParams(max_tokens=1, logprobs=5)
"""The model's own distribution after the prompt: it would show any bit that differs."""


def prompt_parts(*, capture: bool = True, dtype: str = "bfloat16", **settings: Any) -> Parts:
    chosen = {"max_rows": 20, "max_batch_tokens": 512, "prefix_caching": False, "kv_memory_gib": 0.05, **settings}
    parts = exit_parts("qwen3", easy=False, artefact=BLOCK, device="cuda", dtype=dtype, **chosen)
    runner = parts.runner
    assert isinstance(runner.kernels, CudaKernels)
    assert runner.prompts is not None, "prompts of such a model are captured"
    if not capture:
        runner._prompts = GraphPrompts(runner.adapter, runner.cache, runner.kernels, runner.exits, capture=False)
    return parts


def tokens_of(answers: list[Completion]) -> list[list[tuple[int, float | None]]]:
    return [[(token.token_id, token.logprob) for token in answer.tokens] for answer in answers]


@pytest.mark.parametrize("params", [FIRST, SamplingParams(max_tokens=24, ignore_eos=True)], ids=["first", "greedy"])
def test_a_replayed_prompt_is_what_its_pass_gives_op_by_op(params: SamplingParams) -> None:
    prompts = [*random_prompts(3, 11), random_prompts(1, 120)[0], random_prompts(1, 230)[0]]
    answers = []
    for capture in (False, True):
        with poisoned(prompt_parts(capture=capture)) as engine:
            answers.append(engine.generate(prompts, params))
            assert tokens_of(engine.generate(prompts, params)) == tokens_of(answers[-1])  # every pass is a replay now
    assert tokens_of(answers[0]) == tokens_of(answers[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bits_of_a_prompt_do_not_depend_on_its_pieces_nor_on_its_mates(dtype: str) -> None:
    prompts = [random_prompts(1, 250)[0], *random_prompts(18, 13), random_prompts(1, 77)[0]]
    with poisoned(prompt_parts(dtype=dtype)) as engine:
        together = tokens_of(engine.generate(prompts, FIRST))
        alone = [tokens_of(engine.generate([prompt], FIRST))[0] for prompt in prompts]
    assert together == alone
    for budget in (20, 61, 128):
        with poisoned(prompt_parts(dtype=dtype, max_batch_tokens=budget)) as engine:
            assert tokens_of(engine.generate(prompts, FIRST)) == alone


def test_drafts_behind_a_prompt_are_accepted_as_if_it_had_run_alone() -> None:
    prompts = [*random_prompts(4, 33), random_prompts(1, 140)[0]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with poisoned(prompt_parts()) as engine:
        full = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, mode="full"))
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert all_ids(together) == all_ids(full) == all_ids(alone)

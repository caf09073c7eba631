"""Rows that try several first drafts at once; on the CPU, with the CUDA kernels' twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_parts, poisoned
from tests.factories import random_prompts
from tests.kernels.twin import engine_kernels, twin_kernels
from tide_core.engine import assemble
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import branches, in_flight
from tide_core.execution.graphs.branches import MAX_TOKENS, SPARE_BLOCKS, Branches, branches_for
from tide_core.execution.graphs.choice import Greedy
from tide_core.execution.graphs.cycle_output import OutputBuffer
from tide_core.kernels.reference.branches import Claims
from tide_core.kernels.reference.cycle import IF_RIGHT, MOST_ROWS, plan_cycle, sizes, split
from tide_core.kv.cache import KVLayout, PagedKV
from tide_core.request import SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3)}
HARDER = 0.3
GREEDY: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(autouse=True)
def on_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())


@pytest.fixture
def brought_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The branches that were right, but for the first ones."""
    seen: list[int] = []
    branch_of = in_flight.branch_of

    def counted(right: int, tried: Sequence[int]) -> int:
        branch = branch_of(right, tried)
        seen.extend([branch] if branch else [])
        return branch

    monkeypatch.setattr(in_flight, "branch_of", counted)
    return seen


def generate(num_rows: int, *, most: int, **params: Any) -> list[Completion]:
    """With at most so many branches, by an identity head that is right now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "MAX_BRANCHES", most)
        with poisoned(exit_parts(share=HARDER, drafts=3)) as engine:
            return engine.generate(random_prompts(num_rows, 11), SamplingParams(**{**GREEDY, **params}))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_tokens_are_those_of_full_depth_whichever_branch_is_right(num_rows: int, brought_back: list[int]) -> None:
    """Over three blocks of a row, with freed and spare blocks full of NaN: what a branch leaves is read for good."""
    expected = generate(num_rows, most=1, mode="full")
    assert not brought_back
    assert all_ids(generate(num_rows, most=4)) == all_ids(expected)
    assert len(brought_back) > 1


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_branch_that_is_always_right_gives_a_token_in_every_cycle(
    rank: int, brought_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle gives the branch of this rank the right token, and the others a wrong one."""
    [prompt] = random_prompts(1, 11)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        [expected] = engine.generate([prompt], SamplingParams(**GREEDY, mode="full"))
    parts = exit_parts(artefact=BLOCK, drafts=3)
    parts.runner.lookahead_steps = lambda: 0  # the oracle looks at what was counted
    ids = all_ids([expected])[0]
    assert parts.runner.exits is not None
    shortlist = parts.runner.exits.shortlist.tolist()
    assert set(ids) <= set(shortlist)

    def oracle(logits: torch.Tensor, ranks: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right = shortlist.index(ids[parts.core.counters.num_output_tokens])
        return out.copy_(torch.where(ranks == rank, right, (right + 1 + ranks) % len(shortlist)))

    monkeypatch.setattr(branches, "MAX_BRANCHES", 4)
    cycles = parts.runner.cycles
    assert cycles is not None
    cycles._kernels = replace(cycles._kernels, nth_best=oracle)
    with poisoned(parts) as engine:
        [answer] = engine.generate([prompt], SamplingParams(**GREEDY))
    assert all_ids([answer])[0] == ids
    assert brought_back == [rank] * len(brought_back)
    assert len(brought_back) >= 18, "two tokens a cycle"


def test_more_branches_make_more_tokens_of_a_deep_pass() -> None:
    passes = [generate(1, most=most)[0].usage.deep_passes for most in (1, 2, 4)]
    assert passes[0] > passes[1] >= passes[2]


def test_a_budget_keeps_the_likeliest_draft_where_no_branch_is_right(brought_back: list[int]) -> None:
    bounded = {"mode": "bounded", "epsilon": 0.3, "margin": 0.5}
    full = generate(1, most=1, mode="full")
    [answer] = generate(1, most=4, **bounded)
    kept = [place for place, token in enumerate(answer.tokens) if token.gap is not None]
    assert kept
    assert all(number + 1 <= 0.3 * (place + 1) for number, place in enumerate(kept))
    assert brought_back, "and a branch that is right goes before the budget"
    assert all_ids([answer]) != all_ids(full)


@pytest.mark.parametrize("start", [0, 5, 15, 16, 31, 40])
@pytest.mark.parametrize("drafts", [1, 4])
def test_everything_of_a_token_goes_to_a_branch_and_comes_back(start: int, drafts: int) -> None:
    """K and V of layers and heads, and deep states."""
    layouts = [KVLayout(2, 8, 8), KVLayout(1, 4, 4)]
    cache = PagedKV(layouts, 8 + SPARE_BLOCKS, 16, torch.float32, torch.device("cpu"), state_widths=[6, 0])
    pools = [*(pool for pair in cache.pools for pool in pair), cache.deep_states[0].view(-1, 1, 16, 6)]
    for pool in pools:
        pool.copy_(torch.randn(pool.shape))
    before = [pool.clone() for pool in pools]
    own = [5, 2, 7, 0]
    there = Branches(cache, twin_kernels())
    of_row = 1, start, drafts, IF_RIGHT, 1000
    row_meta = torch.tensor([of_row, of_row], dtype=torch.int32).T.contiguous()
    tables, device_state = torch.tensor([own, own], dtype=torch.int32), torch.zeros(3, MOST_ROWS, dtype=torch.int32)
    wide, narrow = (
        torch.zeros(n, dtype=kind) for n, kind in zip(sizes(2, drafts, 16), (torch.int64, torch.int32), strict=True)
    )
    plan_cycle(row_meta, device_state, tables, 16, drafts, wide, narrow, 2, there.first_spare)
    parts = split(wide, narrow, 2, drafts, 16)
    assert tables[0].tolist() == own
    blocks = tables[1].tolist()
    assert not {*blocks[start // 16 : (start + drafts) // 16 + 1]} & {*own}
    there.copy(*parts.copies)
    for pool, old in zip(pools, before, strict=True):
        for position in range(start):  # the branch sees what the row sees
            block, offset = position // 16, position % 16
            assert torch.equal(pool[blocks[block], :, offset], old[own[block], :, offset])
        assert torch.equal(pool[:8], old[:8]), "and the row's own blocks are as they were"
    source, target, *_ = parts.returns
    for is_right in (False, True):
        chosen, tried = torch.full((2 * drafts + 2,), 9), torch.tensor([7, 9 if is_right else 8])
        there.copy(source, target, Claims(parts.returns[2:], chosen, tried))
        for pool, old in zip(pools, before, strict=True):
            for position in range(64):
                block, offset = position // 16, position % 16
                now, was = pool[own[block], :, offset], old[own[block], :, offset]
                came = is_right and start <= position <= start + drafts
                assert torch.equal(now, pool[blocks[block], :, offset] if came else was)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 19])
@pytest.mark.parametrize("drafts", range(7))
def test_branches_fit_the_tokens_and_the_spare_blocks_they_may_take(num_rows: int, drafts: int) -> None:
    each = branches_for(num_rows, drafts, 16)
    assert each == 1 or num_rows * each * (drafts + 1) <= MAX_TOKENS
    assert num_rows * (each - 1) * 2 <= SPARE_BLOCKS
    assert (each > 1) == (drafts > 0 and 2 * num_rows * (drafts + 1) <= MAX_TOKENS)


def test_spare_blocks_are_nobody_elses() -> None:
    parts = exit_parts(artefact=BLOCK)
    cache, blocks = parts.runner.cache, parts.core.scheduler.blocks
    assert cache.num_blocks == blocks.num_available + SPARE_BLOCKS
    with poisoned(parts) as engine:
        engine.generate(random_prompts(6, 30), SamplingParams(**GREEDY, mode="full"))
    assert cache.pools[0][0][-SPARE_BLOCKS:].isnan().all(), "a row at full depth never touches them"


def test_branches_part_at_the_first_draft_and_go_on_with_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4, 1)
    outputs = OutputBuffer(4, 2, torch.device("cpu"))
    choice = Greedy(twin_kernels(), 4, 2, torch.device("cpu"))
    for step in range(2):
        choice.draft(step, logits, outputs)
    assert outputs.places.tolist() == [[1, 3, 1, 3], [1, 1, 1, 1]]

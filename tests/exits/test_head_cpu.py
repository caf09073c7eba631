"""Heads as programs against the same heads op by op: every proposal, every K and V, every token."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts
from tests.factories import make_request, poison, random_prompts
from tide_core.batch import RowStep
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Completion, Engine
from tide_core.exits.head_cpu import unsupported_reason
from tide_core.exits.propose import Exits, Proposal
from tide_core.exits.row_cycle import RowCycle
from tide_core.kernels import select_kernels
from tide_core.kv.block_manager import BlockTable
from tide_core.request import SamplingParams

pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")

PROMPTS = random_prompts(5, 11)
NUM_LAYERS = 4
KINDS: list[dict[str, Any]] = [
    {"kind": "identity"},
    {"kind": "affine"},
    {"kind": "affine", "deep": False},
    {"kind": "mlp"},
    {"kind": "mlp", "deep": False},
    {"kind": "block"},
    {"kind": "block", "deep": False},
    {"kind": "block", "layers": (1, 2, 3)},
    {"kind": "block", "sizes": (("inner", 20),), "taps": (2, 3)},
    {"kind": "block", "deep": False, "sizes": (("inner", 20), ("hidden", 0))},
]


def name_of(artefact: dict[str, Any]) -> str:
    return "-".join(map(str, artefact.values()))


@dataclass
class Twin:
    """One of two engines over equal weights, and all that its checkpoints said."""

    parts: Parts
    engine: Engine
    proposals: list[Proposal]

    @property
    def exits(self) -> Exits:
        assert self.parts.runner.exits is not None
        return self.parts.runner.exits


def make_twin(*, programs: bool, **settings: Any) -> Twin:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "bind_exits", functools.partial(assemble.bind_exits, programs=programs))
        parts = exit_parts(**settings)
    exits = parts.runner.exits
    assert exits is not None
    assert bool(exits._programs) is programs
    poison(parts.runner.cache, range(parts.runner.cache.num_blocks))
    said: list[Proposal] = []
    propose = exits.propose

    def recorded(*args: Any, **kwargs: Any) -> Proposal:
        said.append(propose(*args, **kwargs))
        return said[-1]

    exits.propose = recorded  # type: ignore[method-assign]
    return Twin(parts, Engine.from_parts(parts), said)


def answers(twin: Twin, prompts: Any = PROMPTS, **changes: Any) -> list[Completion]:
    with twin.engine as engine:
        return engine.generate(prompts, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **changes}))


def assert_twins_agree(settings: dict[str, Any], prompts: Any = PROMPTS, **changes: Any) -> Twin:
    """Tokens and exit layers; logits and K and V to the bit; scores but for rounding. Returns the one with programs."""
    one, other = (make_twin(programs=on, **settings) for on in (True, False))
    got, expected = (answers(twin, prompts, **changes) for twin in (one, other))
    assert all_ids(got) == all_ids(expected)
    assert [exit_layers(answer) for answer in got] == [exit_layers(answer) for answer in expected]
    assert len(one.proposals) == len(other.proposals) > 0
    for mine, theirs in zip(one.proposals, other.proposals, strict=True):
        assert torch.equal(mine.logits, theirs.logits)
        assert mine.best_ids == theirs.best_ids
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-5)
    for checkpoint in one.exits.checkpoints:
        if checkpoint.kv_layer >= 0:
            for mine, theirs in zip(
                *(t.parts.runner.cache.pools[checkpoint.kv_layer] for t in (one, other)), strict=True
            ):
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
                assert torch.equal(mine.isnan(), theirs.isnan())
                assert mine.isfinite().any()
    return one


@pytest.mark.parametrize("artefact", KINDS, ids=name_of)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_every_kind_of_head_drafts_alike(artefact: dict[str, Any], num_rows: int) -> None:
    assert_twins_agree({"artefact": artefact}, PROMPTS[:num_rows], mode="verified")


@pytest.mark.parametrize("artefact", KINDS, ids=name_of)
def test_sampled_text_is_drawn_alike(artefact: dict[str, Any]) -> None:
    assert_twins_agree({"artefact": artefact}, mode="verified", temperature=0.9, seed=3, logprobs=2)


@pytest.mark.parametrize("mode", ["bounded", "fast"])
@pytest.mark.parametrize("artefact", [{"kind": "mlp"}, {"kind": "block"}], ids=name_of)
def test_tokens_leave_alike(mode: str, artefact: dict[str, Any]) -> None:
    assert_twins_agree({"artefact": {**artefact, "draft_threshold": 0.2}}, mode=mode)


@pytest.mark.parametrize(
    "artefact", [{"kind": "affine"}, {"kind": "block"}, {"kind": "block", "layers": (1, 3)}], ids=name_of
)
@pytest.mark.parametrize("length", [16, 40, 90])
def test_prompts_in_chunks_are_remembered_alike(artefact: dict[str, Any], length: int) -> None:
    prompts = random_prompts(3, length)
    assert_twins_agree({"artefact": artefact, "max_batch_tokens": 32}, prompts, mode="verified", max_tokens=12)


def test_every_token_of_a_prompt_is_scored_alike() -> None:
    settings = {"artefact": {"kind": "block"}, "prompt_exits": True, "max_batch_tokens": 128}
    twin = assert_twins_agree(settings, random_prompts(3, 30), mode="fast", threshold=0.5)
    assert max(len(proposal.scores) for proposal in twin.proposals) > 30


@pytest.mark.parametrize("start", [0, 1, 15, 16, 21])
@pytest.mark.parametrize("skipped", [False, True])
def test_tokens_are_fed_with_the_last_deep_state_before_them(start: int, skipped: bool) -> None:
    """Where no token skipped layers the way there is short, and must lead to the same place."""
    exits = make_twin(programs=True, artefact={"kind": "block"}).exits
    rows = []
    for blocks in ([5, 2, 9], [7, 3, 1]):
        table = BlockTable(start, blocks)
        rows.append(RowCycle.begin(RowStep(make_request(), table, tuple(range(8)), (), True), 2))
    if skipped:
        rows[1].left_at = {2: 0, 3: 0}
    parts = [(rows[0], (0, 3)), (rows[1], (1, 8))]
    expected: tuple[list[int], list[int]] = [], []
    for row, (first, stop) in parts:
        for token in range(first, stop):
            deep = [t for t in range(-start, token) if not row.skips(t, 1)]
            position = start + deep[-1] if deep else 0
            expected[0].append(row.step.table.block_ids[position // 16] * 16 + position % 16)
            expected[1].append(token - deep[-1] if deep else 0)
    sources = exits.deep_sources(parts, drafting=False)
    assert sources is not None
    assert sources.tolist() == list(expected)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("affine", "head.state_norm.weight"),
        ("affine", "head.deep_norm.weight"),
        ("affine", "head.distance.weight"),
        ("affine", "head.mix.weight"),
        ("mlp", "head.mlp.gate_proj.weight"),
        ("mlp", "head.mlp.up_proj.weight"),
        ("mlp", "head.mlp.down_proj.weight"),
        ("block", "head.block.q_proj.weight"),
        ("block", "head.block.v_proj.weight"),
        ("block", "head.block.mlp.up_proj.weight"),
        ("block", "router.norm.weight"),
        ("block", "router.down.weight"),
        ("block", "router.out.bias"),
        ("block", "shortlist"),
    ],
)
def test_a_weight_that_is_no_number_lets_no_token_leave_and_is_counted(kind: str, weight: str) -> None:
    twin = make_twin(programs=True, artefact={"kind": kind, "draft_threshold": 0.0})
    exits = twin.exits
    if weight == "shortlist":
        broken = exits._narrow_head.linear.weight
    else:
        part, name = weight.split(".", 1)
        broken = getattr(exits.checkpoints[0], part).get_parameter(name)
    broken.data.flatten()[0] = math.nan
    if weight == "head.distance.weight":
        broken.data.fill_(math.nan)  # only one of its rows is read
    with twin.engine as engine:
        got = engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True, mode="verified"))
        assert engine.stats().exits["non_finite_scores"] > 0
    assert twin.proposals
    assert not any(math.isfinite(score) for proposal in twin.proposals for score in proposal.scores)
    assert {layer for answer in got for layer in exit_layers(answer)} == {NUM_LAYERS}


def test_a_state_that_is_no_number_stays_in_its_row() -> None:
    twin = make_twin(programs=True, artefact={"kind": "block", "draft_threshold": 0.0})
    propose = twin.exits.propose

    def broken(index: int, parts: Any, view: Any, states: torch.Tensor, **kwargs: Any) -> Proposal:
        states = states.clone()
        states[0, 3] = math.nan
        return propose(index, parts, view, states, **kwargs)

    twin.exits.propose = broken  # type: ignore[method-assign]
    answers(twin, mode="verified")
    several = [proposal.scores for proposal in twin.proposals if len(proposal.scores) > 1]
    assert several
    assert not any(math.isfinite(scores[0]) for scores in several)
    assert any(math.isfinite(score) for scores in several for score in scores[1:])


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("llama", "float32", None),
        ("qwen3", "float32", None),
        ("mixtral", "float32", None),
        ("llama", "bfloat16", "float32 states"),
        ("gpt2", "float32", "final norm is a LayerNorm"),
        ("gemma3", "float32", "final norm is a Gemma3RMSNorm"),
        ("opt_projected", "float32", "final norm"),
        ("granite", "float32", "scales its states or logits"),
    ],
)
def test_what_cannot_be_a_program_runs_op_by_op_and_says_why(
    family: str, dtype: str, reason: str | None, kernels: str
) -> None:
    easy = family in ("llama", "gpt2")
    parts = exit_parts(family, easy=easy, artefact={"kind": "affine"}, dtype=dtype, kernels=kernels)
    exits = parts.runner.exits
    assert exits is not None
    why = unsupported_reason(
        parts.runner.adapter, parts.runner.cache, select_kernels(kernels, "cpu"), exits._narrow_head
    )
    if kernels == "reference":
        assert why == "the reference kernels run op by op"
    elif reason is None:
        assert why is None
    else:
        assert why is not None
        assert reason in why
    assert bool(exits._programs) is (why is None)


def test_logits_that_are_capped_or_scaled_are_none_of_a_program() -> None:
    parts = exit_parts(artefact={"kind": "affine"})
    runner = parts.runner
    assert runner.exits is not None
    narrow_head = runner.exits._narrow_head
    narrow_head._scale = lambda logits: logits * 30.0
    assert "scales its states or logits" in str(
        unsupported_reason(runner.adapter, runner.cache, parts.kernels, narrow_head)
    )


def test_programs_share_the_weights_of_their_modules() -> None:
    twin = make_twin(programs=True, artefact={"kind": "block"})
    head = twin.exits.checkpoints[0].head
    stack = twin.exits._programs[0]._qkv
    sizes = [linear.out_features for linear in (head.block.q_proj, head.block.k_proj, head.block.v_proj)]
    assert len(stack) == sum(sizes)
    assert head.block.k_proj.weight.data_ptr() == stack[sizes[0] :].data_ptr()
    assert head.block.v_proj.weight.shape == (sizes[2], stack.shape[1])

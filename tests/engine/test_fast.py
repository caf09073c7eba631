"""Mode fast with several exits, against a plain model of it: no pool, no batches, every state of every layer kept."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.exit_engines import all_ids, easy_model, exit_engine, exit_layers, exit_parts, ids, poisoned
from tests.factories import random_prompts
from tide_core.calibration.train.skipping import SkippingPass
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import RequestError
from tide_core.exits.artefact.contract import FastContract
from tide_core.exits.artefact.fast import refine
from tide_core.exits.artefact.router import confidence_of
from tide_core.models.adapter import ModelAdapter
from tide_core.request import Audit, SamplingParams

NUM_LAYERS = 4
PROMPTS = random_prompts(5, 9)
CONTRACTS = (
    FastContract(0.02, 0.05, (0.9, 0.8, 0.7), 0.01, 3.0, 100, 64),
    FastContract(0.1, 0.05, (0.5, 0.45, 0.4), 0.04, 2.0, 100, 64),
)
LADDER: dict[str, Any] = {
    "kind": "mlp",
    "taps": (2, 3),
    "fast_layers": (2, 3),
    "fast_contracts": CONTRACTS,
    "draft_threshold": 0.0,
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "mode": "fast", **changes})


def fast_parts(**settings: Any) -> Parts:
    return exit_parts(artefact={**LADDER, **settings.pop("artefact", {})}, **{"audit_share": 0.0, **settings})


def answers(engine: Engine, **changes: Any) -> list[Completion]:
    with engine:
        return engine.generate(PROMPTS, params(**changes))


class PlainFast:
    """Mode fast for one row: after each token, the state that every layer saw of every position is kept, real or from a
    skip map, and attention reads K and V that are made of them anew."""

    def __init__(self, parts: Parts, drafts: int) -> None:
        exits = parts.runner.exits
        assert exits is not None
        self.exits, self.adapter, self.drafts = exits, parts.runner.adapter, drafts
        self.model = self.adapter.model.model
        self.layers = [segment.stop for segment in parts.runner.segments[:-1]]
        self.near = 1.0
        """How close a score came to a threshold."""

    def layer(self, index: int, seen: list[Tensor]) -> Tensor:
        """The output of a layer for the last position, from the states it saw of all."""
        states = torch.stack(seen).unsqueeze(0)
        block, positions = self.model.layers[index], torch.arange(len(seen)).unsqueeze(0)
        attention, normed = block.self_attn, block.input_layernorm(states)
        size = attention.head_dim
        cos, sin = self.model.rotary_emb(states, positions)
        query, key, value = (
            getattr(attention, name)(normed).view(len(seen), -1, size).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = (x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin for x in (query, key))
        shared = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        weights = (query[:, -1:] @ key.transpose(-1, -2) * size**-0.5).softmax(-1)
        after = states[0, -1] + attention.o_proj((weights @ value).transpose(0, 1).reshape(1, -1))[0]
        moved: Tensor = after + block.mlp(block.post_attention_layernorm(after.unsqueeze(0)))[0]
        return moved

    @torch.no_grad()
    def generate(self, prompt: list[int], num: int, thresholds: tuple[float, ...]) -> tuple[list[int], list[int]]:
        """Token ids and exit layers."""
        self.seen: list[list[Tensor]] = [[] for _ in range(NUM_LAYERS)]
        self.left: dict[int, tuple[int, Tensor]] = {}
        """Exit and features of the positions that left."""
        self.deep, self.since = torch.zeros(1), 0
        for token in prompt:
            newest = self.full(token)
        out, where, run = [newest], [NUM_LAYERS], 0
        while len(out) < num:
            last = len(out) == num - 1  # a draft there would be followed by nothing
            token, layer = self.step(out[-1], () if last or run == self.drafts else thresholds)
            run = run + 1 if layer < NUM_LAYERS else 0
            out.append(token)
            where.append(layer)
        return out, where

    def full(self, token: int) -> int:
        return self.step(token, ())[0]

    def step(self, token: int, thresholds: tuple[float, ...]) -> tuple[int, int]:
        state = self.model.embed_tokens.weight[token]
        tapped, features = {}, torch.zeros(0)
        [checkpoint] = self.exits.checkpoints
        for index in range(NUM_LAYERS):
            self.seen[index].append(state)
            state = self.layer(index, self.seen[index])
            tapped[index + 1] = state.unsqueeze(0)
            if index + 1 not in self.layers or not thresholds:
                continue
            exit_index = self.layers.index(index + 1)
            if exit_index == 0:
                embedded = checkpoint.head.embed(tapped[index + 1], self.deep, torch.tensor([self.since + 1]))
                features, router = checkpoint.head.widen(embedded, tapped[index + 1]), checkpoint.router
            else:
                each = self.exits.fast[exit_index - 1]
                features, router = refine(each.head, tapped[index + 1], features), each.router
            logits = self.exits._narrow_head(self.adapter.norm(features))
            score = float(router.score(features, confidence_of(logits)))
            if 0.0 < thresholds[exit_index] <= 1.0:
                self.near = min(self.near, abs(score - thresholds[exit_index]))
            if score >= thresholds[exit_index]:
                skip_map = self.exits.skip_maps[exit_index]
                moves = skip_map.moves(skip_map.code(tapped[index + 1], features))
                self.left[len(self.seen[0]) - 1] = exit_index, features[0]
                for layer in range(index + 1, NUM_LAYERS):
                    self.seen[layer].append(skip_map.state(layer, tapped[index + 1], moves)[0])
                self.since += 1
                return int(self.exits.shortlist[logits.argmax()]), index + 1
        normed = self.adapter.norm(state.unsqueeze(0))
        self.deep, self.since = checkpoint.head.deep_state(normed, [tapped[tap] for tap in self.exits.taps]), 0
        return int(self.adapter.head(normed).argmax()), NUM_LAYERS


@functools.cache
def plain(thresholds: tuple[float, ...], kernels: str = "native") -> tuple[list[list[int]], list[list[int]]]:
    """Of every prompt, with the modules as these kernels have them: the native ones keep heads in bfloat16."""
    model = PlainFast(fast_parts(kernels=kernels), drafts=4)
    made = [model.generate(prompt, 24, thresholds) for prompt in PROMPTS]
    assert model.near > 1e-5, "a score on a threshold: choose another one"
    return [tokens for tokens, _ in made], [layers for _, layers in made]


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("threshold", [0.0, 0.35, 0.6])
def test_fast_is_what_a_plain_model_of_it_gives(threshold: float, kernels: str) -> None:
    tokens, layers = plain((threshold,) * 3, kernels)
    got = answers(Engine.from_parts(fast_parts(kernels=kernels)), threshold=threshold)
    assert all_ids(got) == tokens
    assert [exit_layers(answer) for answer in got] == layers


@torch.no_grad()
def test_skip_maps_are_trained_on_what_the_engine_does() -> None:
    """The pass of the training over a finished answer gives full depth's tokens of mode fast, where tokens stayed."""
    parts = fast_parts(kernels="reference")
    model = PlainFast(parts, drafts=4)
    out, where = model.generate(PROMPTS[0], 24, (0.45,) * 3)
    assert len(set(where)) >= 3
    tokens = torch.tensor([[*PROMPTS[0], *out[:-1]]])
    exits = torch.full_like(tokens, -1)
    features = [torch.zeros(tokens.shape[1], 48) for _ in model.layers]
    for position, (exit_index, found) in model.left.items():
        exits[0, position] = exit_index
        features[exit_index][position] = found
    adapter = ModelAdapter(copy.deepcopy(easy_model()), paged=False)
    last = SkippingPass(adapter, model.layers, model.exits.skip_maps).run(tokens, exits, features)
    chosen = adapter.head(adapter.norm(last)).argmax(-1)[len(PROMPTS[0]) - 1 :].tolist()
    stayed = [layer == NUM_LAYERS for layer in where]
    assert [token for token, full in zip(chosen, stayed, strict=True) if full] == [
        token for token, full in zip(out, stayed, strict=True) if full
    ]
    assert chosen != out, "tokens that left are not computed"


def test_tokens_leave_at_every_exit_and_their_layers_are_counted() -> None:
    got = answers(Engine.from_parts(fast_parts()), threshold=0.45)
    found = Counter(layer for answer in got for layer in exit_layers(answer))
    assert set(found) == {1, 2, 3, NUM_LAYERS}
    for answer in got:
        assert answer.usage is not None
        assert all(t.audit is Audit.UNAUDITED for t in answer.tokens if t.exit_layer < NUM_LAYERS)
        dropped = answer.usage.num_drafts - sum(layer < NUM_LAYERS for layer in exit_layers(answer))
        exits = sum(layer for layer in exit_layers(answer) if layer < NUM_LAYERS)
        assert exits <= answer.usage.layers_run - NUM_LAYERS * answer.usage.deep_passes <= exits + 3 * dropped


def test_no_row_of_fast_depends_on_its_mates_and_other_modes_beside_it_equal_full_depth() -> None:
    alone = [ids(answer) for prompt in PROMPTS for answer in _each(prompt, mode="fast", threshold=0.45)]
    full = all_ids(answers(Engine.from_parts(fast_parts()), mode="full"))
    with Engine.from_parts(fast_parts()) as engine:
        mixed = [params(mode=mode, threshold=0.45 if mode == "fast" else None) for mode in ("fast", "verified", "full")]
        got = engine.generate(PROMPTS * 3, [each for each in mixed for _ in PROMPTS])
    assert all_ids(got) == [*alone, *full, *full]


def _each(prompt: list[int], **changes: Any) -> list[Completion]:
    with Engine.from_parts(fast_parts()) as engine:
        return engine.generate([prompt], params(**changes))


def test_a_contract_is_taken_by_its_epsilon_and_the_loosest_by_default() -> None:
    parts = fast_parts()
    assert parts.policy(params(epsilon=0.02)).draft_thresholds == CONTRACTS[0].thresholds
    assert parts.policy(params(epsilon=0.05)).draft_thresholds == CONTRACTS[0].thresholds
    assert parts.policy(params()).draft_thresholds == CONTRACTS[1].thresholds
    assert parts.policy(params(min_layers=2, epsilon=0.1)).draft_thresholds == (float("inf"), 0.45, 0.4)
    assert [parts.policy(params(epsilon=each)).epsilon for each in (0.02, 0.05, None)] == [0.02, 0.02, 0.1]
    for beyond in ({"temperature": 0.7}, {"min_layers": 2}, {"threshold": 0.5}):
        assert parts.policy(params(**beyond)).epsilon is None
    tokens, _ = plain(CONTRACTS[1].thresholds)
    assert all_ids(answers(Engine.from_parts(parts))) == tokens


def test_min_layers_closes_exits_whose_features_the_next_ones_still_get() -> None:
    infinite = float("inf")
    tokens, layers = plain((infinite, 0.3, 0.3))
    got = answers(Engine.from_parts(fast_parts()), threshold=0.3, min_layers=2)
    assert all_ids(got) == tokens
    assert [exit_layers(answer) for answer in got] == layers
    assert 1 not in {layer for answer in got for layer in exit_layers(answer)}


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"epsilon": 0.01}, "epsilon"), ({"epsilon": 0.05, "threshold": 0.5}, "threshold"), ({"margin": 0.1}, "margin")],
    ids=["tighter than any", "both", "margin"],
)
def test_what_no_contract_covers_is_refused_by_name(asked: dict[str, float], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        fast_parts().policy(params(**asked))
    assert caught.value.field == field


def test_without_a_contract_fast_needs_a_threshold() -> None:
    parts = fast_parts(artefact={"fast_contracts": ()})
    with pytest.raises(RequestError, match=r"certified \(none\), or a threshold"):
        parts.policy(params())
    with pytest.raises(RequestError, match="epsilon"):
        exit_parts().policy(params(epsilon=0.05))
    assert parts.policy(params(threshold=0.4)).draft_thresholds == (0.4, 0.4, 0.4)


def test_verified_drafts_from_the_checkpoint_alone_and_equals_full_depth() -> None:
    full = answers(exit_engine(artefact=LADDER), mode="full")
    got = answers(exit_engine(artefact=LADDER), mode="verified")
    assert all_ids(got) == all_ids(full)
    assert {layer for answer in got for layer in exit_layers(answer)} <= {1, NUM_LAYERS}


def test_preempted_rows_with_several_exits_read_nothing_unwritten() -> None:
    engine = poisoned(fast_parts(block_size=4, kv_memory_gib=0.00012), drafts=4)
    with engine:
        got = engine.generate(PROMPTS, params(threshold=0.3))
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.exits["non_finite_scores"] == 0
    assert all(answer.error is None for answer in got)


def test_prompt_tokens_that_leave_are_mapped_too() -> None:
    with Engine.from_parts(fast_parts(prompt_exits=True)) as engine:
        mapped = engine.generate(PROMPTS, params(threshold=0.2))
    parts = fast_parts(prompt_exits=True)
    assert parts.runner.exits is not None
    for skip_map in parts.runner.exits.skip_maps:
        skip_map.up.weight.data.zero_()
    with Engine.from_parts(parts) as engine:
        carried = engine.generate(PROMPTS, params(threshold=0.2, max_tokens=1))
    assert all(answer.error is None for answer in (*mapped, *carried))

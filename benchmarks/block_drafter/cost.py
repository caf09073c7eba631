"""Seconds of whole cycles with random weights: drafts, and one deep pass over them and the newest token.

Target, exit head and block drafter are plain Torch in CUDA graphs and consist of the same layers, so their ratio is the
cost of a drafter; the engine's own kernels are faster for all three. A cycle is timed as a whole: the weights of a
drafter that is timed alone stay in the device's cache, but a deep pass evicts them.

    head     k times: shallow layers, head, shortlist; then the head's keys and values of k + 1 tokens
    block    shallow layers of the newest token; keys and values of k + 1 tokens; one pass over all places; shortlist
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.block_drafter.model import (
    BlockDrafter,
    DrafterLayer,
    DrafterSpec,
    KeysValues,
    attend,
    rotate,
    rotations,
)
from benchmarks.block_drafter.variants import TargetShape, Variant
from benchmarks.common.shapes import DEMO, Shape, draw_weights
from benchmarks.common.timing import per_call_s
from tide_core.calibration.train.candidates import head_spec
from tide_core.exits.artefact.heads import ExitHead, HeadRMSNorm

WIDE = Shape("7.25B", 4608, 12288, 30, 72, 24, 49152, 8192, 512)
"""The demo widened eight times."""
SCALES = (DEMO, WIDE)
ROWS = (1, 8, 32)
MAX_SEQUENTIAL = 8
"""Most drafts of an exit head, which makes them one by one."""
VERIFIED = (2, 4, 8, 16)
"""Numbers of drafts for which deep passes are timed."""


def shape_of(scale: Shape) -> TargetShape:
    return TargetShape(scale.hidden, scale.intermediate, scale.layers, scale.heads, scale.kv_heads, scale.head_dim)


def cost_key(variant: Variant) -> str:
    """Name of a variant without the options that only training reads."""
    plain = Variant(variant.kind)
    return replace(variant, target=plain.target, optimiser=plain.optimiser, lr=plain.lr).name


@dataclass(frozen=True, slots=True)
class Place:
    """Device and dtype of the tensors."""

    device: torch.device
    dtype: torch.dtype

    def module(self, make: Callable[[], nn.Module]) -> Any:
        with torch.device(self.device):  # a wide module takes minutes to make on the host
            module = make().to(self.dtype).requires_grad_(False)
        draw_weights(module)
        return module

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.1


class CachedLayer(DrafterLayer):
    """A layer that writes its keys and values into the cache in place; its base class concatenates both."""

    def forward(self, states: Tensor, context: KeysValues, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.attention_norm(states).flatten(1, 2)
        cos, sin = (turn.flatten(1, 2) for turn in (cos, sin))
        query = rotate(self._by_head(self.q_proj(normed)), cos, sin)
        new = query.shape[2]
        for cache, own in zip(context, (self._keys(normed, cos, sin), self._by_head(self.v_proj(normed))), strict=True):
            cache[:, :, -new:] = own
        attended = attend(query, *context, None).transpose(1, 2).flatten(2)
        states = states + self.o_proj(attended).view_as(states)
        refined: Tensor = states + self.mlp(self.mlp_norm(states))
        return refined


class Stack:
    """A target: its layers one by one, its norm, its output embedding."""

    def __init__(self, scale: Shape, place: Place) -> None:
        self.scale, self.place = scale, place
        spec = DrafterSpec(
            scale.hidden, scale.hidden, 1, 1, scale.heads, scale.kv_heads, scale.head_dim, scale.intermediate
        )
        self.spec = spec
        self.layers = [place.module(lambda: CachedLayer(spec)) for _ in range(scale.layers)]
        self.norm = place.module(lambda: HeadRMSNorm(scale.hidden, spec.norm_eps))
        self.embedding = place.numbers(scale.vocabulary, scale.hidden)
        self.output = place.numbers(scale.vocabulary, scale.hidden)
        self.shortlist = self.output[: scale.shortlist].clone()

    def caches(self, rows: int, tokens: int, layers: int) -> list[KeysValues]:
        size = (rows, self.scale.kv_heads, self.scale.context + tokens, self.scale.head_dim)
        return [(self.place.numbers(*size), self.place.numbers(*size)) for _ in range(layers)]

    def run(self, ids: Tensor, caches: Sequence[KeysValues]) -> Tensor:
        """Tokens [B, q] through as many layers as there are caches: [B, q, D]."""
        states = F.embedding(ids, self.embedding).unsqueeze(1)
        positions = self.scale.context + torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        turns = rotations(positions.unsqueeze(1), self.spec)
        for layer, cache in zip(self.layers, caches, strict=False):
            states = layer(states, cache, *turns, None)
        return states.squeeze(1)

    def best(self, states: Tensor, rows: Tensor) -> Tensor:
        """The row of an output embedding with the largest logit, for each state."""
        return F.linear(self.norm(states), rows).argmax(-1)


Cycle = Callable[[int], Tensor]


def deep_pass(stack: Stack, rows: int, tokens: int) -> Cycle:
    """A pass of the whole target over `tokens` tokens of every row."""
    caches = stack.caches(rows, tokens, stack.scale.layers)
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=stack.place.device)
    return lambda _: stack.best(stack.run(ids, caches), stack.output)


def block_cycle(stack: Stack, variant: Variant, rows: int, drafts: int) -> Cycle:
    place, scale = stack.place, stack.scale
    spec = variant.drafter(shape_of(scale))
    drafter: BlockDrafter = place.module(lambda: BlockDrafter(spec))
    for layer in drafter.layers:
        layer.__class__ = CachedLayer
    size = (rows, spec.num_kv_heads, scale.context + spec.places, spec.head_size)
    context = [(place.numbers(*size), place.numbers(*size)) for _ in range(spec.layers)]
    shallow = stack.caches(rows, 1, spec.checkpoint)
    newest = torch.zeros(rows, 1, dtype=torch.long, device=place.device)
    anchors = torch.full((rows, 1), scale.context, device=place.device)
    deep = [place.numbers(rows, drafts + 1, scale.hidden) for _ in range(spec.num_sources)]
    positions = scale.context - drafts - 1 + torch.arange(drafts + 1, device=place.device)
    verify = deep_pass(stack, rows, drafts + 1)

    def cycle(_: int) -> Tensor:
        fused = drafter.fuse(deep[0], deep[1:])
        for caches, own in zip(context, drafter.keys_values(fused, positions), strict=True):
            for cache, new in zip(caches, own, strict=True):
                cache[:, :, : drafts + 1] = new
        state = stack.run(newest, shallow)
        features = drafter(state, fused[0][:, -1:], anchors, context, None)
        stack.best(features[:, 0, :drafts], stack.shortlist)
        return verify(_)

    return cycle


def head_cycle(stack: Stack, variant: Variant, rows: int, drafts: int) -> Cycle:
    place, scale = stack.place, stack.scale
    shape = shape_of(scale)
    spec = head_spec(shape.as_adapter(), variant.candidate(shape), MAX_SEQUENTIAL)
    head: ExitHead = place.module(lambda: ExitHead(spec))
    shallow = stack.caches(rows, 1, variant.checkpoint)
    newest = torch.zeros(rows, 1, dtype=torch.long, device=place.device)
    distances = torch.ones(rows, dtype=torch.long, device=place.device)
    size = (rows, spec.num_kv_heads, scale.context + 1, spec.head_size)
    keys, values = place.numbers(*size), place.numbers(*size)
    deep = [place.numbers(rows * (drafts + 1), scale.hidden) for _ in range(1 + len(spec.taps))]
    states = place.numbers(rows * (drafts + 1), scale.hidden)
    head.prepare(scale.context + 1)
    at = torch.full((rows,), scale.context, device=place.device)
    verify = deep_pass(stack, rows, drafts + 1)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys[:, :, -1], values[:, :, -1] = key, value
        return attend(query.unsqueeze(2), keys, values, None).squeeze(2)

    def cycle(_: int) -> Tensor:
        fed = head.deep_state(deep[0], deep[1:])
        embedded = head.embed(states, fed, distances.repeat(drafts + 1))
        for cache, new in zip((keys, values), head.keys_values(embedded, at.repeat(drafts + 1)), strict=True):
            cache[:, :, : drafts + 1] = new.view(rows, -1, *new.shape[1:]).transpose(1, 2)
        ids = newest
        for _draft in range(drafts):
            state = stack.run(ids, shallow)[:, 0]
            refined = head.refine(head.embed(state, fed[:rows], distances), at, attention)
            ids = stack.best(head.widen(refined, state), stack.shortlist).unsqueeze(1)
        return verify(_)

    return cycle


def drafts_of(variant: Variant) -> tuple[int, ...]:
    """Numbers of drafts at which cycles are timed; between them costs are interpolated."""
    return (2, MAX_SEQUENTIAL) if variant.kind == "head" else (2, variant.places)


def interpolated(by_drafts: Mapping[str, float], drafts: int) -> float | None:
    """Milliseconds for any number of drafts between those that were timed; None outside of them."""
    known = sorted((int(k), value) for k, value in by_drafts.items())
    if not known or not known[0][0] <= drafts <= known[-1][0]:
        return None
    return float(np.interp(drafts, [k for k, _ in known], [value for _, value in known]))


def milliseconds(cycle: Cycle, device: torch.device) -> float:
    """Of one cycle. On a CPU it runs once, only to show that cycles run."""
    if device.type == "cuda":
        return 1e3 * per_call_s(cycle, 1, device)
    began = time.perf_counter()
    cycle(0)
    return 1e3 * (time.perf_counter() - began)


@torch.no_grad()
def measure_costs(
    scales: Sequence[Shape], variants: Sequence[Variant], rows: Sequence[int], place: Place
) -> dict[str, Any]:
    """By scale, rows: milliseconds of a full pass, of deep passes by drafts, and of cycles by variant and drafts."""
    found: dict[str, Any] = {}
    by_key = {cost_key(variant): variant for variant in variants}
    for scale in scales:
        stack = Stack(scale, place)
        for count in rows:
            full, *verified = (
                milliseconds(deep_pass(stack, count, drafts + 1), place.device) for drafts in (0, *VERIFIED)
            )
            cycles: dict[str, dict[str, float]] = {}
            for key, each in by_key.items():
                make = head_cycle if each.kind == "head" else block_cycle
                cycles[key] = {str(k): milliseconds(make(stack, each, count, k), place.device) for k in drafts_of(each)}
            found.setdefault(scale.name, {})[str(count)] = {
                "full_ms": full,
                "verify_ms": dict(zip(map(str, VERIFIED), verified, strict=True)),
                "cycle_ms": cycles,
            }
        del stack
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return found

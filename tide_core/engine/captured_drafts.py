"""Drafting on a GPU as one graph launch: shallow layers, head, narrow head and router of the newest token of each row.

Some two hundred small kernels make a draft, and launching them one by one takes six times as long as they run (H200,
demo model: 3 ms against half of one). So the whole pass is captured once for each shape it comes in and replayed from
then on. Shapes are few: rows are filled up to a power of two with copies of the first one, which write again what that
one writes, and contexts are counted up to a power of two, the rest belonging to no row.

A pass reads its tokens and indices from one buffer on the device, filled in one transfer, and is read back in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tide_core.engine.cycle import RowCycle
from tide_core.engine.exits import Exits, Proposal
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV, StepIndex
from tide_core.kv.device_view import DeviceView, device_arrays, flash_takes
from tide_core.models.adapter import ModelAdapter

FEWEST_CONTEXTS = 256


def obstacle(adapter: ModelAdapter, cache: PagedKV, exits: Exits, layers: range) -> str | None:
    """Why drafting with these exits cannot be captured, or None."""
    if cache.device.type != "cuda":
        return "graphs are for CUDA devices"
    if len(exits.checkpoints) > 1:
        return "a token that leaves nowhere at the first checkpoint goes on to the next"
    if adapter.gathers_kv:
        return "the layers are handed whole contexts"
    if not all(flash_takes(*cache.pools[layer]) for layer in (*layers, exits.checkpoints[0].kv_layer) if layer >= 0):
        return "flash attention does not know these heads, and the plain one reads lengths on the host"
    if getattr(adapter.config, "attn_logit_softcapping", None):
        return "attention scores are capped"
    if adapter.has_experts:
        return "experts are chosen on the host"
    if not adapter.has_fixed_positions:
        return "rotary positions depend on the lengths of the rows"
    return None


class CapturedDrafts:
    """Runs the first segment and the first checkpoint for rows that draft one token more."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: Kernels,
        exits: Exits,
        layers: range,
        *,
        capture: bool = True,
    ) -> None:
        """Without `capture` the same passes run op by op, on any device."""
        self._parts = adapter, cache, kernels, exits, layers
        self._capture = capture
        self._passes: dict[tuple[int, int], _Pass] = {}

    @staticmethod
    def takes(rows: Sequence[RowCycle]) -> bool:
        """Whether nothing of any row but its newest token has yet to run up to the checkpoint and to be proposed on."""
        return all(
            row.ran[0] == row.headed[0] == len(row.tokens) - 1 and row.step.policy.draft_thresholds[0] <= 1.0
            for row in rows
        )

    def run(self, rows: Sequence[RowCycle]) -> tuple[torch.Tensor, Proposal]:
        """States at the checkpoint [R, D] and what it proposes; its logits last until the next run."""
        _, cache, _, exits, _ = self._parts
        filled = [*rows, *[rows[0]] * (_power_of_two(len(rows)) - len(rows))]
        parts = [(row, (len(row.tokens) - 1, len(row.tokens))) for row in filled]
        index = StepIndex.build([row.span(tokens) for row, tokens in parts], cache.block_size)
        shape = len(filled), max(FEWEST_CONTEXTS, _power_of_two(int(index.context_lens.sum())))
        fresh = shape not in self._passes
        if fresh:
            self._passes[shape] = _Pass(self._parts, *shape)
        one = self._passes[shape]
        one.load(index, [row.tokens[-1] for row in filled], exits.origins(parts, drafting=True))
        if fresh and self._capture:
            one.capture(next((p.graph for p in self._passes.values() if p.graph is not None), None))
        one.replay()
        scores, best_ids = one.both[:, : len(rows)].tolist()
        proposal = Proposal(one.logits[: len(rows)], scores, [int(i) for i in best_ids])
        return one.states[: len(rows)].clone(), proposal


class _Pass(DeviceView):
    """A pass of one shape, and the view that its layers see: all of it in memory that stays where it is."""

    states: torch.Tensor
    logits: torch.Tensor
    both: torch.Tensor
    """Scores and best ids, [2, R]."""

    def __init__(self, parts: tuple[ModelAdapter, PagedKV, Kernels, Exits, range], rows: int, contexts: int) -> None:
        self._adapter, cache, kernels, self._exits, self._layers = parts
        sizes = [*[rows] * 7, contexts, contexts, rows + 1, rows + 1]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=cache.device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.device)
        own = torch.split(self._device, sizes)
        self._tokens, self._deep_slots, self._distances = own[:3]
        self._begins = np.cumsum([0, *sizes[:-1]])
        self._max_queries, self._max_context = 1, contexts
        self.graph: Any = None
        self._take(cache, kernels, StepIndex.build([], cache.block_size), own[3:])

    def load(self, index: StepIndex, tokens: Sequence[int], origins: np.ndarray[Any, Any] | None) -> None:
        """Bring a step's tokens and indices to the device."""
        self._index = index
        for stale in ("_block_tables", "_query_starts", "_context_lens", "_cumulative"):
            self.__dict__.pop(stale, None)
        deep = np.zeros((2, len(tokens)), dtype=np.int64) if origins is None else origins
        arrays = [np.asarray(tokens), *deep, *device_arrays(index, self._cache.block_size)]
        host = self._host.numpy()
        for begin, array in zip(self._begins, arrays, strict=True):
            host[begin : begin + len(array)] = array
        self._device.copy_(self._host, non_blocking=True)

    def capture(self, other: Any) -> None:
        """Capture the pass as it is loaded. It runs once beforehand, which writes only what it will write again.

        All graphs share the memory of the `other`: one runs at a time."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.__dict__.pop("_cumulative", None)
            self._run()
        self.graph = graph

    def replay(self) -> None:
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()

    def _run(self) -> None:
        adapter, exits = self._adapter, self._exits
        states = adapter.embed(self._tokens, self.positions)
        inputs = adapter.layer_inputs(self.positions, self)
        self.states = adapter.run_layers(states, self._layers.start, self._layers.stop, inputs)[0]
        deep = None
        if exits.checkpoints[0].head.spec.deep:
            deep = self._cache.deep_states[0].index_select(0, self._deep_slots)
        self.logits, self.both = exits.judge(0, self, self.states, deep, self._distances)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()

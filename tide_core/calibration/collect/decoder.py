"""The fast way to the model's own text: the model's layers over a dense KV, a step captured as a CUDA graph.

The library's `generate` launches every kernel of every step from Python and copies the whole KV each time; for
thousands of short sequences that is most of the time. Here a step is one replay. It is the same function of the same
weights, tested against `generate`, and needs a family whose layers call the attention registry with K and V as cached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tide_core.calibration.collect.dense import Pools, PromptView, StepView, make_pools
from tide_core.calibration.collect.sampling import Sampling, draw
from tide_core.models.adapter import ATTENTION, ModelAdapter
from tide_core.models.layout_probe import probe_layouts

PROMPT_TOKENS = 65536
"""Prompt tokens run at once."""
SLOT_STEP = 64
"""KV is read up to a multiple of this, with a graph for each."""
CHECK_EVERY = 16
"""Steps between two looks at whether all rows have ended."""


def can_decode(adapter: ModelAdapter) -> bool:
    return adapter.family.attention == "paged"


class Decoder:
    """Decodes batches. Pools and graphs are kept for the next batch of the same size."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._pools: Pools = []
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self._capture = adapter.device.type == "cuda" and _can_capture(adapter)
        self._ids = self._positions = torch.zeros(0, dtype=torch.long, device=adapter.device)

    def release(self) -> None:
        """Give all memory back."""
        self._graphs.clear()
        self._pools = []

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[list[int]], sampling: Sampling, *, max_new: int, stop_ids: Sequence[int], seed: int
    ) -> NDArray[np.int32]:
        """New ids [B, up to max_new]; what follows a row's first stop id has no meaning."""
        device, longest = self._adapter.device, max(map(len, prompts))
        random = torch.Generator(device).manual_seed(seed)
        stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        new = torch.zeros(max_new, len(prompts), dtype=torch.int32, device=device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        with _own_attention(self._adapter.config):
            self._reserve(len(prompts), longest + max_new)
            ids = draw(self._read(prompts), sampling, random)
            for step in range(max_new):
                new[step] = ids
                ended |= torch.isin(ids, stops)
                if step + 1 == max_new or (step % CHECK_EVERY == CHECK_EVERY - 1 and bool(ended.all())):
                    break
                self._ids.copy_(ids)
                self._positions.copy_(lengths + step)
                ids = draw(self._next(_rounded(longest + step + 1)), sampling, random)
        return new[: step + 1].T.cpu().numpy()

    def _reserve(self, rows: int, slots: int) -> None:
        slots = _rounded(slots)
        if self._pools and self._pools[0][0].shape[0] == rows and self._pools[0][0].shape[2] >= slots:
            return
        self.release()
        like = torch.empty(0, dtype=self._adapter.dtype, device=self._adapter.device)
        self._pools = make_pools(probe_layouts(self._adapter), rows, slots, like)
        self._ids, self._positions = (torch.zeros(rows, dtype=torch.long, device=like.device) for _ in range(2))

    def _read(self, prompts: Sequence[list[int]]) -> Tensor:
        """Run the prompts; logits after each, [B, V]."""
        adapter, last = self._adapter, []
        longest = max(map(len, prompts))
        rows = max(1, PROMPT_TOKENS // longest)
        for first in range(0, len(prompts), rows):
            some = prompts[first : first + rows]
            padded = np.zeros((len(some), longest), np.int64)
            for row, prompt in enumerate(some):
                padded[row, : len(prompt)] = prompt
            ids = torch.from_numpy(padded.reshape(-1)).to(adapter.device)
            positions = torch.arange(longest, device=adapter.device).repeat(len(some))
            view = PromptView(self._pools, first, len(some), longest)
            states = adapter.embed(ids, positions)
            states = adapter.run_layers(states, 0, adapter.num_layers, adapter.layer_inputs(positions, view))
            ends = [row * longest + len(prompt) - 1 for row, prompt in enumerate(some)]
            last.append(states[0, torch.tensor(ends, device=adapter.device)])
        return adapter.head(adapter.norm(torch.cat(last)))

    def _next(self, slots: int) -> Tensor:
        """Logits [B, V] after the tokens in `_ids` at `_positions`."""
        if not self._capture:
            return self._step(slots)
        if slots not in self._graphs:
            self._graphs[slots] = self._captured(slots)
        graph, logits = self._graphs[slots]
        graph.replay()
        return logits

    def _captured(self, slots: int) -> tuple[Any, Tensor]:
        """A step as a graph. Running it beforehand, as capturing needs, writes only what it will write again."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step(slots)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._step(slots)
        return graph, logits

    def _step(self, slots: int) -> Tensor:
        adapter = self._adapter
        view = StepView(self._pools, self._positions, slots)
        states = adapter.embed(self._ids, self._positions)
        inputs = adapter.layer_inputs(self._positions, view)
        states = adapter.run_layers(states, 0, adapter.num_layers, inputs)
        return adapter.head(adapter.norm(states))[0]


def _can_capture(adapter: ModelAdapter) -> bool:
    """Experts are chosen, and some rotary frequencies, by values that the host must read."""
    rope = getattr(adapter.config, "rope_parameters", None) or {}
    return not adapter.has_experts and rope.get("rope_type") not in ("dynamic", "longrope")


@contextlib.contextmanager
def _own_attention(config: Any) -> Iterator[None]:
    """The model's layers call our views for the time being."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _rounded(slots: int) -> int:
    return -(-slots // SLOT_STEP) * SLOT_STEP

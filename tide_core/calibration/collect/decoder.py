"""A fast decoder for batches of equal sampling: the model's layers over dense KV tensors, each step a CUDA graph.

The library's `generate` launches every kernel of every step from Python and copies the whole KV each time; for
thousands of short sequences this takes most of the time. The decoder computes the same function, tested against
`generate`. It needs a model family whose layers call the attention registry with K and V as cached.

The slot of a token in the KV of its row is its position, so there is no padding on the left. A row never attends to
slots after its position: a shorter prompt leaves values of padding there, and the row's next tokens overwrite them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tide_core.models.adapter import ATTENTION, ModelAdapter
from tide_core.models.layout_probe import probe_layouts

MAX_CHOICES = 256
"""Tokens are drawn from at most this many of the most likely; sorting a whole vocabulary takes longer than a step."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def draw(logits: Tensor, sampling: Sampling, random: torch.Generator) -> Tensor:
    """One id per row of logits [B, V]."""
    if sampling.greedy:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float() / sampling.temperature, -1)
    best, ids = shares.topk(min(MAX_CHOICES, shares.shape[-1]), -1)
    best = best.masked_fill(best.cumsum(-1) - best >= sampling.top_p, 0.0)  # the token that reaches top_p still counts
    # argmax(p / e) with exponential e draws i with probability proportional to p[i].
    exponential = torch.empty_like(best).exponential_(generator=random)
    return ids.gather(-1, (best / exponential).argmax(-1, keepdim=True)).squeeze(-1)


Pools = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, H, slots, size]."""


def make_pools(layouts: Sequence[tuple[int, int, int]], rows: int, slots: int, like: Tensor) -> Pools:
    """Filled with zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN."""
    return [
        (like.new_zeros(rows, heads, slots, key_size), like.new_zeros(rows, heads, slots, value_size))
        for heads, key_size, value_size in layouts
    ]


class PromptView:
    """R rows from row `first` on, the first P tokens of each, row after row."""

    write_only = False

    def __init__(self, pools: Pools, first: int, rows: int, tokens: int) -> None:
        self._pools, self._first, self._rows, self._tokens = pools, first, rows, tokens

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for pool, new in zip(self._pools[layer], (key, value), strict=True):
            pool[self._first : self._first + self._rows, :, : self._tokens] = self._by_row(new)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        positions = torch.arange(self._tokens, device=query.device)
        past = positions[:, None] - positions
        seen = (past >= 0) & (past < window) if window else past >= 0
        plain = not window or window >= self._tokens
        query, key, value = (self._by_row(tensor) for tensor in (query, key, value))
        out = attention(query, key, value, None if plain and not softcap else seen, scaling, softcap)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)

    def _by_row(self, tensor: Tensor) -> Tensor:
        """[1, H, R * P, D] -> [R, H, P, D]"""
        return tensor.reshape(tensor.shape[1], self._rows, self._tokens, -1).transpose(0, 1)


class StepView:
    """One token of every row, at `positions` [B], over the first `slots` slots; all positions are below `slots`."""

    write_only = False

    def __init__(self, pools: Pools, positions: Tensor, slots: int) -> None:
        self._pools, self._positions, self._slots = pools, positions, slots
        self._rows = torch.arange(len(positions), device=positions.device)
        self._seen: dict[int, Tensor] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for pool, new in zip(self._pools[layer], (key, value), strict=True):
            pool[self._rows, :, self._positions] = new[0].transpose(0, 1)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        keys, values = (pool[:, :, : self._slots] for pool in self._pools[layer])
        # Query heads that share a KV head take the dimension of query positions, so that K and V are not repeated.
        grouped = query[0].transpose(0, 1).reshape(*keys.shape[:2], -1, query.shape[-1])
        out = attention(grouped, keys, values, self._mask(window), scaling, softcap)
        return out.flatten(1, 2).unsqueeze(0)

    def _mask(self, window: int) -> Tensor:
        """Slots that each row attends to, [B, 1, 1, slots]."""
        if window not in self._seen:
            past = self._positions[:, None] - torch.arange(self._slots, device=self._positions.device)
            seen = (past >= 0) & (past < window) if window else past >= 0
            self._seen[window] = seen[:, None, None]
        return self._seen[window]


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """[B, Hq, Q, D] over [B, Hk, K, D]; `seen` broadcasts to [B, Hq, Q, K], None is causal."""
    shared = query.shape[1] != key.shape[1]
    if not softcap:
        causal = seen is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=causal, scale=scaling, enable_gqa=shared
        )
    assert seen is not None, "capped scores need a mask"
    if shared:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = torch.tanh((query @ key.transpose(-1, -2)) * scaling / softcap) * softcap
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


PROMPT_TOKENS = 65536
"""Maximum prompt tokens in one pass."""
SLOT_STEP = 64
"""Attention reads slots up to a multiple of this, with one graph for each multiple."""
CHECK_EVERY = 16
"""Steps between two checks whether all rows have ended."""


def can_decode(adapter: ModelAdapter) -> bool:
    return adapter.family.attention == "paged"


class Decoder:
    """Decodes batches; the next batch of the same size reuses pools and graphs."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._pools: Pools = []
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self._capture = adapter.device.type == "cuda" and _can_capture(adapter)
        self._ids = self._positions = torch.zeros(0, dtype=torch.long, device=adapter.device)

    def release(self) -> None:
        """Free all memory."""
        self._graphs.clear()
        self._pools = []

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[list[int]], sampling: Sampling, *, max_new: int, stop_ids: Sequence[int], seed: int
    ) -> NDArray[np.int32]:
        """New ids [B, up to max_new]; ids after a row's first stop id have no meaning."""
        device, longest = self._adapter.device, max(map(len, prompts))
        random = torch.Generator(device).manual_seed(seed)
        stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        new = torch.zeros(max_new, len(prompts), dtype=torch.int32, device=device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        with _own_attention(self._adapter.config):
            self._reserve(len(prompts), longest + max_new)
            ids = draw(self._prefill(prompts), sampling, random)
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

    def _prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        """Run the prompts; returns the logits after each, [B, V]."""
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
            self._graphs[slots] = self._capture_graph(slots)
        graph, logits = self._graphs[slots]
        graph.replay()
        return logits

    def _capture_graph(self, slots: int) -> tuple[Any, Tensor]:
        """A step as a graph. The warm-up run before the capture writes the same KV as the replay after it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(slots)
        torch.cuda.current_stream().wait_stream(stream)
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
    """Whether a step needs no values on the host; routing to experts and some rotary embeddings do."""
    rope = getattr(adapter.config, "rope_parameters", None) or {}
    return not adapter.has_experts and rope.get("rope_type") not in ("dynamic", "longrope")


@contextlib.contextmanager
def _own_attention(config: Any) -> Iterator[None]:
    """The model's layers attend through the views of this module while the block runs."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _rounded(slots: int) -> int:
    return -(-slots // SLOT_STEP) * SLOT_STEP

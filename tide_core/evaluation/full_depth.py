"""What full depth says about a text that is already there: every token in its place, exact KV before it.

The text runs through all layers of the engine's own model, over a small KV pool that no request shares, a chunk of
tokens at a time. So nothing is loaded twice, the layers exits would skip are never skipped, and memory is bounded by
the longest text and one chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tide_core.errors import RequestError
from tide_core.kernels import Kernels
from tide_core.kv.cache import KVLayout, PagedKV, RowSpan
from tide_core.kv.kernel_view import view_kind
from tide_core.models.adapter import ModelAdapter
from tide_core.models.layout_probe import probe_layouts

BLOCK_SIZE = 16
CHUNK_TOKENS = 128
"""Tokens in one pass; a chunk of logits has as many rows."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """About the output tokens of one text, in their order."""

    choices: tuple[int, ...]
    """The token full depth would have chosen, given all before it as it stands."""
    logprobs: tuple[float, ...]
    """Of the token that stands there, by full depth."""

    def agreed(self, output_ids: Sequence[int]) -> tuple[bool, ...]:
        return tuple(choice == token for choice, token in zip(self.choices, output_ids, strict=True))


class FullDepth:
    """Reads texts with the model of an engine. The engine must be idle meanwhile: both use one set of threads."""

    def __init__(self, adapter: ModelAdapter, kernels: Kernels, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._adapter = adapter
        self._kernels = kernels
        self._chunk_tokens = chunk_tokens
        self._layouts = [KVLayout(*shape) for shape in probe_layouts(adapter)]
        self._pool = self._new_pool(1)
        self._view_kind = view_kind(self._pool, kernels, gathers_kv=adapter.gathers_kv)

    @torch.inference_mode()
    def judge(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Judgement:
        """What full depth says at each output token."""
        if not prompt_ids:
            raise RequestError("prompt", "", "at least one token")
        choices: list[int] = []
        logprobs: list[float] = []
        targets = torch.tensor(output_ids, dtype=torch.long, device=self._adapter.device)
        # The last output token is only judged, never run.
        for logits in self._logits([*prompt_ids, *output_ids][:-1], first=len(prompt_ids) - 1):
            mine = targets[len(choices) : len(choices) + len(logits)]
            more_choices, more_logprobs = read_logits(logits, mine)
            choices += more_choices
            logprobs += more_logprobs
        return Judgement(tuple(choices), tuple(logprobs))

    def _logits(self, tokens: Sequence[int], *, first: int) -> Iterator[torch.Tensor]:
        """Logits at token `first` and all behind it, [n, V] a chunk."""
        adapter, num_blocks = self._adapter, -(-len(tokens) // BLOCK_SIZE)
        if num_blocks > self._pool.num_blocks:
            self._pool = self._new_pool(num_blocks)
        block_ids = range(num_blocks)
        for start in range(0, len(tokens), self._chunk_tokens):
            chunk = tokens[start : start + self._chunk_tokens]
            view = self._view_kind(self._pool, self._kernels, [RowSpan(block_ids, start, len(chunk))])
            states = adapter.embed(torch.tensor(chunk, device=adapter.device), view.positions)
            states = adapter.run_layers(states, 0, adapter.num_layers, adapter.layer_inputs(view.positions, view))[0]
            wanted = states[max(0, first - start) :]
            if len(wanted):
                yield adapter.head(adapter.norm(wanted))

    def _new_pool(self, num_blocks: int) -> PagedKV:
        adapter = self._adapter
        return PagedKV(self._layouts, num_blocks, BLOCK_SIZE, adapter.dtype, adapter.device)


def read_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[list[int], list[float]]:
    """The best token of every row of logits [n, V], and the log-probability of the given one."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)
    return logits.argmax(-1).tolist(), chosen.tolist()

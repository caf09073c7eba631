"""Score a given text with full depth: at every token, the choice of full depth and the log-probability of the token.

The text runs through all layers of the engine's own model, a chunk of tokens at a time, over its own small KV pool.
So the model is not loaded twice, no layer is skipped, and the longest text and one chunk of logits bound the memory.
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
class FullDepthScores:
    """Scores of the output tokens of one text, in order."""

    choices: tuple[int, ...]
    """The token that full depth chooses after the tokens before it."""
    logprobs: tuple[float, ...]
    """Of the text's own token, under full depth."""

    def agreed(self, output_ids: Sequence[int]) -> tuple[bool, ...]:
        return tuple(choice == token for choice, token in zip(self.choices, output_ids, strict=True))


class FullDepth:
    """Scores texts with the model of an engine. The engine must be idle meanwhile: both use the same threads."""

    def __init__(self, adapter: ModelAdapter, kernels: Kernels) -> None:
        self._adapter = adapter
        self._kernels = kernels
        self._layouts = [KVLayout(*shape) for shape in probe_layouts(adapter)]
        self._pool = self._new_pool(1)
        self._view_kind = view_kind(self._pool, kernels, gathers_kv=adapter.gathers_kv)

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> FullDepthScores:
        """Scores of the output tokens after the prompt."""
        if not prompt_ids:
            raise RequestError("prompt", "", "at least one token")
        choices: list[int] = []
        logprobs: list[float] = []
        targets = torch.tensor(output_ids, dtype=torch.long, device=self._adapter.device)
        # The last output token needs no pass of its own.
        for logits in self._logits([*prompt_ids, *output_ids][:-1], first=len(prompt_ids) - 1):
            mine = targets[len(choices) : len(choices) + len(logits)]
            more_choices, more_logprobs = read_logits(logits, mine)
            choices += more_choices
            logprobs += more_logprobs
        return FullDepthScores(tuple(choices), tuple(logprobs))

    def _logits(self, tokens: Sequence[int], *, first: int) -> Iterator[torch.Tensor]:
        """Logits at token `first` and all later ones, [n, V] per chunk."""
        adapter, num_blocks = self._adapter, -(-len(tokens) // BLOCK_SIZE)
        if num_blocks > self._pool.num_blocks:
            self._pool = self._new_pool(num_blocks)
        block_ids = range(num_blocks)
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
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

"""Score given texts with full depth: at every token, the choice of full depth and the log-probability of the token.

The texts run through all layers of the engine's own model, a few at a time, over a small KV pool of their own. So the
model is not loaded twice, no layer is skipped, and a few texts and one chunk of logits bound the memory. Output tokens
run in pieces of at most FEW_QUERIES: attention then adds up in the order in which the engine decodes, so in bfloat16,
too, a text of mode `full` is agreed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_core.batch import FEW_QUERIES
from tide_core.errors import RequestError
from tide_core.kernels import Kernels
from tide_core.kv.cache import KVLayout, PagedKV, RowSpan
from tide_core.kv.kernel_view import view_kind
from tide_core.models.adapter import ModelAdapter
from tide_core.models.layout_probe import probe_layouts

BLOCK_SIZE = 16
CHUNK_TOKENS = 128
"""Tokens of a prompt in one pass."""
TEXTS = 8
"""Texts that run together."""

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and its output."""


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

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> FullDepthScores:
        """Scores of the output tokens after the prompt."""
        [scores] = self.score_all([(prompt_ids, output_ids)])
        return scores

    @torch.inference_mode()
    def score_all(self, texts: Sequence[Text]) -> list[FullDepthScores]:
        """Scores of several texts, each as if it were alone."""
        if not all(prompt for prompt, _ in texts):
            raise RequestError("prompt", "", "at least one token")
        return [each for start in range(0, len(texts), TEXTS) for each in self._score(texts[start : start + TEXTS])]

    def _score(self, texts: Sequence[Text]) -> list[FullDepthScores]:
        tokens = [[*prompt, *output][:-1] for prompt, output in texts]  # the last token needs no pass of its own
        self._place(tokens)
        ran = [0] * len(texts)
        choices: list[list[int]] = [[] for _ in texts]
        logprobs: list[list[float]] = [[] for _ in texts]
        prompts = [min(len(mine), len(prompt)) for mine, (prompt, _) in zip(tokens, texts, strict=True)]
        for piece, ends in ((CHUNK_TOKENS, prompts), (min(CHUNK_TOKENS, FEW_QUERIES), list(map(len, tokens)))):
            while pieces := [(i, ran[i], min(ran[i] + piece, end)) for i, end in enumerate(ends) if ran[i] < end]:
                states = self._run([(i, tokens[i], start, stop) for i, start, stop in pieces])
                wanted, targets, flat = [], [], 0
                for i, start, stop in pieces:
                    prompt, output = texts[i]
                    scored = range(max(start, len(prompt) - 1), stop)
                    wanted += [(i, flat + token - start) for token in scored]
                    targets += [output[token + 1 - len(prompt)] for token in scored]
                    flat, ran[i] = flat + stop - start, stop
                if wanted:
                    index = torch.tensor([place for _, place in wanted], device=self._adapter.device)
                    logits = self._adapter.head(self._adapter.norm(states[index]))
                    read = read_logits(logits, torch.tensor(targets, device=self._adapter.device))
                    for (i, _), choice, logprob in zip(wanted, *read, strict=True):
                        choices[i].append(choice)
                        logprobs[i].append(logprob)
        return [FullDepthScores(tuple(mine), tuple(given)) for mine, given in zip(choices, logprobs, strict=True)]

    def _place(self, tokens: Sequence[Sequence[int]]) -> None:
        """Give each text its blocks."""
        self._blocks: list[range] = []
        end = 0
        for mine in tokens:
            self._blocks.append(range(end, end := end + -(-len(mine) // BLOCK_SIZE)))
        if end > self._pool.num_blocks:
            self._pool = self._new_pool(end)

    def _run(self, pieces: Sequence[tuple[int, Sequence[int], int, int]]) -> torch.Tensor:
        """States after the last layer [T, D] of tokens start .. stop of some texts."""
        adapter = self._adapter
        spans = [RowSpan(self._blocks[i], start, stop - start) for i, _, start, stop in pieces]
        flat = [token for _, tokens, start, stop in pieces for token in tokens[start:stop]]
        view = self._view_kind(self._pool, self._kernels, spans)
        states = adapter.embed(torch.tensor(flat, device=adapter.device), view.positions)
        return adapter.run_layers(states, 0, adapter.num_layers, adapter.layer_inputs(view.positions, view))[0]

    def _new_pool(self, num_blocks: int) -> PagedKV:
        adapter = self._adapter
        return PagedKV(self._layouts, num_blocks, BLOCK_SIZE, adapter.dtype, adapter.device)


def read_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[list[int], list[float]]:
    """The best token of every row of logits [n, V], and the log-probability of the given one."""
    logits = logits.float()
    chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)
    return logits.argmax(-1).tolist(), chosen.tolist()

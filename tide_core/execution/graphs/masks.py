"""Grammar masks in a cycle: the tokens that may follow each token of the deep pass.

Grammars are evaluated on the host, and the mask after a draft depends on all drafts before it. So a cycle with such
rows has three graphs: drafts, the deep pass, and the choice of tokens. While the deep pass runs, the host reads the
drafts and computes the masks for the choice. Drafts are made without a mask. One that the grammar forbids is rejected,
because the mask keeps full depth from choosing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tide_core.execution.graphs.cycle_shape import CycleShape, RowPlace
from tide_core.request import TokenMask

WORD = 32
ALL = -1
"""A word whose bits are all set: all of its tokens are allowed."""


class MaskBuffer:
    """The masks of the cycles of one shape, on the host and on the device: a bit for every token of the vocabulary, for
    every token of the deep pass."""

    def __init__(self, shape: CycleShape, vocab_size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        size = shape.tokens, -(-vocab_size // WORD)
        self._host = torch.full(size, ALL, dtype=torch.int32, pin_memory=on_gpu)
        self._device = self._host.to(device)
        self._words = self._host.numpy()
        self._num_written = 0
        """Number of masks, from the first on, that an earlier cycle may have changed."""
        every = torch.arange(vocab_size, device=device)
        self._word_of, self._bit_of = every // WORD, (every % WORD).int()
        self._drafted = torch.zeros((shape.drafts, shape.rows), dtype=torch.int64, pin_memory=on_gpu)
        self._fetched: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fetch(self, drafted: torch.Tensor) -> None:
        """Start the copy of the drafts [K, R] to the host. `send` waits for it."""
        self._drafted.copy_(drafted, non_blocking=True)
        if self._fetched is not None:
            self._fetched.record()

    def send(self, rows: Sequence[RowPlace], begins: Sequence[int]) -> None:
        """Compute the masks after the newest token of each row and after its drafts, and copy them to the device.
        `begins` is the index of each row's newest token in the deep pass."""
        words = self._words
        words[: self._num_written] = ALL
        self._num_written = begins[-1] + rows[-1].drafts + 1
        followed: list[tuple[int, TokenMask]] = []
        for place, row in enumerate(rows):  # while the drafts are made
            grammar = row.step.request.mask
            if grammar is not None:
                grammar.write(row.step.output_ids, words[begins[place]])
                followed.append((place, grammar))
        if self._fetched is not None:
            self._fetched.synchronize()
        drafted = self._drafted.T.tolist()
        for place, grammar in followed:  # while the deep pass runs
            step, begin = rows[place].step, begins[place]
            output_ids = list(step.output_ids)
            for distance, draft in enumerate(drafted[place][: rows[place].drafts]):
                is_allowed = words[begin + distance, draft // WORD] >> draft % WORD & 1
                if not is_allowed or draft in step.request.end_ids:
                    break
                output_ids.append(draft)
                grammar.write(output_ids, words[begin + distance + 1])
        self._device.copy_(self._host, non_blocking=True)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the deep pass [T, V], with -inf for tokens that the masks forbid."""
        allowed = self._device.index_select(1, self._word_of).bitwise_right_shift_(self._bit_of).bitwise_and_(1)
        return logits.masked_fill(allowed == 0, -torch.inf)

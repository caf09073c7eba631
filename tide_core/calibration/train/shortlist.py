"""The shortlist: the tokens that an exit head can say, chosen by how often the model itself says them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tide_core.calibration.collect.shards import TokenShards
from tide_core.errors import ConfigError


def count_emitted(shards: TokenShards, vocab_size: int) -> NDArray[np.int64]:
    """How often each token was emitted by the model, [V]. Plain text, of one prompt token, counts where all is text."""
    counts = np.zeros(vocab_size, np.int64)
    texts = np.zeros(vocab_size, np.int64)
    for index in range(shards.num_sequences):
        sequence = shards.sequence(index)
        new = sequence.tokens[sequence.prompt_len :]
        if new.size and int(new.max()) >= vocab_size:
            raise ConfigError(f"token of the {shards.part} part", int(new.max()), f"an id below {vocab_size}")
        np.add.at(texts if sequence.prompt_len == 1 else counts, new, 1)
    return counts if counts.any() else texts


def choose_shortlist(counts: NDArray[np.int64], *, size: int | None, coverage: float, eos_ids: Iterable[int]) -> Tensor:
    """Sorted ids [S], S below the vocabulary: the `size` most frequent, or as many as `coverage` asks for.

    A size that the vocabulary does not exceed is replaced by the coverage. Ids that were never seen fill up from
    below: in vocabularies of merges the first ones are the most frequent."""
    vocab_size = len(counts)
    order = np.lexsort((np.arange(vocab_size), -counts))
    if size is None or size >= vocab_size:
        shares = np.cumsum(counts[order]) / max(1, counts.sum())
        size = int(np.searchsorted(shares, coverage - 1e-12)) + 1
    size = min(max(size, 2), vocab_size - 1)
    always = np.array(sorted(set(eos_ids)), np.int64)
    if len(always) > size or vocab_size < 3:
        raise ConfigError("shortlist_size", size, f"room for {len(always)} end-of-text ids, below the vocabulary")
    others = order[~np.isin(order, always)]
    return torch.from_numpy(np.sort(np.concatenate([always, others[: size - len(always)]])))


def coverage_of(ids: Tensor, counts: NDArray[np.int64]) -> float:
    """Share of the counted tokens that the shortlist holds; 0 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids.numpy()].sum()) / total if total else 0.0

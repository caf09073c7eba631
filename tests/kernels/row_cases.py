"""Cycles of rows with thresholds, penalties and random numbers of their own: what the ops that read `row_meta` get."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tide_core.kernels.reference import cycle
from tide_core.kernels.reference.draw import NUM_STREAMS

SHAPES = [(1, 1, 0, 1), (1, 2, 5, 1), (3, 4, 3, 1), (5, 8, 15, 1), (64, 64, 3, 1), (130, 256, 2, 1), (0, 2, 2, 1)]
"""Rows, places for rows, drafts, branches."""
BRANCHED_SHAPES = [(2, 2, 1, 2), (6, 6, 3, 2), (8, 8, 4, 4)]


class RowCase(NamedTuple):
    """With R places for rows, K drafts, T = R (K + 1) tokens of the deep pass."""

    row_meta: Tensor
    starts: Tensor
    positions: Tensor
    drafted: Tensor
    scores: Tensor
    following: Tensor


def row_case(seed: int, num_rows: int, places: int, drafts: int, branches: int = 1, vocab_size: int = 2) -> RowCase:
    """The first `num_rows` exist. With few tokens in the vocabulary many drafts equal what full depth chooses. Scores
    are sixteenths, so that some equal a threshold."""
    random = np.random.default_rng(seed)
    counts = np.full(places, -1)
    counts[:num_rows] = drafts if branches > 1 else np.sort(random.integers(0, drafts + 1, num_rows))[::-1]
    counts[: min(num_rows, 1)] = drafts
    groups = np.arange(places) // branches  # all branches of a row share its metadata
    meta = np.zeros((cycle.NUM_META, places), dtype=np.int32)
    prompt_lens = random.integers(1, 300, places)
    starts_at = prompt_lens + random.integers(0, 200, places) - 1
    meta[cycle.NEWEST] = random.integers(0, vocab_size, places)[groups]
    meta[cycle.START] = starts_at[groups]
    meta[cycle.DRAFTS] = counts
    meta[cycle.LEAVES] = random.integers(0, 3, places)[groups]
    limits = [-math.inf, 0.25, 0.5], [math.inf, 0.75, -math.inf]
    for part, values in zip((cycle.MIN_SCORE, cycle.EXIT_SCORE), limits, strict=True):
        chosen = random.choice(np.array(values, dtype=np.float32), places)[groups]
        meta[part] = chosen.astype(np.float32).view(np.int32)
    meta[cycle.PROMPT_LEN] = prompt_lens[groups]
    meta[cycle.ADJUST_SLOT] = -1
    tokens = places * (drafts + 1)
    positions, starts = np.zeros(tokens, dtype=np.int64), np.zeros(places + 1, dtype=np.int32)
    for r, count in enumerate(counts):
        starts[r + 1] = starts[r] + count + 1
        positions[starts[r] : starts[r + 1]] = meta[cycle.START, r] + np.arange(count + 1)
    scores = (random.integers(4, 17, (drafts, places)) / 16).astype(np.float32)
    scores[random.random(scores.shape) < 0.05] = math.nan
    scores[random.random(scores.shape) < 0.05] = math.inf
    drafted = random.integers(0, vocab_size, (drafts, places))
    following = random.integers(0, vocab_size, tokens)
    return RowCase(*(torch.from_numpy(part) for part in (meta, starts, positions, drafted, scores, following)))


def keys_of(seed: int, places: int) -> Tensor:
    """Keys of four streams of each row, [4, R]: any bits, all zeros and all ones among them."""
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63, (NUM_STREAMS, places), dtype=np.int64)
    keys.flat[0], keys.flat[-1] = 0, -1
    return torch.from_numpy(keys)


def next_state_of(case: RowCase) -> tuple[Tensor, Tensor]:
    """Buffers for `accept_drafts`, filled with numbers that it must replace or leave."""
    return torch.full((2, cycle.MOST_ROWS), 77, dtype=torch.int32), torch.full((2, case.starts.numel() - 1), 77)

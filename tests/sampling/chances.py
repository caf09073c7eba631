"""The distribution of one row, for tests."""

from __future__ import annotations

import torch

from tide_core.sampling.rows import SamplingRow
from tide_core.sampling.sampler import probabilities_of


def token_probabilities(logits_row: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """[V] logits to [V] float64, one-hot when greedy."""
    probabilities, errors = probabilities_of(logits_row.unsqueeze(0), [row])
    assert not errors
    return probabilities[0]

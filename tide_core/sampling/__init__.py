"""From logits to tokens: penalties, filters and the draw, row by row."""

from tide_core.sampling.rows import SampledToken, SamplingRow
from tide_core.sampling.sampler import sample, sample_with_chances, token_probabilities

__all__ = ["SampledToken", "SamplingRow", "sample", "sample_with_chances", "token_probabilities"]

"""How a token is drawn while text is collected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CHOICES = 256
"""Tokens are drawn from at most so many of the likeliest; sorting a whole vocabulary would take longer than a step."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A temperature of 0 takes the likeliest."""

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
    best = best.masked_fill(best.cumsum(-1) - best >= sampling.top_p, 0.0)  # the first that reaches top_p still counts
    # The smallest of exponential waiting times is at i with probability proportional to the rate of i.
    waits = torch.empty_like(best).exponential_(generator=random)
    return ids.gather(-1, (best / waits).argmax(-1, keepdim=True)).squeeze(-1)

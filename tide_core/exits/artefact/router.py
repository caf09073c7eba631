"""Routers: the probability that an exit's token equals the full-depth token, from the head's features.

Beside the features a router sees how sure the head's own distribution is: the log-probability of its best token and
the lead of that token over the second. Both come with the logits that drafting needs anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tide_core.exits.artefact.heads import HeadRMSNorm

CONFIDENCE_SIZE = 2
DEFAULT_BOTTLENECK = 128


class Router(nn.Module):
    """A two-layer MLP on normed features [T, D] and confidence [T, 2]."""

    def __init__(self, width: int, bottleneck: int = DEFAULT_BOTTLENECK) -> None:
        super().__init__()
        self.norm = HeadRMSNorm(width, 1e-5)
        self.down = nn.Linear(width + CONFIDENCE_SIZE, bottleneck)
        self.out = nn.Linear(bottleneck, 1)

    def forward(self, features: Tensor, confidence: Tensor) -> Tensor:
        """Logits of the score, [T] float32."""
        inputs = torch.cat((self.norm(features), confidence.to(features.dtype)), -1)
        logits: Tensor = self.out(nn.functional.silu(self.down(inputs))).squeeze(-1)
        return logits.float()

    def score(self, features: Tensor, confidence: Tensor) -> Tensor:
        """Scores in 0..1, [T] float32. What is not finite stays so: the caller must not exit on it."""
        logits: Tensor = self(features, confidence)
        return logits.sigmoid()


def confidence_of(logits: Tensor) -> Tensor:
    """Log-probability of the best token and its lead over the second, [T, 2] float32, from logits [T, S], S >= 2."""
    wide = logits.float()
    best, at = wide.max(-1, keepdim=True)
    second = wide.scatter(-1, at, -torch.inf).amax(-1, keepdim=True)  # quicker than a top-k of two
    return torch.cat((best - wide.logsumexp(-1, keepdim=True), best - second), -1)

"""Live audit of mode fast: how often does full depth disagree? No torch here.

A sample of the tokens that exit runs the deep layers as well, which tell what full depth would have chosen. The share
of those that differ gets a confidence sequence: an interval that holds at every moment at once with probability
1 - delta, so it may be looked at after every token. It comes from a mixture martingale (Robbins, Ville). Were p the
rate, then

    M(p) = integral of q^s (1-q)^(n-s) dBeta(q; a, b)  /  p^s (1-p)^(n-s)        s disagreements in n tokens
         = B(a + s, b + n - s) / B(a, b)  /  p^s (1-p)^(n-s)

would be a martingale that starts at 1 and reaches 1/delta with probability at most delta, ever. The interval holds the
p with M(p) < 1/delta.
"""

from __future__ import annotations

import math

from tide_core.errors import ConfigError
from tide_core.stats import AuditSnapshot

DEFAULT_DELTA = 0.05
_PRIOR = (0.5, 0.5)
_BISECTIONS = 60


class AuditLedger:
    """Audited tokens and disagreements, with the interval of their rate."""

    __slots__ = ("_counts", "delta")

    def __init__(self, delta: float = DEFAULT_DELTA) -> None:
        if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0.0 < delta < 1.0:
            raise ConfigError("delta", delta, "a number above 0 and below 1")
        self.delta = delta
        self._counts = (0, 0)  # tokens and disagreements, changed in one go: another thread may read them

    def observe(self, num_tokens: int, num_disagreements: int) -> None:
        """Add audited tokens, and how many of them disagree with full depth."""
        if not 0 <= num_disagreements <= num_tokens:
            raise ConfigError("num_disagreements", num_disagreements, f"a count in 0..{num_tokens}, the tokens")
        tokens, disagreements = self._counts
        self._counts = (tokens + num_tokens, disagreements + num_disagreements)

    def snapshot(self) -> AuditSnapshot:
        counts = tokens, disagreements = self._counts
        ends = self._end(counts, 0.0), self._end(counts, 1.0)
        return AuditSnapshot(tokens, disagreements, _rate(counts), *ends, self.delta)

    def _evidence(self, counts: tuple[int, int], rate: float) -> float:
        """log M(rate): convex in the rate, lowest at the observed one."""
        wrong, right = counts[1], counts[0] - counts[1]
        if (wrong and rate <= 0.0) or (right and rate >= 1.0):
            return math.inf
        likelihood = (wrong * math.log(rate) if wrong else 0.0) + (right * math.log1p(-rate) if right else 0.0)
        return _log_beta(_PRIOR[0] + wrong, _PRIOR[1] + right) - _log_beta(*_PRIOR) - likelihood

    def _end(self, counts: tuple[int, int], outside: float) -> float:
        """Where the evidence reaches 1/delta between the observed rate and 0 or 1; the end itself if it never does."""
        limit = -math.log(self.delta)
        if self._evidence(counts, outside) < limit:
            return outside
        inside = _rate(counts)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (inside + outside)
            if self._evidence(counts, middle) < limit:
                inside = middle
            else:
                outside = middle
        return outside


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _rate(counts: tuple[int, int]) -> float:
    return counts[1] / counts[0] if counts[0] else 0.0

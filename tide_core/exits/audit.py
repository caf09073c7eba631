"""Live audit: does the disagreement with full depth stay within its bound? No torch here.

A catch-up yields the full-depth token of every token that left early, so each request in mode `bounded` reports how
many tokens it generated and how many of them disagree. The rate per generated token gets a confidence sequence: an
interval that holds at every moment at once with probability 1 - delta, so it may be looked at after every token and
acted on at any time. It comes from a mixture martingale (Robbins, Ville). Were p the rate, then

    M(p) = integral of q^s (1-q)^(n-s) dBeta(q; a, b)  /  p^s (1-p)^(n-s)        s disagreements in n tokens
         = B(a + s, b + n - s) / B(a, b)  /  p^s (1-p)^(n-s)

would be a martingale that starts at 1 and reaches 1/delta with probability at most delta, ever. The interval holds the
p with M(p) < 1/delta. When its lower end passes epsilon, the bound is *broken* and stays so: the engine then serves
these requests in `verified`, which needs no bound.

False alarms stay below delta as long as each token, given all before it, disagrees with a probability of at most
epsilon. Disagreements that come in bursts can raise the alarm early. That is the safe side: it costs speed, not
quality.

In mode `fast` only a sample of the exits is audited; the same ledger without an epsilon gives their rate's interval.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from tide_core.errors import ConfigError
from tide_core.stats import AuditSnapshot

DEFAULT_DELTA = 0.05
_BISECTIONS = 60


class AuditLedger:
    """Tokens and disagreements of one key, with the interval of their rate."""

    __slots__ = ("_broken", "_counts", "_log_prior", "_prior", "delta", "epsilon")

    def __init__(self, epsilon: float | None = None, delta: float = DEFAULT_DELTA) -> None:
        """Without an epsilon there is an interval and nothing to break."""
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if name == "epsilon" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
                raise ConfigError(name, value, "a number above 0 and below 1")
        self.epsilon = epsilon
        self.delta = delta
        # Mean epsilon and spread about epsilon: rates of two to five times the bound are found soonest.
        self._prior = (0.5, 0.5) if epsilon is None else (1.0, (1.0 - epsilon) / epsilon)
        self._log_prior = _log_beta(*self._prior)
        self._counts = (0, 0)  # tokens and disagreements, changed in one go: another thread may read them
        self._broken = False

    def observe(self, num_tokens: int, num_disagreements: int) -> None:
        """Add generated tokens, exited or not, and how many of them disagree with full depth. Constant time."""
        if not 0 <= num_disagreements <= num_tokens:
            raise ConfigError("num_disagreements", num_disagreements, f"a count in 0..{num_tokens}, the tokens")
        tokens, disagreements = self._counts
        tokens, disagreements = self._counts = (tokens + num_tokens, disagreements + num_disagreements)
        if num_disagreements and not self._broken and self.epsilon is not None:  # agreement never raises the lower end
            above = disagreements > self.epsilon * tokens
            self._broken = above and self._evidence(self._counts, self.epsilon) >= -math.log(self.delta)

    @property
    def broken(self) -> bool:
        """Whether the lower end has ever passed epsilon."""
        return self._broken

    def snapshot(self) -> AuditSnapshot:
        counts = tokens, disagreements = self._counts
        return AuditSnapshot(
            num_tokens=tokens,
            num_disagreements=disagreements,
            rate=_rate(counts),
            lower=self._end(counts, 0.0),
            upper=self._end(counts, 1.0),
            epsilon=self.epsilon,
            delta=self.delta,
            broken=self._broken,
        )

    def _evidence(self, counts: tuple[int, int], rate: float) -> float:
        """log M(rate): convex in the rate, lowest at the observed one."""
        wrong, right = counts[1], counts[0] - counts[1]
        if (wrong and rate <= 0.0) or (right and rate >= 1.0):
            return math.inf
        likelihood = (wrong * math.log(rate) if wrong else 0.0) + (right * math.log1p(-rate) if right else 0.0)
        return _log_beta(self._prior[0] + wrong, self._prior[1] + right) - self._log_prior - likelihood

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


class AuditBook:
    """A ledger per key, such as (checkpoint layer, epsilon); made when the key is first met."""

    def __init__(self, delta: float = DEFAULT_DELTA) -> None:
        self._delta = delta
        self._ledgers: dict[Hashable, AuditLedger] = {}

    def ledger(self, key: Hashable, epsilon: float | None = None) -> AuditLedger:
        """The ledger of a key, which names its epsilon."""
        found = self._ledgers.get(key)
        if found is None:
            found = self._ledgers[key] = AuditLedger(epsilon, self._delta)
        return found

    def snapshots(self) -> dict[Hashable, AuditSnapshot]:
        return {key: ledger.snapshot() for key, ledger in list(self._ledgers.items())}


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _rate(counts: tuple[int, int]) -> float:
    return counts[1] / counts[0] if counts[0] else 0.0

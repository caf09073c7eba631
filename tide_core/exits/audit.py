"""Live audit of mode fast: does it keep its contract? No torch here.

A contract says: full depth would choose otherwise at a share of at most `epsilon` of an answer's tokens, in the mean
over answers. Answers are judged one by one (`engine.judge`); the loss L of one is that share, capped. The evidence
against the contract is an e-process, a bet that starts at 1 and cannot grow in the mean while the contract is kept:

    lambda_k = 2^-k / epsilon, k = 0..7        how much of its money the k-th bettor risks on an answer
    R_t = 1 / (1 + log(t + 1))                 what is kept back after answer t, so that late harm is seen too
    Z_k <- (Z_k + R_{t-1} - R_t) (1 + lambda_k (L_t - epsilon))
    E_t = R_t + (Z_0 + ... + Z_7) / 8

By Ville's inequality E ever reaches 1/delta with probability at most delta while the contract is kept, whatever the
dependence of the tokens within an answer. So it may be looked at after every answer.
"""

from __future__ import annotations

import math

from tide_core.errors import ConfigError
from tide_core.exits.artefact.contract import LOSS_CAP
from tide_core.stats import AuditSnapshot

DEFAULT_DELTA = 0.05
NUM_BETS = 8
MAX_EVIDENCE = 1e300
"""Evidence is cut there: less money than it won only makes a bettor more careful."""


class AuditProcess:
    """The evidence against one contract of one tenant. Another thread may take snapshots."""

    __slots__ = ("_bets", "_state", "delta", "epsilon")

    def __init__(self, epsilon: float | None, delta: float = DEFAULT_DELTA) -> None:
        """`epsilon`: None without a contract; losses are then counted, and no alarm is raised."""
        if epsilon is not None and not _is_share(epsilon):
            raise ConfigError("epsilon", epsilon, "a number above 0 and below 1, or none")
        if not _is_share(delta):
            raise ConfigError("delta", delta, "a number above 0 and below 1")
        self.epsilon, self.delta = epsilon, delta
        self._bets = () if epsilon is None else tuple(2.0**-k / epsilon for k in range(NUM_BETS))
        # Answers, the sum of their losses, the money of each bettor and the alarm; replaced in one go.
        self._state = (0, 0.0, (0.0,) * len(self._bets), False)

    def observe(self, loss: float) -> None:
        """Add the loss of the next answer: the share of its tokens that full depth would have chosen otherwise."""
        if not 0.0 <= loss <= 1.0:
            raise ConfigError("loss", loss, "a share from 0 to 1")
        num, total, money, alarmed = self._state
        loss, num = min(loss, LOSS_CAP), num + 1
        if self.epsilon is not None:
            gain, new = loss - self.epsilon, _kept_back(num - 1) - _kept_back(num)
            money = tuple(
                [min((z + new) * (1.0 + bet * gain), MAX_EVIDENCE) for z, bet in zip(money, self._bets, strict=True)]
            )
            alarmed = alarmed or _evidence(num, money) >= 1.0 / self.delta
        self._state = num, total + loss, money, alarmed

    @property
    def alarmed(self) -> bool:
        """Whether the evidence has ever reached 1/delta."""
        return self._state[3]

    def snapshot(self, tenant: str = "") -> AuditSnapshot:
        num, total, money, alarmed = self._state
        mean = total / num if num else 0.0
        return AuditSnapshot(tenant, self.epsilon, num, mean, _evidence(num, money), self.delta, alarmed)


def _evidence(num: int, money: tuple[float, ...]) -> float:
    if not money:
        return 1.0
    return _kept_back(num) + math.fsum(money) / NUM_BETS


def _kept_back(num: int) -> float:
    """Of the first money after `num` answers. It lasts: with 1 / (num + 1) harm after 10,000 good answers is seen a
    quarter later."""
    return 1.0 / (1.0 + math.log(num + 1))


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value < 1.0

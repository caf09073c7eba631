"""What is compared: full depth, and every contract the artefact can keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_core.errors import ConfigError, RequestError
from tide_core.exits.policy import CheckpointPolicy, resolve_policy
from tide_core.request import SamplingParams

FULL = "full"


@dataclass(frozen=True, slots=True)
class Contract:
    """A mode with its bound or threshold, by the name it has in tables."""

    name: str
    mode: str
    epsilon: float | None = None
    threshold: float | None = None

    def params(self, *, max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
        """Greedy: what is compared are the tokens."""
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            mode=self.mode,
            epsilon=self.epsilon,
            threshold=self.threshold,
        )


def contracts_of(
    checkpoints: Sequence[CheckpointPolicy], num_layers: int, thresholds: Sequence[float] = ()
) -> list[Contract]:
    """Full depth first, then verified, bounded at each certified bound, fast as calibrated and at each threshold."""
    if not checkpoints:
        raise ConfigError("artefact", "none", "an artefact with exits: without one there is nothing to compare")
    bounds = sorted({epsilon for checkpoint in checkpoints for epsilon in checkpoint.exit_thresholds})
    wanted = [
        Contract(FULL, FULL),
        Contract("verified", "verified"),
        *(Contract(f"bounded {epsilon:g}", "bounded", epsilon=epsilon) for epsilon in bounds),
        Contract("fast", "fast"),
        *(Contract(f"fast at {threshold:g}", "fast", threshold=threshold) for threshold in thresholds),
    ]
    return [contract for contract in wanted if _can_keep(contract, checkpoints, num_layers)]


def _can_keep(contract: Contract, checkpoints: Sequence[CheckpointPolicy], num_layers: int) -> bool:
    """Whether all checkpoints are calibrated for it; a threshold that no request may have is the caller's error."""
    params = contract.params(max_tokens=1)
    try:
        resolve_policy(params, checkpoints, num_layers)
    except RequestError:
        return False
    return True

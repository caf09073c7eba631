"""A certified contract of mode fast, as the manifest of an artefact has it, and the loss that it is about. No torch
here."""

from __future__ import annotations

from dataclasses import dataclass

from tide_core.errors import ArtefactError

LOSS_CAP = 0.5
"""Most loss of one answer, in certificates and in the audit: without a cap a single broken answer would weigh as much
as many that are worse than they should be."""


@dataclass(frozen=True, slots=True)
class FastContract:
    """Thresholds at which mode fast was certified on its own answers."""

    epsilon: float
    """Share of an answer's tokens that full depth would have chosen otherwise, in the mean over answers."""
    delta: float
    """Probability that the certificate is wrong; shared among the contracts of an artefact."""
    thresholds: tuple[float, ...]
    """Least score to leave at each exit, the draft head's first."""
    disagreement: float
    """Mean over the answers it was certified on."""
    layers_per_token: float
    num_sequences: int
    max_tokens: int
    """Longest of those answers: nothing is said of longer ones."""

    def __post_init__(self) -> None:
        _share("epsilon", self.epsilon)
        _share("delta", self.delta)
        if not isinstance(self.thresholds, tuple) or not self.thresholds:
            raise ArtefactError("thresholds", self.thresholds, "one number for each exit")
        for value in (*self.thresholds, self.layers_per_token):
            _number("threshold, layers_per_token", value, 1e9)
        _number("disagreement", self.disagreement, 1.0)
        for name in ("num_sequences", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
                raise ArtefactError(name, value, "an integer of at least 1")


def _share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ArtefactError(f"fast.contracts, {name}", value, "a number above 0 and below 1")


def _number(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ArtefactError(f"fast.contracts, {name}", value, f"a number in 0..{most:g}")

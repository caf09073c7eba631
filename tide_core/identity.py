"""The identity of a model: its sizes, configuration, weights and tokenizer. No torch here.

An artefact holds the identity of the model it was calibrated for. Weights are compared by the digest of their files if
both sides know it, otherwise by sampled values, which survive a change of dtype up to its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """One model and its tokenizer."""

    name: str
    """For display only; never compared."""
    architecture: str
    num_layers: int
    width: int
    vocab_size: int
    config_sha256: str
    """Of the settings that the forward depends on, as canonical JSON."""
    tokenizer_sha256: str
    revision: str | None = None
    """Commit on the hub, for a model from there."""
    weights_sha256: str | None = None
    """Over the digests of the weight files; None for a model that was never on disk."""
    weights_sample: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Parameter name to a few of its values."""
    dtype: str = "float32"
    """Of the sampled weights; it sets the tolerance."""

"""What tells one model from another: the sizes, the configuration, the weights, the tokenizer. No torch here.

An artefact carries the identity of the model it was calibrated for. Weights are told apart by the digest of their
files where both sides know it, and otherwise by sampled values, which survive a change of dtype up to its rounding.
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
    """Of the configuration as canonical JSON, without what does not change the forward."""
    tokenizer_sha256: str
    revision: str | None = None
    """Commit on the hub, where the model came from there."""
    weights_sha256: str | None = None
    """Over the digests of the weight files; None for a model that was never on disk."""
    weights_sample: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Parameter name to a few of its values."""
    dtype: str = "float32"
    """Of the weights that were sampled; it sets the tolerance."""

"""What the ledger keeps of a shard. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardEntry:
    name: str
    """Its path in the run."""
    sha256: str
    num_sequences: int
    num_tokens: int

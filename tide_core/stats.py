"""Counters of an engine, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AuditSnapshot:
    """Audit results of mode fast: disagreements with full depth, and the confidence interval of their rate."""

    num_tokens: int
    num_disagreements: int
    rate: float
    lower: float
    upper: float
    delta: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that an engine serves."""

    name: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    version: str
    checkpoint_layers: tuple[int, ...]
    """Layers after which a token may exit."""
    modes: tuple[str, ...]
    artefact: str | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts are since the engine started."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens run, including recomputation after a preemption; cached tokens are not run."""
    num_output_tokens: int
    num_preemptions: int
    blocks_total: int
    blocks_owned: int
    max_blocks_owned: int
    """Most blocks owned at one time."""
    kernels: str
    dead: bool
    last_step_age_s: float
    """Seconds since the loop last finished a step or found nothing to do."""
    artefact: str | None = None
    """Digest of the artefact; None without exits."""
    exits: Mapping[str, Any] = field(default_factory=dict)
    """Exit layers of output tokens and layers run for them: `ExitStats.summary()` over all requests."""
    audits: Mapping[str, AuditSnapshot] = field(default_factory=dict)
    """Audit results by mode; empty before the first audit."""
    predicted_gain: float = 1.0
    """Predicted speed-up of the last plan over full depth."""
    num_plans: int = 0
    num_full_plans: int = 0
    """Plans that ran rows that may exit at full depth, because exits would not pay."""

    @property
    def kv_usage(self) -> float:
        return self.blocks_owned / self.blocks_total

"""Counters of an engine, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AuditSnapshot:
    """What full depth said about the tokens of one mode, with the interval of the rate."""

    num_tokens: int
    num_disagreements: int
    rate: float
    lower: float
    upper: float
    epsilon: float | None
    delta: float
    broken: bool
    num_resets: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine serves."""

    name: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    version: str
    checkpoint_layers: tuple[int, ...]
    """Layers after which a token may leave."""
    epsilons: tuple[float, ...]
    """Bounds that mode bounded was certified for."""
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
    """Prompt tokens run, chunks and recomputation included; cached ones are not run."""
    num_output_tokens: int
    num_preemptions: int
    blocks_total: int
    blocks_owned: int
    blocks_cached: int
    max_blocks_owned: int
    """Most blocks owned at once."""
    kernels: str
    dead: bool
    last_step_age_s: float
    """Seconds since the loop last finished a step or found nothing to do."""
    artefact: str | None = None
    """Digest of the artefact; None without exits."""
    exits: Mapping[str, Any] = field(default_factory=dict)
    """Where output tokens left and what ran for them: `ExitStats.summary()` over all requests."""
    audits: Mapping[str, AuditSnapshot] = field(default_factory=dict)
    """By mode and bound: what full depth said about exits."""
    drafts_planned: int = 0
    """Drafts per cycle of the last plan."""
    predicted_gain: float = 1.0
    """Of that plan, over full depth."""
    num_plans: int = 0
    num_full_plans: int = 0
    """Plans that sent rows that may exit to full depth, because nothing else would pay."""

    @property
    def kv_usage(self) -> float:
        return self.blocks_owned / self.blocks_total

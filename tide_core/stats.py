"""Counters of an engine, as plain numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AuditSnapshot:
    """How answers of mode fast compared with full depth, for one tenant and contract."""

    tenant: str
    """The label of its cache salt: `tenant_label`."""
    epsilon: float | None
    """The contract: most tokens that full depth would have chosen otherwise, as a share. None without a contract."""
    num_answers: int
    """Answers that were judged."""
    mean_loss: float
    """Mean share of an answer's tokens that full depth would have chosen otherwise; of one answer at most 0.5."""
    evidence: float
    """Against the contract. It starts at 1, and at 1/delta the alarm is raised."""
    delta: float
    """Most probability of ever raising an alarm while the contract is kept."""
    alarmed: bool

    @property
    def contract(self) -> str:
        return contract_name(self.epsilon)


def contract_name(epsilon: float | None) -> str:
    """Of mode fast: `fast(0.05)`; `fast` without a certified contract."""
    return "fast" if epsilon is None else f"fast({epsilon:g})"


def tenant_label(cache_salt: str) -> str:
    """How the holder of a cache salt is called in logs and replies: a short hash; `anyone` without a salt."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=6).hexdigest() if cache_salt else "anyone"


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
    audits: Sequence[AuditSnapshot] = ()
    """Of mode fast, by tenant and contract, those with most evidence first; empty before the first judged answer."""
    judged: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Judged answers and the sum of their losses, of all tenants, by `contract_name`."""
    num_audits_dropped: int = 0
    """Answers that were chosen to be judged and were not: too many waited, or full depth failed."""
    predicted_gain: float = 1.0
    """Predicted speed-up of the last plan over full depth."""
    num_plans: int = 0
    num_full_plans: int = 0
    """Plans that ran rows that may exit at full depth, because exits would not pay."""

    @property
    def kv_usage(self) -> float:
        return self.blocks_owned / self.blocks_total

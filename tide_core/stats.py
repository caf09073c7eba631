"""Counters of an engine, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def kv_usage(self) -> float:
        return self.blocks_owned / self.blocks_total

"""What the stage `measure` needs: who times the published exits, on which prompts, and how it is kept in the ledger.

A calibration does not know the engine. Whoever starts it hands it a `Timer`: `tide_core.evaluation.speedup.time_exits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tide_core.calibration.collect.shards import TokenShards
from tide_core.calibration.progress import Progress
from tide_core.calibration.report.data import Measured
from tide_core.identity import ModelIdentity

NEW_TOKENS = 48


class Timer(Protocol):
    """Times mode `verified` against mode `full` in one engine with the artefact in a folder."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        identity: ModelIdentity,
        artefact: Path,
        prompts: Sequence[Sequence[int]],
        *,
        batches: Sequence[int],
        new_tokens: int,
        limit_s: float,
        progress: Progress,
    ) -> Measured:
        """May take the model's attention and modules over; nothing else uses them afterwards."""


def held_out_prompts(shards: TokenShards, new_tokens: int) -> list[list[int]]:
    """Prompts of one part whose answers are at least that long, or of all where none is: past its end, a text is not
    what was calibrated for."""
    sequences = [shards.sequence(index) for index in range(shards.num_sequences)]
    long = [each for each in sequences if len(each.tokens) - each.prompt_len >= new_tokens]
    return [each.tokens[: each.prompt_len].tolist() for each in long or sequences]


def as_info(measured: Measured, digest: str) -> dict[str, Any]:
    """For the ledger: the timings, and of which artefact they are."""
    pairs = [[batch, speedup] for batch, speedup in measured.speedups.items()]
    return {"digest": digest, "speedups": pairs, "conditions": measured.conditions, "left_out": measured.left_out}


def of_info(info: Mapping[str, Any] | None, digest: str) -> Measured | None:
    """What the ledger holds of this very artefact."""
    if info is None or info["digest"] != digest:
        return None
    return Measured({batch: speedup for batch, speedup in info["speedups"]}, info["conditions"], info["left_out"])

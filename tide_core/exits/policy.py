"""From the contract a request names to thresholds at the checkpoint layers of the artefact. No torch here.

A request in mode fast leaves at one checkpoint only, the first it may: tokens that skip layers from different ones
would leave holes in the memory of the deeper heads. Modes verified and bounded need no checkpoint where there are
suffix drafts. A sampled request has no choice of full depth to differ from: for bounded it is served as verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tide_core.errors import RequestError
from tide_core.request import DEFAULT_EPSILON, DEFAULT_MARGIN, NO_EXITS, Budget, ExitPolicy, SamplingParams


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """What calibration found for one checkpoint layer."""

    layer: int
    draft_threshold: float
    fast_threshold: float | None


def resolve_policy(
    params: SamplingParams,
    checkpoints: Sequence[CheckpointPolicy],
    num_layers: int,
    *,
    suffix_drafts: bool = False,
) -> ExitPolicy:
    """The policy of one request; refused by name if this engine cannot keep it."""
    if params.min_layers > num_layers:
        raise RequestError("min_layers", params.min_layers, f"at most the model's {num_layers} layers")
    mode = params.mode or ("verified" if checkpoints or suffix_drafts else "full")
    if mode == "full":
        return NO_EXITS
    if not checkpoints and (mode == "fast" or not suffix_drafts):
        raise RequestError("mode", mode, "full: the engine has no artefact with exits")
    if mode == "bounded" and not params.is_greedy:
        mode = "verified"
    budget = Budget(params.epsilon or DEFAULT_EPSILON, params.margin or DEFAULT_MARGIN) if mode == "bounded" else None
    drafts: list[float] = []
    for checkpoint in checkpoints:
        threshold = _threshold(mode, params.threshold, checkpoint)
        used_up = mode == "fast" and any(each <= 1.0 for each in drafts)
        drafts.append(math.inf if checkpoint.layer < params.min_layers or threshold > 1.0 or used_up else threshold)
    return ExitPolicy(mode, tuple(drafts), budget)


def _threshold(mode: str, asked: float | None, checkpoint: CheckpointPolicy) -> float:
    """Least score to draft at one checkpoint, and in mode fast to leave."""
    if asked is not None:
        return asked
    if mode != "fast":
        return checkpoint.draft_threshold
    if checkpoint.fast_threshold is None:
        expected = f"a threshold as well: the artefact has none for fast at layer {checkpoint.layer}"
        raise RequestError("mode", mode, expected)
    return checkpoint.fast_threshold

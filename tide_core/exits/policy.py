"""From the contract a request names to thresholds at the checkpoint layers of the artefact. No torch here.

A request in mode fast leaves at one checkpoint only, the first it may: tokens that skip layers from different ones
would leave holes in the memory of the deeper heads. A request in mode bounded whose parameters change what full depth
would choose (a temperature, penalties, a bias, a grammar) is served in mode verified: no bound was certified for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tide_core.errors import RequestError
from tide_core.request import DEFAULT_EPSILON, NO_EXITS, ExitPolicy, SamplingParams


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """What calibration found for one checkpoint layer."""

    layer: int
    draft_threshold: float
    exit_thresholds: dict[float, float]
    """Epsilon to the least score that keeps it."""
    fast_threshold: float | None


def resolve_policy(
    params: SamplingParams,
    checkpoints: Sequence[CheckpointPolicy],
    num_layers: int,
    *,
    suffix_drafts: bool = False,
) -> ExitPolicy:
    """The policy of one request; refused by name if this engine cannot keep it. With `suffix_drafts` mode verified
    needs no checkpoint."""
    if params.min_layers > num_layers:
        raise RequestError("min_layers", params.min_layers, f"at most the model's {num_layers} layers")
    mode = params.mode or ("verified" if checkpoints or suffix_drafts else "full")
    if mode == "full":
        return NO_EXITS
    if not checkpoints and mode == "verified" and suffix_drafts:
        return ExitPolicy(mode)
    if not checkpoints:
        raise RequestError("mode", mode, "full: the engine has no artefact with exits")
    asked = (params.epsilon or DEFAULT_EPSILON) if mode == "bounded" else None
    epsilon = None if asked is None else _certified(asked, checkpoints)
    drafts: list[float] = []
    exits: list[float] = []
    for checkpoint in checkpoints:
        draft, leave = _thresholds(mode, epsilon, params.threshold, checkpoint)
        used_up = mode == "fast" and any(threshold <= 1.0 for threshold in drafts)
        if checkpoint.layer < params.min_layers or draft > 1.0 or used_up:
            draft = leave = math.inf
        drafts.append(draft)
        exits.append(leave)
    policy = ExitPolicy(mode, tuple(drafts), tuple(exits), epsilon)
    return without_exits(policy) if mode == "bounded" and changes_the_choice(params) else policy


def changes_the_choice(params: SamplingParams) -> bool:
    """Whether full depth chooses by anything but its largest logit: no bound is certified for such requests."""
    return not params.is_greedy or params.changes_logits or params.grammar is not None


def without_exits(policy: ExitPolicy) -> ExitPolicy:
    """The policy a broken bound falls back to: drafts as before, each verified before it is emitted."""
    return replace(policy, mode="verified", exit_thresholds=(math.inf,) * len(policy.exit_thresholds), epsilon=None)


def _thresholds(
    mode: str, epsilon: float | None, asked: float | None, checkpoint: CheckpointPolicy
) -> tuple[float, float]:
    """Least scores to draft and to leave at one checkpoint."""
    if mode == "fast":
        leave = checkpoint.fast_threshold if asked is None else asked
        if leave is None:
            expected = f"a threshold as well: the artefact has none for fast at layer {checkpoint.layer}"
            raise RequestError("mode", mode, expected)
        return leave, leave
    draft = checkpoint.draft_threshold if asked is None else asked
    return draft, math.inf if epsilon is None else checkpoint.exit_thresholds[epsilon]


def _certified(epsilon: float, checkpoints: Sequence[CheckpointPolicy]) -> float:
    """The largest epsilon every checkpoint is calibrated for that is at most the asked one."""
    known = set.intersection(*(set(checkpoint.exit_thresholds) for checkpoint in checkpoints))
    kept = [value for value in known if value <= epsilon + 1e-12]
    if not kept:
        listed = ", ".join(f"{value:g}" for value in sorted(known)) or "none"
        raise RequestError("epsilon", epsilon, f"at least one the artefact is calibrated for: {listed}")
    return max(kept)

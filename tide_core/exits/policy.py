"""From the contract a request names to thresholds at the exits of the artefact. No torch here.

Modes verified and bounded draft from the checkpoints, and need none where there are suffix drafts. A sampled request
has no choice of full depth to differ from: for bounded it is served as verified. A request in mode fast leaves at the
fast exits, at the thresholds of a certified contract or at one of its own. Artefacts without fast exits have one
uncertified threshold instead, and a request leaves at one checkpoint only, the first it may: heads of deeper ones would
have holes in their memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tide_core.errors import RequestError
from tide_core.request import DEFAULT_EPSILON, DEFAULT_MARGIN, NO_EXITS, Budget, ExitPolicy, SamplingParams


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """What calibration found for one checkpoint layer."""

    layer: int
    draft_threshold: float
    fast_threshold: float | None


@dataclass(frozen=True, slots=True)
class FastPolicy:
    """What calibration found for mode fast."""

    layers: tuple[int, ...]
    """Of its exits."""
    contracts: Mapping[float, tuple[float, ...]]
    """Thresholds at the exits by the certified epsilon."""


def resolve_policy(
    params: SamplingParams,
    checkpoints: Sequence[CheckpointPolicy],
    num_layers: int,
    *,
    suffix_drafts: bool = False,
    fast: FastPolicy | None = None,
) -> ExitPolicy:
    """The policy of one request; refused by name if this engine cannot keep it."""
    if params.min_layers > num_layers:
        raise RequestError("min_layers", params.min_layers, f"at most the model's {num_layers} layers")
    mode = params.mode or ("verified" if checkpoints or suffix_drafts else "full")
    if mode == "full":
        return NO_EXITS
    if not checkpoints and (mode == "fast" or not suffix_drafts):
        raise RequestError("mode", mode, "full: the engine has no artefact with exits")
    if mode == "fast" and fast is not None:
        return _fast(params, fast)
    if mode == "fast" and params.epsilon is not None:
        raise RequestError("epsilon", params.epsilon, "none: the artefact has no certified contract for mode fast")
    if mode == "bounded" and not params.is_greedy:
        mode = "verified"
    budget = Budget(params.epsilon or DEFAULT_EPSILON, params.margin or DEFAULT_MARGIN) if mode == "bounded" else None
    drafts: list[float] = []
    for checkpoint in checkpoints:
        threshold = _threshold(mode, params.threshold, checkpoint)
        used_up = mode == "fast" and any(each <= 1.0 for each in drafts)
        drafts.append(math.inf if checkpoint.layer < params.min_layers or threshold > 1.0 or used_up else threshold)
    return ExitPolicy(mode, tuple(drafts), budget)


def _fast(params: SamplingParams, fast: FastPolicy) -> ExitPolicy:
    """Mode fast at a certified contract, or at a threshold of the request's own."""
    epsilon = None
    if params.threshold is not None:
        if params.epsilon is not None:
            raise RequestError("threshold", params.threshold, "none beside epsilon, which names a certified contract")
        thresholds: tuple[float, ...] = (params.threshold,) * len(fast.layers)
    else:
        fitting = [each for each in fast.contracts if params.epsilon is None or each <= params.epsilon]
        if not fitting:
            certified = ", ".join(f"{each:g}" for each in sorted(fast.contracts)) or "none"
            expected = f"at least the smallest one that is certified ({certified}), or a threshold"
            raise RequestError("epsilon", params.epsilon, expected)
        epsilon = max(fitting)
        thresholds = fast.contracts[epsilon]
    in_force = tuple(
        math.inf if layer < params.min_layers or threshold > 1.0 else threshold
        for layer, threshold in zip(fast.layers, thresholds, strict=True)
    )
    # Greedy answers at all exits were certified, and no others.
    certified_as_is = params.is_greedy and params.min_layers <= fast.layers[0]
    return ExitPolicy("fast", in_force, epsilon=epsilon if certified_as_is else None)


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

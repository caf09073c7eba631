"""The autoscaling policy: replicas by tokens in flight and KV memory in use, not by number of requests.

Named in the Serve config:

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: deploy.autoscaling:by_load

Every replica reports its load (`record_autoscaling_stats` of the application); Serve averages the reports over
`look_back_period_s`, calls `by_load`, and applies its delays, factors and bounds to the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TOKENS_IN_FLIGHT, KV_USAGE = "tokens_in_flight", "kv_usage"
TARGET_TOKENS = "target_tokens_in_flight"
"""Sent with the stats of a replica: its target load."""
TARGET_KV_USAGE = 0.7
DEFAULT_TARGET_TOKENS = 8192.0
ROUNDING = 1e-9


def by_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas at which none exceeds its target load, and the policy state (none)."""
    metrics = context.aggregated_metrics or {}
    tokens, usage = metrics.get(TOKENS_IN_FLIGHT, {}), metrics.get(KV_USAGE, {})
    if not tokens and not usage:  # replicas are starting: keep the current target
        wanted = context.target_num_replicas
    else:
        target = max(metrics.get(TARGET_TOKENS, {}).values(), default=0.0)  # 0 for an empty series
        wanted = replicas_for(tokens.values(), usage.values(), target_tokens=target or DEFAULT_TARGET_TOKENS)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def replicas_for(tokens: Iterable[float], usage: Iterable[float], *, target_tokens: float) -> int:
    """Replicas that both signals need, each given per replica. 0 without load; `min_replicas` applies then."""
    shares = (sum(tokens) / target_tokens, sum(usage) / TARGET_KV_USAGE)
    return max(math.ceil(share - ROUNDING) for share in shares)

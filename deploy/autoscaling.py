"""The autoscaling policy: replicas by rows in use, waiting time and KV memory, not by number of requests.

Named in the Serve config:

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: deploy.autoscaling:by_load

Every replica reports its load (`record_autoscaling_stats` of the application); Serve averages the reports over
`look_back_period_s`, calls `by_load`, and applies its delays, factors and bounds to the result. What a request might
still generate (`max_tokens`) is no signal: callers send large limits and hardly use them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ROWS = "rows"
"""Requests that run or wait, as a share of `max_rows`."""
WAIT_S, KV_USAGE = "wait_s", "kv_usage"
TARGET_WAIT_S = "target_wait_s"
"""Sent with the stats of a replica: how long a request may wait for its first token."""
TARGET_ROWS, TARGET_KV_USAGE, DEFAULT_WAIT_S = 0.8, 0.7, 2.0
ROUNDING = 1e-9


def most_replicas(deployment_config: Any) -> int:
    """Most replicas that a deployment may have at once, by Serve's own settings of it; 1 if they are not known."""
    scaling = getattr(deployment_config, "autoscaling_config", None)
    most = getattr(deployment_config, "num_replicas", 1) if scaling is None else scaling.max_replicas
    return max(1, int(most or 1))


def by_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas at which none exceeds its target load, and the policy state (none)."""
    metrics = context.aggregated_metrics or {}
    rows, usage, waits = (metrics.get(name, {}).values() for name in (ROWS, KV_USAGE, WAIT_S))
    if not rows and not usage and not waits:  # replicas are starting: keep the current target
        wanted = context.target_num_replicas
    else:
        target = max(metrics.get(TARGET_WAIT_S, {}).values(), default=0.0)  # 0 for an empty series
        wanted = replicas_for(rows, usage, waits, target_wait_s=target or DEFAULT_WAIT_S)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def replicas_for(
    rows: Collection[float], usage: Collection[float], waits: Collection[float], *, target_wait_s: float
) -> int:
    """Replicas that all signals need, each given per replica. 0 without load; `min_replicas` applies then.

    Requests that wait too long need one replica more than there are, even if rows and memory are free: prompts may be
    long. A queue of many `max_rows` needs as many at once."""
    shares = (sum(rows) / TARGET_ROWS, sum(usage) / TARGET_KV_USAGE)
    wanted = max(math.ceil(share - ROUNDING) for share in shares)
    late = bool(waits) and sum(waits) / len(waits) > target_wait_s
    return max(wanted, len(waits) + 1) if late else wanted

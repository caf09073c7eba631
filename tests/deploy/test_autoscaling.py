"""The number of replicas: enough for the tokens in flight and the KV memory in use."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.autoscaling import DEFAULT_TARGET_TOKENS, KV_USAGE, TARGET_TOKENS, TOKENS_IN_FLIGHT, by_load, replicas_for


def context_of(
    *,
    tokens: list[float] | None = None,
    usage: list[float] | None = None,
    target: float | None = 1000.0,
    current: int | None = None,
    low: int = 1,
    high: int = 8,
    **config: Any,
) -> Any:
    """What Serve hands to a policy: reports by replica id."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    where = DeploymentID("TideServer", "tide")
    reports = max(len(tokens or ()), len(usage or ()))
    ids = [ReplicaID(f"replica{number}", where) for number in range(reports)]
    metrics: dict[str, dict[Any, float]] = {}
    if tokens is not None:
        metrics[TOKENS_IN_FLIGHT] = dict(zip(ids, tokens, strict=True))
    if usage is not None:
        metrics[KV_USAGE] = dict(zip(ids, usage, strict=True))
    if target is not None:
        metrics[TARGET_TOKENS] = dict.fromkeys(ids, target)
    running = reports if current is None else current
    return AutoscalingContext(
        deployment_id=where,
        deployment_name=where.name,
        app_name=where.app_name,
        current_num_replicas=running,
        target_num_replicas=running,
        running_replicas=ids,
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=lambda: metrics,
        raw_metrics=None,
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(min_replicas=low, max_replicas=high, **config),
    )


@pytest.mark.parametrize(
    ("tokens", "usage", "wanted"),
    [
        ([0.0], [0.0], 0),
        ([1.0], [0.0], 1),
        ([1000.0], [0.1], 1),
        ([1001.0], [0.1], 2),
        ([900.0, 900.0, 900.0], [0.1, 0.1, 0.1], 3),
        ([100.0, 100.0, 100.0], [0.1, 0.1, 0.1], 1),
        ([100.0], [0.71], 2),
        ([100.0], [0.7], 1),
        ([100.0] * 5, [0.14] * 5, 1),
        ([5000.0, 0.0], [0.9, 0.9], 5),
        ([0.0, 0.0], [1.0, 1.0], 3),
    ],
)
def test_the_number_is_enough_for_both_signals(tokens: list[float], usage: list[float], wanted: int) -> None:
    assert replicas_for(tokens, usage, target_tokens=1000.0) == wanted


@pytest.mark.parametrize(
    ("low", "high", "tokens", "number"),
    [(1, 8, 0.0, 1), (0, 8, 0.0, 0), (2, 8, 10.0, 2), (1, 4, 1e6, 4), (3, 3, 0.0, 3)],
)
def test_the_answer_stays_within_the_bounds(low: int, high: int, tokens: float, number: int) -> None:
    assert by_load(context_of(tokens=[tokens], usage=[0.0], low=low, high=high)) == (number, {})


def test_without_reports_the_number_stays_that_was_wanted() -> None:
    assert by_load(context_of(current=3)) == (3, {})
    no_metrics = context_of(current=3)
    no_metrics._aggregated_metrics_value = None
    assert by_load(no_metrics) == (3, {})


def test_each_signal_counts_alone() -> None:
    assert by_load(context_of(tokens=[2500.0]))[0] == 3
    assert by_load(context_of(usage=[0.9, 0.9]))[0] == 3


def test_the_share_of_a_replica_is_what_replicas_say_or_a_default() -> None:
    assert by_load(context_of(tokens=[4000.0], target=2000.0))[0] == 2
    for nothing in (None, 0.0):
        assert by_load(context_of(tokens=[DEFAULT_TARGET_TOKENS + 1], target=nothing))[0] == 2


def test_serve_can_send_the_policy_to_its_controller_and_apply_its_delays_and_bounds() -> None:
    """By the path of the config: imported, pickled, called with a context, wrapped in Serve's own rules."""
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingPolicy

    policy = AutoscalingPolicy(policy_function="deploy.autoscaling:by_load").get_policy()
    assert policy is not by_load
    wrapped = _apply_autoscaling_config(policy)
    number, state = wrapped(context_of(tokens=[3500.0], usage=[0.2], upscale_delay_s=0.0))
    assert number == 4
    assert isinstance(state, dict)
    assert wrapped(context_of(tokens=[3500.0], usage=[0.2], upscale_delay_s=60.0))[0] == 1, "not yet"


def test_the_application_reports_what_the_policy_reads() -> None:
    from types import SimpleNamespace

    from deploy.app import TideServer

    server = SimpleNamespace(
        service=SimpleNamespace(
            tokens_in_flight=7, engine=SimpleNamespace(stats=lambda: SimpleNamespace(kv_usage=0.25))
        ),
        _args=SimpleNamespace(target_tokens_in_flight=512),
    )
    reported = TideServer.func_or_class.record_autoscaling_stats(server)  # type: ignore[attr-defined]
    assert reported == {TOKENS_IN_FLIGHT: 7.0, KV_USAGE: 0.25, TARGET_TOKENS: 512.0}

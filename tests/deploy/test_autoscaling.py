"""The number of replicas: enough for the rows and the KV memory in use, and one more where requests wait too long."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.autoscaling import (
    DEFAULT_WAIT_S,
    KV_USAGE,
    ROWS,
    TARGET_WAIT_S,
    WAIT_S,
    by_load,
    most_replicas,
    replicas_for,
)


def context_of(
    *,
    rows: list[float] | None = None,
    usage: list[float] | None = None,
    waits: list[float] | None = None,
    target: float | None = 3.0,
    current: int | None = None,
    low: int = 1,
    high: int = 8,
    **config: Any,
) -> Any:
    """What Serve hands to a policy: reports by replica id."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    where = DeploymentID("TideServer", "tide")
    reports = max(len(rows or ()), len(usage or ()), len(waits or ()))
    ids = [ReplicaID(f"replica{number}", where) for number in range(reports)]
    metrics: dict[str, dict[Any, float]] = {}
    for name, values in ((ROWS, rows), (KV_USAGE, usage), (WAIT_S, waits)):
        if values is not None:
            metrics[name] = dict(zip(ids, values, strict=True))
    if target is not None:
        metrics[TARGET_WAIT_S] = dict.fromkeys(ids, target)
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
    ("rows", "usage", "waits", "wanted"),
    [
        ([0.0], [0.0], [0.0], 0),
        ([0.01], [0.0], [0.0], 1),
        ([0.8], [0.1], [3.0], 1),
        ([0.81], [0.1], [0.0], 2),
        ([0.7, 0.7, 0.7], [0.1, 0.1, 0.1], [0.0] * 3, 3),
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], [0.0] * 3, 1),
        ([0.1], [0.71], [0.0], 2),
        ([0.1], [0.7], [0.0], 1),
        ([4.0, 0.0], [0.9, 0.9], [0.0, 0.0], 5),
        ([0.1], [0.1], [3.1], 2),
        ([0.1, 0.1], [0.1, 0.1], [6.1, 0.0], 3),
        ([0.1, 0.1], [0.1, 0.1], [5.9, 0.0], 1),
        ([4.0], [0.1], [9.0], 5),
    ],
)
def test_the_number_is_enough_for_every_signal(
    rows: list[float], usage: list[float], waits: list[float], wanted: int
) -> None:
    assert replicas_for(rows, usage, waits, target_wait_s=3.0) == wanted


@pytest.mark.parametrize(
    ("low", "high", "rows", "number"),
    [(1, 8, 0.0, 1), (0, 8, 0.0, 0), (2, 8, 0.1, 2), (1, 4, 1e6, 4), (3, 3, 0.0, 3)],
)
def test_the_answer_stays_within_the_bounds(low: int, high: int, rows: float, number: int) -> None:
    assert by_load(context_of(rows=[rows], usage=[0.0], low=low, high=high)) == (number, {})


def test_without_reports_the_number_stays_that_was_wanted() -> None:
    assert by_load(context_of(current=3)) == (3, {})
    no_metrics = context_of(current=3)
    no_metrics._aggregated_metrics_value = None
    assert by_load(no_metrics) == (3, {})


def test_each_signal_counts_alone() -> None:
    assert by_load(context_of(rows=[2.0]))[0] == 3
    assert by_load(context_of(usage=[0.9, 0.9]))[0] == 3
    assert by_load(context_of(waits=[4.0, 4.0]))[0] == 3


def test_the_longest_wait_is_what_replicas_say_or_a_default() -> None:
    assert by_load(context_of(waits=[4.0], target=5.0))[0] == 1
    for nothing in (None, 0.0):
        assert by_load(context_of(waits=[DEFAULT_WAIT_S + 0.1], target=nothing))[0] == 2


def test_serve_can_send_the_policy_to_its_controller_and_apply_its_delays_and_bounds() -> None:
    """By the path of the config: imported, pickled, called with a context, wrapped in Serve's own rules."""
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingPolicy

    policy = AutoscalingPolicy(policy_function="deploy.autoscaling:by_load").get_policy()
    assert policy is not by_load
    wrapped = _apply_autoscaling_config(policy)
    number, state = wrapped(context_of(rows=[3.0], usage=[0.2], upscale_delay_s=0.0))
    assert number == 4
    assert isinstance(state, dict)
    assert wrapped(context_of(rows=[3.0], usage=[0.2], upscale_delay_s=60.0))[0] == 1, "not yet"


def test_the_application_reports_what_the_policy_reads() -> None:
    from types import SimpleNamespace

    from deploy.app import TideServer

    engine = SimpleNamespace(
        stats=lambda: SimpleNamespace(kv_usage=0.25, num_running=6, num_waiting=2),
        config=SimpleNamespace(max_rows=16),
    )
    server = SimpleNamespace(
        service=SimpleNamespace(longest_wait_s=1.5, engine=engine), _args=SimpleNamespace(target_wait_s=2.5)
    )
    reported = TideServer.func_or_class.record_autoscaling_stats(server)  # type: ignore[attr-defined]
    assert reported == {ROWS: 0.5, WAIT_S: 1.5, KV_USAGE: 0.25, TARGET_WAIT_S: 2.5}


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 1),
        ({"num_replicas": 3}, 3),
        ({"num_replicas": 2, "autoscaling_config": {"min_replicas": 1, "max_replicas": 8}}, 8),
    ],
)
def test_the_most_replicas_of_a_deployment_are_found_in_serves_own_settings(given: dict[str, Any], most: int) -> None:
    from ray.serve._private.config import DeploymentConfig

    assert most_replicas(DeploymentConfig(**given)) == most
    assert most_replicas(None) == 1

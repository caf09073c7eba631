"""Replicas come with load and go with it, and no answer is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.live import Server, default_config, serving
from tests.evaluation.on_disk import save_model
from tests.serve.load import Streams, until

pytestmark = pytest.mark.serve


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = default_config()
    app = config["applications"][0]
    app["args"] = {
        "served_model_name": "tiny",
        "target_tokens_in_flight": 100,
        "engine": {"model": str(save_model(tmp_path / "model")), "num_threads": 1, "kv_memory_gib": 0.05},
    }
    deployment = app["deployments"][0]
    deployment["ray_actor_options"] = {"num_cpus": 0.5}
    deployment.pop("num_replicas")
    deployment.pop("user_config")
    deployment["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        "policy": {"policy_function": "deploy.autoscaling:by_load"},
    }
    with serving(config) as server:
        yield server


def test_a_second_replica_comes_with_load_and_goes_after_it(server: Server) -> None:
    assert len(server.replicas()) == 1
    with Streams(server, count=4) as streams:
        assert until(lambda: len(server.replicas()) == 2)
        arrived = len(streams.answers)
        assert until(lambda: len(streams.answers) > arrived + 20)
    assert until(lambda: len(server.replicas()) == 1)
    assert streams.errors == []
    assert all(len(answer.tokens) == streams.max_tokens for answer in streams.answers)

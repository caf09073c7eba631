"""The multi-node path, on one machine: the cluster of k8s/base in namespaces, a head and two workers with one replica
each. `python -m benchmarks.nodes` is the same with the demo model, and measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.bars import Part
from benchmarks.nodes import parts
from benchmarks.nodes.clients import LoadBalancer
from benchmarks.nodes.cluster import API_KEY, Cluster, cluster_config
from benchmarks.nodes.machines import unsupported_reason
from benchmarks.nodes.parts import rehearsal
from tests.evaluation.on_disk import PROMPTS, save_artefact_for_it, save_model
from tide_client import TideClient
from tide_core import Engine, SamplingParams

WHY_NOT = unsupported_reason()
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(1800),  # longer than what waits for nodes, which says what they logged
]
ENVIRONMENT = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "10"}
"""So that a replica goes soon after its streams have ended. With the 3 s of deploy/config.yaml one run of many had a
new request that failed, it was not seen why: HAProxy may need longer to leave a replica out on a busy machine."""
LONG_TOKENS, SHORT_TOKENS = 220, 60
PROMPTS_OF_ALL = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS][:16]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """deploy/config.cpu.yaml with a tiny model that takes its time."""
    folder: Path = tmp_path_factory.mktemp("nodes")
    whole = cluster_config()
    app = whole["applications"][0]
    app["import_path"] = "tests.serve.paced_app:build_app"
    app["args"]["engine"] = {
        "model": str(save_model(folder / "model")),
        "artefact": str(save_artefact_for_it(folder / "artefact")),
        "num_threads": 1,
        "kv_memory_gib": 0.05,
        "suffix_drafts": False,  # a tiny model repeats itself, and streams are to last
    }
    del app["deployments"][0]["ray_actor_options"]["runtime_env"]  # spare processes: tests/serve/test_serve_run.py
    for holder in (whole["controller_options"], app):
        holder["runtime_env"]["env_vars"].update(ENVIRONMENT)
    return whole


@pytest.fixture(scope="module")
def place(config: dict[str, Any]) -> Iterator[tuple[Cluster, LoadBalancer]]:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing here is measured: less work for the dashboard, its agents and Serve's controller.
        patch.setattr("benchmarks.nodes.cluster.POLL_S", 1.0)
        patch.setenv("REPORTER_UPDATE_INTERVAL_MS", "60000")
        with rehearsal(config) as place:
            yield place


@pytest.fixture(scope="module")
def expected(config: dict[str, Any]) -> dict[str, list[int]]:
    """By an engine without exits, here."""
    settings = config["applications"][0]["args"]["engine"]
    with Engine(**{**settings, "artefact": "none"}) as engine:
        answers = engine.generate(PROMPTS_OF_ALL, SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True))
    ids = [[token.token_id for token in answer.tokens] for answer in answers]
    return dict(zip(PROMPTS_OF_ALL, ids, strict=True))


def missed(part: Part) -> list[str]:
    """Bars that do not hold. How long something took is measured by the benchmark, not asserted here."""
    return [bar.name for bar in part.bars if not bar.holds and not bar.name.startswith("s until")]


def test_the_two_replicas_are_on_two_workers_and_none_on_the_head(place: tuple[Cluster, LoadBalancer]) -> None:
    cluster, door = place
    assert sorted(replica.address for replica in cluster.running()) == sorted(cluster.addresses())
    assert sorted(door.ready) == sorted(cluster.addresses())


def test_abort_reaches_the_replica_that_has_the_request(place: tuple[Cluster, LoadBalancer]) -> None:
    """A call is sent to either replica; four requests on two replicas leave little to chance."""
    _, door = place
    names = [f"long {number}" for number in range(4)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(TideClient(door.endpoint().address, api_key=API_KEY)) for _ in range(2)]
        streams = {}
        for number, name in enumerate(names):
            stream = clients[number % 2].stream(PROMPTS[0], max_tokens=LONG_TOKENS, ignore_eos=True, request_id=name)
            streams[name] = stack.enter_context(stream)
            next(iter(stream))
        assert [clients[0].abort(name) for name in names] == [True] * 4
        assert not clients[0].abort("of nobody")
        for stream in streams.values():
            list(stream)
            assert stream.answer.finish_reason == "abort"


def test_a_rolling_update_cuts_no_stream_and_fails_no_request(
    place: tuple[Cluster, LoadBalancer], config: dict[str, Any], expected: dict[str, list[int]]
) -> None:
    part = parts.updated(*place, config, expected)
    assert missed(part) == [], str(part.data)  # as text, or pytest shortens it


def test_a_node_that_dies_costs_its_own_streams_and_no_other_and_is_replaced(
    place: tuple[Cluster, LoadBalancer], expected: dict[str, list[int]]
) -> None:
    part = parts.killed(*place, {prompt: ids[:SHORT_TOKENS] for prompt, ids in expected.items()})
    assert missed(part) == [], str(part.data)  # as text, or pytest shortens it
    assert part.data["streams_broken"] > 0, "or nothing was killed"

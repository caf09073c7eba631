"""What operators do to a running service: another policy, other exits, other arguments, and what they can see of it."""

from __future__ import annotations

import copy
import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import ROOT
from benchmarks.common.live import Server, default_config, serving, serving_again
from deploy import processes, run
from deploy.metrics import METRICS
from deploy.published import CURRENT, Publication
from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.observability.names import RARE, exported_by, labels_asked_for
from tests.serve.load import PATIENCE_S, Streams, until
from tests.serve.paced_app import STEP_VARIABLE
from tide_client import TideClient
from tools.dashboard import queries
from tools.promql_syntax import parse

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("operations")
    folders = {
        "model": save_model(root / "model"),
        "first": save_artefact_for_it(root / "first"),
        "second": save_artefact_for_it(root / "second", draft_threshold=0.3),
        "published": root / "published",
    }
    Publication(str(folders["published"])).publish(folders["first"], "the first calibration")
    return folders


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    config = default_config(spare=False)
    config["logging_config"] = {"encoding": "JSON", "log_level": "INFO"}
    app = config["applications"][0]
    app["args"] = {
        "served_model_name": "tiny",
        "follow_s": 0.5,
        "engine": {
            "model": str(folders["model"]),
            "artefact": str(folders["published"] / CURRENT),
            "num_threads": 1,
            "kv_memory_gib": 0.05,
            "audit_share": 1.0,
            "suffix_drafts": False,  # a tiny model repeats itself, and streams are to last
        },
    }
    # Streams last while something is changed, and leave it the cores.
    app["import_path"] = "tests.serve.paced_app:build_app"
    app.setdefault("runtime_env", {}).setdefault("env_vars", {})[STEP_VARIABLE] = "0.02"
    app["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.5}
    for place in (
        config["controller_options"],
        app,
    ):  # 3 s are short for the proxy of a busy machine
        place["runtime_env"]["env_vars"]["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "10"
    with serving(config) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[TideClient]:
    with TideClient(server.address, timeout_s=PATIENCE_S) as client:
        yield client


def with_user_config(server: Server, **values: Any) -> dict[str, Any]:
    config = copy.deepcopy(server.config)
    config["applications"][0]["deployments"][0]["user_config"] = values
    return config


def test_other_exits_are_taken_without_a_restart_or_a_failed_stream(
    server: Server, client: TideClient, folders: dict[str, Path]
) -> None:
    [replica] = server.replicas()
    first = client.model_info().artefact_digest
    with Streams(server) as streams:
        server.deploy(with_user_config(server, artefact=str(folders["second"])))
        assert until(lambda: client.model_info().artefact_digest != first)
        num = len(streams.answers)
        assert until(lambda: len(streams.answers) > num + 2)
    second = client.model_info().artefact_digest
    assert streams.errors == []
    assert {answer.artefact_digest for answer in streams.answers} == {first, second}
    assert len({answer.text for answer in streams.answers}) == 1, "verified is lossless with either"
    assert [process.pid for process in server.replicas()] == [replica.pid]
    server.deploy(server.config)
    assert until(lambda: client.model_info().artefact_digest == first)


def test_a_published_artefact_is_taken_without_an_edit_and_the_pointer_goes_back(
    server: Server, client: TideClient, folders: dict[str, Path]
) -> None:
    [replica] = server.replicas()
    publication, first = Publication(str(folders["published"])), client.model_info().artefact_digest
    with Streams(server) as streams:
        second = publication.publish(folders["second"], "the second calibration").digest
        assert until(lambda: client.model_info().artefact_digest == second)
        assert publication.point("previous", "an operator").digest == first
        assert until(lambda: client.model_info().artefact_digest == first)
    assert streams.errors == []
    assert [process.pid for process in server.replicas()] == [replica.pid]
    assert f"{first[:16]} -> {second[:16]}, by the second calibration" in server.replica_logs
    assert f"{second[:16]} -> {first[:16]}, by an operator" in server.replica_logs
    assert until(lambda: re.search(r'ray_tide_artefact_moves_total\{.*result="taken".*\} 2\.0', exported(server)))


def test_a_policy_that_cannot_be_taken_leaves_the_old_one_serving(server: Server, client: TideClient) -> None:
    with Streams(server) as streams:
        server.deploy(with_user_config(server, artefact="/nowhere"))
        assert until(lambda: "user_config is refused" in server.replica_logs)
        num = len(streams.answers)
        assert until(lambda: len(streams.answers) > num)
    assert streams.errors == []
    assert "/nowhere" in server.replica_logs
    assert until(lambda: is_refused(server))
    status = server.shell("tide status", ROOT)
    assert status.returncode == 1
    assert re.search(r"policy refused: .*/nowhere.* \(1 of 1 replicas", status.stderr)
    [deployment] = yaml.safe_load(status.stdout)["applications"]["tide"]["deployments"].values()
    assert deployment["status"] == "HEALTHY", "what `serve status` says"
    assert "/nowhere" in str(deployment["policy_refused"])
    server.deploy(server.config)
    assert until(lambda: not is_refused(server))
    status = server.shell("tide status", ROOT)
    assert (status.returncode, "policy_refused" in status.stdout) == (0, False), status.stderr


def is_refused(server: Server) -> bool:
    return re.search(r"ray_tide_config_refused\{.*\} 1\.0", exported(server)) is not None


def test_a_replica_that_starts_under_a_refused_policy_comes_up_with_the_last_good_one(
    server: Server, client: TideClient
) -> None:
    [first] = server.replicas()
    server.deploy(with_user_config(server, mode="full"))
    assert until(lambda: client.model_info().default_mode == "full")
    server.deploy(with_user_config(server, mode="verified", artefact="/not here"))
    assert until(lambda: "/not here" in server.replica_logs)
    first.kill()
    assert until(lambda: [each.pid for each in server.replicas()] not in ([], [first.pid]))
    assert until(server.is_healthy)
    assert client.model_info().default_mode == "full"
    assert until(lambda: is_refused(server))
    server.deploy(server.config)
    assert until(lambda: client.model_info().default_mode == "verified")


def test_other_arguments_replace_the_replica_and_every_stream_ends_whole(server: Server, client: TideClient) -> None:
    [replica] = server.replicas()
    config = copy.deepcopy(server.config)
    config["applications"][0]["args"]["served_model_name"] = "renamed"
    with Streams(server) as streams:
        server.deploy(config)
        assert until(lambda: client.model_info().model == "renamed")
    assert streams.errors == []
    assert {answer.model for answer in streams.answers} >= {"tiny"}
    assert until(lambda: replica.pid not in [process.pid for process in server.replicas()])


def test_every_metric_of_the_table_is_exported(server: Server, client: TideClient) -> None:
    ask_in_every_mode(client)
    wanted = {name for metric in METRICS for name in exported_by(metric)} - set(RARE)

    def missing() -> set[str]:
        text = exported(server)
        return {name for name in wanted if f"\n{name}{{" not in text}

    assert until(lambda: not missing()), missing()


def test_dashboard_and_alerts_ask_for_names_and_labels_that_this_server_exports(
    server: Server, client: TideClient
) -> None:
    ask_in_every_mode(client)
    assert server.post({"model": client.model_info().model, "prompt": "the cat", "max_tokens": 2})[0] == 200
    asked: defaultdict[str, set[str]] = defaultdict(set)
    for _, text in queries():
        for name, labels in labels_asked_for(parse(text)).items():
            asked[name] |= labels

    def missing() -> dict[str, set[str]]:
        """By metric: labels of a query that no series of it has; a metric that is not there at all lacks its name."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for family in text_string_to_metric_families(exported(server)):
            for sample in family.samples:
                found[sample.name] |= {"__name__", *sample.labels}
        lacks = {name: {"__name__", *labels} - found[name] for name, labels in asked.items() if name not in RARE}
        return {name: labels for name, labels in lacks.items() if labels}

    assert until(lambda: not missing()), missing()


def ask_in_every_mode(client: TideClient) -> None:
    for mode in ("full", "verified", "bounded", "fast", "verified"):  # one twice, for the prefix cache
        client.generate("the cat sat on the mat " * 8, max_tokens=60, ignore_eos=True, mode=mode)


def exported(server: Server) -> str:
    """What every node exports now; empty until Ray has written where that is."""
    discovery = server.folder / "ray" / "prom_metrics_service_discovery.json"
    text = ""
    for target in json.loads(discovery.read_text())[0]["targets"] if discovery.exists() else []:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as reply:
                text += reply.read().decode()
        except OSError:
            continue
    return text


def test_a_log_in_json_has_a_line_for_every_request_with_its_ids_and_counts(server: Server, client: TideClient) -> None:
    answer = client.generate("the dog", max_tokens=7, ignore_eos=True)

    def lines() -> list[Any]:
        found = []
        for line in server.replica_logs.splitlines(keepends=True):
            if answer.request_id in line and line.endswith("\n"):
                found.append(json.loads(line))
        return found

    assert until(lambda: bool(lines()))
    [line] = lines()
    assert line["tide_request_id"] == answer.request_id
    assert line["output_tokens"] == 7
    assert line["finish"] == "length"
    assert line["request_id"], "Serve's own, as well"


def test_a_second_replica_comes_with_load_and_goes_after_it(server: Server) -> None:
    """And no answer is lost on the way. The server gets another config: only the test of its death comes after this."""
    config = copy.deepcopy(server.config)
    config["applications"][0]["args"]["engine"]["max_rows"] = 4
    deployment = config["applications"][0]["deployments"][0]
    deployment.pop("num_replicas")
    deployment["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        "policy": {"policy_function": "deploy.autoscaling:by_load"},
    }
    before = {replica.pid for replica in server.replicas()}
    server.deploy(config)
    assert until(lambda: len(server.replicas()) == 1 and not before & {replica.pid for replica in server.replicas()})
    with Streams(server, count=4) as streams:
        assert until(lambda: len(server.replicas()) == 2)
        num = len(streams.answers)
        assert until(lambda: len(streams.answers) > num + 20)
    assert until(lambda: len(server.replicas()) == 1)
    assert streams.errors == []
    assert all(len(answer.tokens) == streams.max_tokens for answer in streams.answers)


def test_a_session_that_is_killed_hard_is_cleared_away_by_the_next_start(server: Server) -> None:
    """As when memory runs out. `serve run` leaves an HAProxy that holds its ports; `tide serve` leaves nothing. What is
    left may also be ended by another start of this user, so no line of the log is asked for."""
    assert server.haproxies()
    server.process.kill()
    server.process.wait()
    assert until(lambda: not any("/raylet --" in command for command in server.commands_of_session()))
    with serving_again(server, command=("tide", "serve")) as again:
        assert server.haproxies() == []
        assert again.post({"model": "tiny", "prompt": "the cat", "max_tokens": 2})[0] == 200
        again.process.kill()  # alone: its `serve run` begins to end, and still has everything
        again.process.wait()
        with serving_again(again, command=("tide", "serve")) as third:
            assert third.post({"model": "tiny", "prompt": "the cat", "max_tokens": 2})[0] == 200
            assert until(lambda: not again.haproxies() and not again.replicas())
            for driver in third.drivers():
                driver.kill()
            third.process.kill()
            third.process.wait()
            assert until(lambda: not third.haproxies() and not third.replicas())
            assert until(lambda: not any(processes.is_taken(host, port) for _, host, port in ports_of(third)))


def ports_of(server: Server) -> list[tuple[str, str, int]]:
    return list(run.ports_of(server.config, server.environment))

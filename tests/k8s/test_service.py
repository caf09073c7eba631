"""The RayService: what reaches it, how it grows, and that no stream is cut by what happens around it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.k8s.kustomize import SERVICES, one, overlay
from tests.k8s.pods import env_of, pod, ray_container, templates_of

services = pytest.mark.parametrize("name", SERVICES)
HTTP, GRPC = ("serve", 8000), ("serve-grpc", 9000)


def spec_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(overlay(name), "RayService")["spec"]
    return spec


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(spec_of(name)["serveConfigV2"])
    return config


def deployment_of(name: str) -> dict[str, Any]:
    deployment: dict[str, Any] = config_of(name)["applications"][0]["deployments"][0]
    return deployment


def group_of(name: str) -> dict[str, Any]:
    (group,) = spec_of(name)["rayClusterConfig"]["workerGroupSpecs"]
    return dict(group)


def worker_of(name: str) -> dict[str, Any]:
    return pod(name, group_of(name)["groupName"])


def longest_stream_s(name: str) -> float:
    config = config_of(name)
    return max(float(config[part]["request_timeout_s"]) for part in ("http_options", "grpc_options"))


@services
def test_the_name_leaves_room_for_what_kuberay_appends(name: str) -> None:
    assert len(one(overlay(name), "RayService")["metadata"]["name"]) <= 47


@services
def test_ports_have_the_names_by_which_kuberay_finds_them_and_the_numbers_of_the_config(name: str) -> None:
    config = config_of(name)
    assert (config["http_options"]["port"], config["grpc_options"]["port"]) == (8000, 9000)
    for role in templates_of(overlay(name)):
        ports = [(port["name"], port["containerPort"]) for port in ray_container(pod(name, role))["ports"]]
        assert {HTTP, GRPC, ("metrics", 8080)} <= set(ports)
        assert len(dict(ports)) == len(ports)


@services
def test_grpc_is_marked_as_http2_without_tls_because_gateways_would_speak_http1_to_it(name: str) -> None:
    ports = spec_of(name)["serveService"]["spec"]["ports"]
    assert {(port["name"], port["port"]): port["appProtocol"] for port in ports} == {
        HTTP: "http",
        GRPC: "kubernetes.io/h2c",
    }


@services
def test_the_head_gets_no_requests_because_it_has_no_replica(name: str) -> None:
    assert spec_of(name)["excludeHeadPodFromServeSvc"] is True


@services
def test_every_worker_has_a_proxy_because_its_readiness_probe_asks_it(name: str) -> None:
    assert config_of(name)["proxy_location"] == "EveryNode"
    assert config_of(name)["http_options"]["host"] == "0.0.0.0"


@services
def test_haproxy_is_on_in_every_process_of_head_and_workers(name: str) -> None:
    config = config_of(name)
    for role in templates_of(overlay(name)):
        assert env_of(ray_container(pod(name, role)))["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    for holder in (config["controller_options"], config["applications"][0]):
        assert holder["runtime_env"]["env_vars"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


@services
def test_the_autoscaler_is_the_second_one_and_restarts_are_left_to_it(name: str) -> None:
    cluster = spec_of(name)["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    for template in templates_of(overlay(name)).values():
        assert template["spec"].get("restartPolicy", "Never") == "Never"


@services
def test_a_worker_holds_exactly_one_replica_because_one_without_is_never_ready(name: str) -> None:
    wants, group = deployment_of(name)["ray_actor_options"], group_of(name)
    has = ray_container(worker_of(name))["resources"]["requests"]
    assert group["rayStartParams"]["num-cpus"] == str(wants["num_cpus"])
    assert has.get("nvidia.com/gpu", "0") == str(wants.get("num_gpus", 0))
    assert int(has["cpu"]) >= wants["num_cpus"]


@services
def test_there_are_as_many_workers_as_replicas_at_least_and_at_most(name: str) -> None:
    deployment, group = deployment_of(name), group_of(name)
    scaling = deployment.get("autoscaling_config", {})
    fewest = scaling.get("min_replicas", deployment.get("num_replicas"))
    most = scaling.get("max_replicas", deployment.get("num_replicas"))
    assert group["minReplicas"] == group["replicas"] == fewest
    assert group["maxReplicas"] >= most


@services
def test_workers_spread_over_nodes_if_they_can(name: str) -> None:
    (spread,) = worker_of(name)["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one machine must do, too"


@services
def test_an_upgrade_starts_a_new_cluster_and_keeps_the_old_one_for_the_longest_stream(name: str) -> None:
    spec = spec_of(name)
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert spec["rayClusterDeletionDelaySeconds"] > longest_stream_s(name)


@services
def test_haproxy_that_reloads_lets_the_longest_stream_end_and_not_only_two_minutes_of_it(name: str) -> None:
    """Each change of replicas reloads every HAProxy; by default the old process is killed after 120 s."""
    config, variable = config_of(name), "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    for holder in (config["controller_options"], config["applications"][0]):
        assert int(holder["runtime_env"]["env_vars"][variable]) > longest_stream_s(name)
    for role in templates_of(overlay(name)):
        assert variable not in env_of(ray_container(pod(name, role))), "the config has it"


@services
def test_a_node_that_is_lost_without_a_word_is_given_up_within_half_a_minute(name: str) -> None:
    """Ray asks every node how it is, and gives one up after five times without an answer."""
    head = env_of(ray_container(pod(name, "head")))
    each_ms = sum(int(head[f"RAY_health_check_{part}_ms"]) for part in ("period", "timeout"))
    assert 15_000 <= 5 * each_ms <= 30_000, "nor is a node given up that only had no time to answer"


@services
def test_a_request_that_is_sent_to_a_replica_whose_node_is_gone_tries_another_after_a_second(name: str) -> None:
    for role in templates_of(overlay(name)):
        assert env_of(ray_container(pod(name, role)))["RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S"] == "1"


@services
def test_a_worker_that_must_go_waits_for_its_clients_then_for_its_replica_and_is_not_killed_before(name: str) -> None:
    worker = worker_of(name)
    script = ray_container(worker)["lifecycle"]["preStop"]["exec"]["command"][-1]
    first, each = (int(number) for number in re.findall(r"^ *sleep (\d+)$", script, re.MULTILINE))
    times = re.search(r"\{1\.\.(\d+)\}", script)
    deadline = re.search(r"--deadline-remaining-seconds (\d+) && sleep (\d+)$", script, re.MULTILINE)
    assert times is not None
    assert deadline is not None
    for_clients = first + int(times[1]) * each
    for_replica = int(deadline[1])
    assert for_clients > longest_stream_s(name)
    grace = deployment_of(name)["graceful_shutdown_timeout_s"]
    assert for_replica >= grace + 900, "its successor has to load a model of up to 140 GB first"
    assert deadline[1] == deadline[2]
    assert worker["terminationGracePeriodSeconds"] >= for_clients + for_replica + 30


@services
def test_the_wait_for_clients_looks_at_the_ports_of_http_and_grpc(name: str) -> None:
    """Lines as the kernel writes them: local address, remote address, state 01 for established."""
    script = ray_container(worker_of(name))["lifecycle"]["preStop"]["exec"]["command"][-1]
    found = re.search(r"grep -qE '([^']+)'", script)
    assert found is not None
    open_client = "  12: 0A0000FE:1F40 0A0000FA:D2F0 01 00000000:00000000 00:00000000 00000000  1000 0"
    for port, counts in ((8000, True), (9000, True), (8265, False), (30000, False)):
        line = open_client.replace("1F40", f"{port:04X}")
        assert bool(re.search(found[1], line)) is counts
    assert not re.search(found[1], open_client.replace(" 01 ", " 0A ")), "one that listens is no client"
    assert not re.search(found[1], "  12: 0A0000FE:D2F0 0A0000FA:1F40 01 00000000:00000000"), "it is the caller"


@services
def test_a_server_fetches_nothing_and_reads_models_and_artefacts_that_it_cannot_change(name: str) -> None:
    container = ray_container(worker_of(name))
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    env = env_of(container)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["HF_HUB_CACHE"] == "/artefacts/hub"
    assert mounts["/artefacts"]["readOnly"] is True
    assert mounts["/etc/tide"]["readOnly"] is True


@services
def test_a_drain_leaves_one_worker_by_a_whole_number_because_kuberay_pods_have_no_scale(name: str) -> None:
    budget = one(overlay(name), "PodDisruptionBudget", "tide-worker")["spec"]
    assert budget["minAvailable"] == 1
    assert "maxUnavailable" not in budget
    assert budget["selector"]["matchLabels"]["ray.io/node-type"] == "worker"


def test_a_head_without_redis_is_not_drained_and_one_with_redis_may_be() -> None:
    assert one(overlay("gpu"), "PodDisruptionBudget", "tide-head")["spec"]["minAvailable"] == 1
    assert one(overlay("gpu-production"), "PodDisruptionBudget", "tide-head")["spec"]["minAvailable"] == 0


def test_with_redis_the_head_keeps_its_state_there_over_tls_with_a_password_from_a_secret() -> None:
    options = spec_of("gpu-production")["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"].startswith("rediss://")
    for field in ("redisUsername", "redisPassword"):
        assert options[field]["valueFrom"]["secretKeyRef"]["name"] == "tide-redis"
        assert "value" not in options[field]
    container = ray_container(pod("gpu-production", "head"))
    certificate = env_of(container)["RAY_REDIS_CA_CERT"]
    mount = next(mount for mount in container["volumeMounts"] if certificate.startswith(mount["mountPath"] + "/"))
    assert mount["readOnly"] is True


def test_without_the_component_there_is_no_redis() -> None:
    assert "gcsFaultToleranceOptions" not in spec_of("gpu")["rayClusterConfig"]

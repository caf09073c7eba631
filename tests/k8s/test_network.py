"""Who reaches whom: nothing but what is listed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.k8s.kustomize import JOBS, OVERLAYS, SERVICES, one, overlay, render, with_component
from tests.k8s.network import (
    CLIENT,
    DNS,
    EKS_IDENTITY,
    FETCHER,
    HEAD,
    IMPOSTOR,
    INTERNET,
    JOB_HEAD,
    JOB_WORKER,
    METADATA,
    NEIGHBOUR,
    NODE_LOCAL_DNS,
    OPENSHIFT_DNS,
    OPERATOR,
    PRIVATE,
    PROMETHEUS,
    REDIS,
    STRANGER,
    WORKER,
    Peer,
    may,
)

services = pytest.mark.parametrize("name", SERVICES)
SERVE = {8000, 9000}
METRICS = {8080}
DANGEROUS = {6379, 8265, 10001, 52365, 8404, 9101, 8076, 30000, 31000, 40000, 41000, 44217, 44227}
"""GCS, dashboard and jobs, client, agents, HAProxy's statistics, replicas: whoever reaches most of these runs code."""
PORTS = SERVE | METRICS | DANGEROUS


def reached(name: str, source: Peer, target: Peer) -> set[int]:
    return {port for port in PORTS if may(name, source, target, port)}


@services
@pytest.mark.parametrize("target", [HEAD, WORKER], ids=["head", "worker"])
def test_clients_reach_the_two_ports_of_the_api_and_no_port_of_ray(name: str, target: Peer) -> None:
    assert reached(name, CLIENT, target) == SERVE


@services
@pytest.mark.parametrize("source", [STRANGER, NEIGHBOUR, IMPOSTOR], ids=["namespace", "pod", "impostor"])
def test_nobody_else_reaches_anything(name: str, source: Peer) -> None:
    assert reached(name, source, HEAD) == reached(name, source, WORKER) == set()


@services
def test_ray_reaches_ray_on_every_port_because_it_picks_them_at_random(name: str) -> None:
    for source, target in ((HEAD, WORKER), (WORKER, HEAD), (WORKER, WORKER)):
        assert reached(name, source, target) == PORTS


@services
def test_prometheus_reads_metrics_and_nothing_else(name: str) -> None:
    assert reached(name, PROMETHEUS, WORKER) == reached(name, PROMETHEUS, HEAD) == METRICS


@services
def test_the_operator_reaches_the_head_to_deploy_and_to_ask_and_no_worker(name: str) -> None:
    assert reached(name, OPERATOR, HEAD) == {8265, 8000}
    assert reached(name, OPERATOR, WORKER) == set()


@pytest.mark.parametrize("name", OVERLAYS)
def test_all_pods_may_ask_for_names(name: str) -> None:
    for pod in (HEAD, WORKER, JOB_HEAD, JOB_WORKER, FETCHER):
        for server, port in ((DNS, 53), (NODE_LOCAL_DNS, 53), (OPENSHIFT_DNS, 5353)):
            assert may(name, pod, server, port, "UDP")
            assert may(name, pod, server, port)
        assert not may(name, pod, METADATA, 53, "UDP"), "the address of NodeLocal DNS alone"


@services
def test_only_the_head_reaches_the_kubernetes_api_for_its_autoscaler(name: str) -> None:
    assert may(name, HEAD, INTERNET, 443)
    assert may(name, HEAD, INTERNET, 6443)
    assert not may(name, HEAD, INTERNET, 80)
    assert not may(name, WORKER, INTERNET, 443)
    assert not may(name, WORKER, METADATA, 80)


def test_redis_is_reached_by_the_head_alone_and_only_with_the_component() -> None:
    assert may("gpu-production", HEAD, REDIS, 6379)
    assert not may("gpu-production", WORKER, REDIS, 6379)
    assert not may("gpu", HEAD, REDIS, 6379)


@pytest.mark.parametrize("name", JOBS)
def test_a_calibration_talks_to_itself_and_the_operator_submits_it(name: str) -> None:
    assert reached(name, JOB_WORKER, JOB_HEAD) == PORTS
    assert reached(name, OPERATOR, JOB_HEAD) >= {8265}
    assert reached(name, PROMETHEUS, JOB_WORKER) == METRICS
    for source in (CLIENT, STRANGER, NEIGHBOUR, IMPOSTOR):
        assert reached(name, source, JOB_HEAD) == set()


@pytest.mark.parametrize("name", OVERLAYS)
def test_service_and_calibration_cannot_touch_each_other(name: str) -> None:
    assert reached(name, JOB_WORKER, HEAD) == reached(name, WORKER, JOB_HEAD) == set()


@pytest.mark.parametrize("name", JOBS)
def test_a_calibration_fetches_nothing_unless_told(name: str) -> None:
    assert not may(name, JOB_WORKER, INTERNET, 443)


def test_the_fetch_of_weights_reaches_public_addresses_by_https_and_nobody_reaches_it() -> None:
    assert may("weights", FETCHER, INTERNET, 443)
    for target, port in ((INTERNET, 80), (PRIVATE, 443), (METADATA, 80), (EKS_IDENTITY, 80), (HEAD, 8265)):
        assert not may("weights", FETCHER, target, port)
    for source in (CLIENT, STRANGER, NEIGHBOUR, WORKER):
        assert reached("weights", source, FETCHER) == set()


def test_the_job_that_moves_a_pointer_has_no_network() -> None:
    pod = Peer({"app.kubernetes.io/part-of": "tide-serve", "app.kubernetes.io/component": "publishing"})
    assert not any(may("point-back", pod, target, 443) for target in (INTERNET, PRIVATE, METADATA, HEAD))


@pytest.mark.parametrize("name", ["gpu", "gpu-calibration", "weights"])
def test_with_an_object_store_pods_reach_it_and_its_identities_but_no_private_address(
    tmp_path: Path, name: str
) -> None:
    manifests = render(with_component(tmp_path, name, "object-store"))
    for pod in (WORKER, JOB_HEAD, JOB_WORKER, FETCHER):
        assert may(manifests, pod, INTERNET, 443)
        assert may(manifests, pod, EKS_IDENTITY, 80)
        assert not may(manifests, pod, PRIVATE, 443)
        assert not may(manifests, pod, METADATA, 80), "it gives out the credentials of the node"
    assert not may(manifests, NEIGHBOUR, INTERNET, 443)


def test_a_calibration_that_may_fetch_reaches_no_private_address(tmp_path: Path) -> None:
    manifests = render(with_component(tmp_path, "gpu-calibration", "hub-egress"))
    (rule,) = one(manifests, "NetworkPolicy", "calibration-hub")["spec"]["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 443}]
    (block,) = rule["to"]
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(block["ipBlock"]["except"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_that_no_policy_knows_is_cut_off(name: str) -> None:
    policy = one(overlay(name), "NetworkPolicy", "default-deny")["spec"]
    assert policy == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

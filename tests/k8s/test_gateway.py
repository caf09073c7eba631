"""The edge: TLS ends there, what is let in is listed, and it waits as long as the service does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deploy.strict import yaml_file
from tests.k8s.kustomize import REPOSITORY, one, overlay
from tests.k8s.pods import RAY_PODS, pod, ray_container

NAME = "gpu-production"


def spec_of(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(overlay(NAME), kind)["spec"]
    return spec


def listeners() -> dict[str, dict[str, Any]]:
    return {listener["name"]: listener for listener in spec_of("Gateway")["listeners"]}


def test_every_listener_speaks_tls_with_a_certificate_that_is_a_secret() -> None:
    for listener in listeners().values():
        assert (listener["protocol"], listener["port"], listener["tls"]["mode"]) == ("HTTPS", 443, "Terminate")
        assert listener["tls"]["certificateRefs"] == [{"kind": "Secret", "name": "tide-tls"}]
        assert listener["allowedRoutes"]["namespaces"] == {"from": "Same"}


@pytest.mark.parametrize(("kind", "section"), [("HTTPRoute", "http"), ("GRPCRoute", "grpc")])
def test_each_route_has_a_listener_and_a_host_of_its_own(kind: str, section: str) -> None:
    """HTTP and gRPC routes of one host name on one listener would exclude each other."""
    route = spec_of(kind)
    assert route["parentRefs"] == [{"name": one(overlay(NAME), "Gateway")["metadata"]["name"], "sectionName": section}]
    assert route["hostnames"] == [listeners()[section]["hostname"]]
    assert listeners()[section]["allowedRoutes"]["kinds"] == [{"kind": kind}]
    assert len({listener["hostname"] for listener in listeners().values()}) == 2


@pytest.mark.parametrize(("kind", "port_name"), [("HTTPRoute", "serve"), ("GRPCRoute", "serve-grpc")])
def test_routes_end_at_the_service_that_kuberay_makes(kind: str, port_name: str) -> None:
    service = one(overlay(NAME), "RayService")
    ports = {port["name"]: port["port"] for port in service["spec"]["serveService"]["spec"]["ports"]}
    (rule,) = spec_of(kind)["rules"]
    assert rule["backendRefs"] == [{"name": f"{service['metadata']['name']}-serve-svc", "port": ports[port_name]}]


def test_the_edge_waits_longer_than_the_service_which_can_say_why_it_ends_a_request() -> None:
    (rule,) = spec_of("HTTPRoute")["rules"]
    config = yaml_file.read(REPOSITORY / "deploy" / "config.gpu.yaml")
    assert int(rule["timeouts"]["request"].removesuffix("s")) > config["http_options"]["request_timeout_s"]


def test_the_paths_that_are_let_in_are_those_of_the_api_and_none_of_serve_itself() -> None:
    """Every route of the app but the pages, the metrics, which Prometheus reads from Ray, and what asks a replica of
    its state: it has no use behind an edge that spreads requests, except `/health`. The first versions of the Gateway
    API allow eight paths."""
    (rule,) = spec_of("HTTPRoute")["rules"]
    assert len(rule["matches"]) <= 8
    allowed = [(match["path"]["type"], match["path"]["value"]) for match in rule["matches"]]

    def let_in(path: str) -> bool:
        whole = any(kind == "Exact" and path == value for kind, value in allowed)
        return whole or any(kind == "PathPrefix" and f"{path}/".startswith(f"{value}/") for kind, value in allowed)

    source = (REPOSITORY / "deploy" / "http_api" / "api.py").read_text(encoding="utf-8")
    served = set(re.findall(r'\.(?:get|post|route)\(\s*"(/[^"]*)"', source))
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= served
    refused = {path for path in served if not let_in(path)}
    assert refused <= {"/", "/playground", "/metrics", "/ping", "/load"}, refused
    assert not any(let_in(path) for path in ("/", "/-/routes", "/-/healthz", "/playground", "/v1x", "/healthz"))


def test_the_methods_that_are_let_in_are_those_of_the_api_and_its_health() -> None:
    (rule,) = spec_of("GRPCRoute")["rules"]
    services = {match["method"]["service"] for match in rule["matches"]}
    proto = (REPOSITORY / "protos" / "tide" / "v1" / "tide.proto").read_text(encoding="utf-8")
    assert "package tide.v1;" in proto
    assert services == {f"tide.v1.{name}" for name in re.findall(r"^service (\w+)", proto, re.MULTILINE)} | {
        "grpc.health.v1.Health"
    }


@pytest.mark.parametrize(("name", "role"), RAY_PODS)
def test_prometheus_finds_the_metrics_port_of_every_pod_by_its_name(name: str, role: str) -> None:
    (endpoint,) = spec_of("PodMonitor")["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in ray_container(pod(name, role))["ports"]}
    assert ports[endpoint["port"]] == 8080, "where KubeRay has Ray export them"
    assert spec_of("PodMonitor")["selector"]["matchLabels"] == {"app.kubernetes.io/part-of": "tide-serve"}

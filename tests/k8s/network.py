"""What network policies let through, by the rules of Kubernetes, for the few selectors that we use."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.k8s.kustomize import Manifest, overlay

OURS = "tide"


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = OURS
    namespace_labels: dict[str, str] = field(default_factory=dict)
    address: str | None = None


def ours(component: str, node_type: str) -> Peer:
    labels = {"app.kubernetes.io/component": component, "ray.io/node-type": node_type}
    return Peer({"app.kubernetes.io/part-of": "tide-serve", **labels})


HEAD, WORKER = ours("server", "head"), ours("server", "worker")
JOB_HEAD, JOB_WORKER = ours("calibration", "head"), ours("calibration", "worker")
FETCHER = Peer({"app.kubernetes.io/part-of": "tide-serve", "app.kubernetes.io/component": "weights"})
CLIENT = Peer({"app": "shop"}, "shop", {"tide-serve/client": "true"})
STRANGER = Peer({"app": "shop"}, "elsewhere")
NEIGHBOUR = Peer({"app": "debug"})
PROMETHEUS = Peer({"app": "prometheus"}, "monitoring")
OPERATOR = Peer({"app.kubernetes.io/component": "kuberay-operator"}, "ray-system")
IMPOSTOR = Peer({"app.kubernetes.io/component": "kuberay-operator"}, "elsewhere")
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
NODE_LOCAL_DNS = Peer(address="169.254.20.10")
OPENSHIFT_DNS = Peer({"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns")
REDIS = Peer({"app": "redis"}, "redis")
INTERNET = Peer(address="203.0.113.7")
METADATA = Peer(address="169.254.169.254")
PRIVATE = Peer(address="10.1.2.3")
EKS_IDENTITY = Peer(address="169.254.170.23")


def may(name: str | list[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let out where it begins and let in where it ends, as far as these are pods of ours.

    By the policies of an overlay, or of these manifests."""
    manifests = overlay(name) if isinstance(name, str) else name
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    out = not _is_ours(source) or _let(policies, source, target, port, protocol, "egress")
    return out and (not _is_ours(target) or _let(policies, target, source, port, protocol, "ingress"))


def _is_ours(peer: Peer) -> bool:
    return peer.address is None and peer.namespace == OURS


def _let(
    policies: list[dict[str, Any]],
    pod: Peer,
    other: Peer,
    port: int,
    protocol: str,
    way: Literal["ingress", "egress"],
) -> bool:
    chosen = [policy for policy in policies if _matches(policy["podSelector"], pod.labels)]
    chosen = [policy for policy in chosen if way.title() in policy["policyTypes"]]
    if not chosen:
        return True  # nothing is said about it, so everything is allowed
    rules = [rule for policy in chosen for rule in policy.get(way, ())]
    peers = "from" if way == "ingress" else "to"
    return any(
        _port(rule, port, protocol) and (peers not in rule or any(_peer(each, other) for each in rule[peers]))
        for rule in rules
    )


def _port(rule: dict[str, Any], port: int, protocol: str) -> bool:
    return "ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"]


def _peer(selector: dict[str, Any], peer: Peer) -> bool:
    assert selector.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}
    if block := selector.get("ipBlock"):
        address = ipaddress.ip_address(peer.address or "10.0.0.1")
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(part) for part in block.get("except", ()))
    if peer.address is not None:
        return False
    if "namespaceSelector" in selector:
        labels = {"kubernetes.io/metadata.name": peer.namespace, **peer.namespace_labels}
        if not _matches(selector["namespaceSelector"], labels):
            return False
    elif peer.namespace != OURS:
        return False
    return _matches(selector.get("podSelector", {}), peer.labels)


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())

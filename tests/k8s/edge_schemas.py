"""Kinds whose definitions we do not have: the fields of theirs that we use, and no others.

By the Gateway API's v1 reference and the Prometheus operator's. A field that is added to a manifest has to be looked up
and added here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DURATION = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
NAME = {"type": "string", "pattern": DNS_NAME, "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TIME = {"type": "string", "pattern": DURATION}


def closed(required: Schema, **optional: Any) -> Schema:
    """An object with these fields and no others."""
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def some(items: Schema, most: int = 16) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def kind_of(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = closed({"name": NAME, "namespace": NAME}, labels={"type": "object"})
    return closed({"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


TLS = closed(
    {"mode": {"const": "Terminate"}, "certificateRefs": some(closed({"kind": {"const": "Secret"}, "name": NAME}))}
)
ROUTES = closed(
    {
        "namespaces": closed({"from": {"enum": ["Same", "Selector", "All"]}}),
        "kinds": some(closed({"kind": {"enum": ["HTTPRoute", "GRPCRoute"]}}), 8),
    }
)
LISTENER = closed(
    {
        "name": NAME,
        "hostname": NAME,
        "port": PORT,
        "protocol": {"const": "HTTPS"},  # HTTP would be without TLS
        "tls": TLS,
        "allowedRoutes": ROUTES,
    }
)
PARENTS = some(closed({"name": NAME, "sectionName": NAME}), 32)
BACKENDS = some(closed({"name": NAME, "port": PORT}))
PATH = closed(
    {"type": {"enum": ["Exact", "PathPrefix"]}, "value": {"type": "string", "pattern": "^/", "maxLength": 1024}}
)
METHOD = closed(
    {"type": {"const": "Exact"}, "service": {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"}},
    method={"type": "string", "pattern": r"^[A-Za-z_]\w*$"},
)


def route(kind: str, match: Schema, **rule: Any) -> Schema:
    rules = some(closed({"matches": some(match, 64), "backendRefs": BACKENDS}, **rule))
    spec = closed({"parentRefs": PARENTS, "hostnames": some(NAME), "rules": rules})
    return kind_of("gateway.networking.k8s.io/v1", kind, spec)


RELABELING = closed({"sourceLabels": some({"type": "string"}), "targetLabel": {"type": "string"}})
ENDPOINT = closed(
    {"port": {"type": "string"}, "interval": TIME, "scrapeTimeout": TIME},
    relabelings=some(RELABELING),
)
LABELS = closed({"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}})

SCHEMAS: dict[str, Schema] = {
    "Gateway": kind_of(
        "gateway.networking.k8s.io/v1", "Gateway", closed({"gatewayClassName": NAME, "listeners": some(LISTENER, 64)})
    ),
    "HTTPRoute": route("HTTPRoute", closed({"path": PATH}), timeouts=closed({"request": TIME}, backendRequest=TIME)),
    "GRPCRoute": route("GRPCRoute", closed({"method": METHOD})),
    "PodMonitor": kind_of(
        "monitoring.coreos.com/v1", "PodMonitor", closed({"selector": LABELS, "podMetricsEndpoints": some(ENDPOINT)})
    ),
}

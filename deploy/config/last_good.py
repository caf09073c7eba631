"""The policies that were in force last, and why a replica refuses the one it was given, kept outside the replicas.

Both are in the key-value store of Ray's GCS, where Serve keeps its own config: it lives as long as the deployment that
they belong to, on every node, and outlives the head where the GCS has a Redis. A file would need a volume that all
nodes share.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Protocol

logger = logging.getLogger("ray.serve")

NAMESPACE = b"tide"
KEPT = 4
"""More than one, since a policy that some replicas took may be one that others must refuse."""


class PolicyStore(Protocol):
    """Where policies are kept, newest first."""

    def read(self) -> list[dict[str, Any]]: ...

    def write(self, policies: list[dict[str, Any]]) -> None: ...

    def note_refused(self, reason: str | None) -> None:
        """Why this replica refuses the policy it was given; None once it has taken one."""


class ClusterStore:
    """Ray's key-value store. It must never stop a replica: what fails is logged, and nothing is kept."""

    def __init__(self, application: str, deployment: str, replica: str) -> None:
        self._key = json.dumps(["last good policies", application, deployment]).encode()
        self._refused_key = refused_key(application, deployment, replica)

    def read(self) -> list[dict[str, Any]]:
        from ray.experimental.internal_kv import _internal_kv_get

        try:
            found = _internal_kv_get(self._key, namespace=NAMESPACE)
            return [] if found is None else list(json.loads(found))
        except Exception:
            logger.exception("tide: the last good policies could not be read")
            return []

    def write(self, policies: list[dict[str, Any]]) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        try:
            _internal_kv_put(self._key, json.dumps(policies).encode(), namespace=NAMESPACE)
        except Exception:
            logger.exception("tide: the policy could not be kept for replicas to come")

    def note_refused(self, reason: str | None) -> None:
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

        try:
            if reason is None:
                _internal_kv_del(self._refused_key, namespace=NAMESPACE)
            else:
                _internal_kv_put(self._refused_key, reason.encode(), namespace=NAMESPACE)
        except Exception:
            logger.exception("tide: `tide status` may be wrong about a refused policy of this replica")


def refused_key(application: str, deployment: str, replica: str) -> bytes:
    """Of one replica, so that it has one writer."""
    return json.dumps(["refused policy", application, deployment, replica]).encode()


def remember(store: PolicyStore, policy: dict[str, Any]) -> None:
    """Keep a policy that is in force, as the newest."""
    before = store.read()
    if before[:1] != [policy]:
        store.write([policy, *(each for each in before if each != policy)][:KEPT])


def others(store: PolicyStore, refused: dict[str, Any]) -> list[dict[str, Any]]:
    """Policies to come up with instead of a refused one, newest first."""
    return [each for each in store.read() if each != refused]

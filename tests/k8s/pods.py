"""The pods that the Ray kinds ask for."""

from __future__ import annotations

from typing import Any

from tests.k8s.kustomize import OVERLAYS, overlay

TASK = "task"
"""The role of the pod of a Job."""
PLACES = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}


def clusters_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"][PLACES[each["kind"]]] for each in manifests if each["kind"] in PLACES]


def templates_of(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by their role: head, the group's name, or task."""
    found = {}
    for cluster in clusters_of(manifests):
        found["head"] = cluster["headGroupSpec"]["template"]
        found |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for job in (each for each in manifests if each["kind"] == "Job"):
        found[TASK] = job["spec"]["template"]
    return found


PODS = [(name, role) for name in OVERLAYS for role in templates_of(overlay(name))]
RAY_PODS = [(name, role) for name, role in PODS if role != TASK]


def pod(name: str, role: str) -> dict[str, Any]:
    spec: dict[str, Any] = templates_of(overlay(name))[role]["spec"]
    return spec


def ray_container(spec: dict[str, Any]) -> dict[str, Any]:
    """KubeRay takes the first for Ray's."""
    container: dict[str, Any] = spec["containers"][0]
    return container


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    values = {entry["name"]: entry.get("value") for entry in container.get("env", ())}
    assert len(values) == len(container.get("env", ())), "a variable twice"
    return values


def gigabytes(quantity: str) -> float:
    units = {"Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]] / 1e9

"""No manifest has a field that its kind does not know, or a value that it would not take."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.edge_schemas import SCHEMAS
from tests.k8s.kustomize import COMPONENTS, JOBS, K8S, OVERLAYS, SERVICES, VOLUMES, one, overlay, render, with_component
from tests.k8s.pods import templates_of

RAY_CRDS = os.environ.get("KUBERAY_CRD_DIR", "")
KUBERNETES = ("1.30", "1.37")
"""The oldest and the newest that are promised."""
RAY_KINDS = {"RayService": "ray.io_rayservices.yaml", "RayJob": "ray.io_rayjobs.yaml"}
EXAMPLES = sorted((K8S / "examples").glob("*.yaml"))

needs_crds = pytest.mark.skipif(
    not RAY_CRDS, reason="needs KubeRay's CRDs (ray.io_*.yaml) in the folder that KUBERAY_CRD_DIR names"
)


def is_core(manifest: dict[str, Any]) -> bool:
    return manifest["kind"] not in RAY_KINDS and manifest["kind"] not in SCHEMAS


def closed(schema: Any) -> Any:
    """The schema of a CRD, in which fields that it does not list are errors."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        made.setdefault("additionalProperties", False)
    return made


@cache
def validator_of(kind: str) -> jsonschema.Draft202012Validator:
    definition = yaml.load((Path(RAY_CRDS) / RAY_KINDS[kind]).read_text(encoding="utf-8"), yaml.CSafeLoader)
    version = served_version(definition)
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def errors_of(validator: jsonschema.Draft202012Validator, manifest: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def served_version(definition: dict[str, Any]) -> dict[str, Any]:
    return next(version for version in definition["spec"]["versions"] if version["name"] == "v1")


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", OVERLAYS)
def test_kubernetes_own_kinds_are_strictly_valid(name: str, version: str) -> None:
    checked = [kubernetes_validate.validate(each, version, strict=True) for each in overlay(name) if is_core(each)]
    assert len(checked) >= 4


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_are_strictly_valid(name: str, version: str) -> None:
    (claim,) = render(K8S / "volume" / name)
    assert kubernetes_validate.validate(claim, version, strict=True)


@pytest.mark.parametrize("name", ["gpu", "gpu-calibration", "weights"])
def test_an_overlay_with_all_components_is_strictly_valid(name: str, tmp_path: Path) -> None:
    manifests = render(with_component(tmp_path, name, *COMPONENTS))
    for each in manifests:
        if is_core(each):
            assert kubernetes_validate.validate(each, KUBERNETES[0], strict=True)
        elif each["kind"] in RAY_KINDS and RAY_CRDS:
            assert errors_of(validator_of(each["kind"]), each) == []
    for role, template in templates_of(manifests).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        assert kubernetes_validate.validate(pod, KUBERNETES[0], strict=True), role


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_strictly_valid(path: Path, version: str) -> None:
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", OVERLAYS)
def test_pod_templates_are_strictly_valid_pods(name: str, version: str) -> None:
    for role, template in templates_of(overlay(name)).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        assert kubernetes_validate.validate(pod, version, strict=True), role


@needs_crds
@pytest.mark.parametrize("name", [*SERVICES, *JOBS])
def test_ray_kinds_are_strictly_valid_for_the_operator(name: str) -> None:
    ours = [each for each in overlay(name) if each["kind"] in RAY_KINDS]
    assert ours
    for manifest in ours:
        assert errors_of(validator_of(manifest["kind"]), manifest) == []


def misspell_max_replicas(spec: dict[str, Any]) -> None:
    group = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")


def misplace_a_probe(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["livenessProbe"] = {}


def ask_for_an_unknown_autoscaler(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["autoscalerOptions"]["version"] = "v3"


@needs_crds
@pytest.mark.parametrize("mistake", [misspell_max_replicas, misplace_a_probe, ask_for_an_unknown_autoscaler])
def test_the_check_of_ray_kinds_sees_mistakes(mistake: Callable[[dict[str, Any]], None]) -> None:
    manifest = copy.deepcopy(one(overlay("gpu"), "RayService"))
    mistake(manifest["spec"])
    assert list(validator_of("RayService").iter_errors(manifest))


@pytest.mark.parametrize("kind", SCHEMAS)
def test_kinds_of_the_edge_have_the_fields_we_know_and_no_others(kind: str) -> None:
    manifest = one(overlay("gpu-production"), kind)
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind])
    assert errors_of(validator, manifest) == []
    manifest["spec"]["listener"] = []
    assert list(validator.iter_errors(manifest)), "the check does not see a mistake"

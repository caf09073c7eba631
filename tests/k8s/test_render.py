"""Every overlay renders, alone and with every component, and what the other tests look at is what kubectl sends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.kustomize import (
    COMPONENTS,
    JOBS,
    K8S,
    OVERLAYS,
    REPOSITORY,
    SERVICES,
    one,
    overlay,
    render,
    render_by_kubectl,
    with_component,
)

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not on the path; the small renderer alone was tested"
)
BELONGS_TO = {"hub-egress": "gpu-calibration", "hf-token": "weights"}
KINDS_OF = {
    "gateway": {"Gateway", "HTTPRoute", "GRPCRoute"},
    "gcs-redis": {"NetworkPolicy"},
    "hub-egress": {"NetworkPolicy"},
    "object-store": {"NetworkPolicy"},
    "pod-monitor": {"PodMonitor"},
    "quota": {"ResourceQuota"},
}
"""What a component adds; the others change what is there."""


def by_name(manifests: list[dict[str, Any]]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    names = {(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")): each for each in manifests}
    assert len(names) == len(manifests), "two of the same name"
    return names


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_what_is_tested_here_is_what_kubectl_renders(name: str) -> None:
    assert by_name(overlay(name)) == by_name(render_by_kubectl(K8S / "overlays" / name))


@pytest.mark.parametrize("name", SERVICES)
def test_an_overlay_of_the_service_has_all_it_needs_and_starts_no_calibration(name: str) -> None:
    kinds = {each["kind"] for each in overlay(name)}
    assert {"Namespace", "RayService", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    assert not {"RayJob", "Job", "PersistentVolumeClaim"} & kinds


@pytest.mark.parametrize("name", JOBS)
def test_an_overlay_of_a_calibration_leaves_the_service_alone(name: str) -> None:
    kinds = {each["kind"] for each in overlay(name)}
    assert {"Namespace", "RayJob", "ConfigMap"} <= kinds
    assert not {"RayService", "PodDisruptionBudget", "PersistentVolumeClaim"} & kinds


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_may_be_used_alone(tmp_path: Path, component: str) -> None:
    base = BELONGS_TO.get(component, "gpu")
    rendered, before = by_name(render(with_component(tmp_path, base, component))), by_name(overlay(base))
    added = {key[0] for key in rendered.keys() - before.keys()}
    assert added == KINDS_OF.get(component, set())
    assert rendered != before


@needs_kubectl
@pytest.mark.parametrize("base", ["gpu", "gpu-calibration", "weights"])
def test_all_components_together_change_an_overlay_as_kubectl_would(tmp_path: Path, base: str) -> None:
    folder = with_component(tmp_path, base, *COMPONENTS)
    assert by_name(render(folder)) == by_name(render_by_kubectl(folder))


@pytest.mark.parametrize("path", sorted(K8S.rglob("*.yaml")), ids=lambda path: str(path.relative_to(K8S)))
def test_no_manifest_lies_about_unused(path: Path) -> None:
    """Each file is named by the kustomization beside it; examples are for reading."""
    if path.name == "kustomization.yaml" or K8S / "examples" in path.parents or K8S / "observability" in path.parents:
        return
    rules = yaml.safe_load((path.parent / "kustomization.yaml").read_text(encoding="utf-8"))
    named = [*rules.get("resources", ()), *(patch.get("path") for patch in rules.get("patches", ()))]
    named += [file for generator in rules.get("configMapGenerator", ()) for file in generator["files"]]
    assert path.name in named


@pytest.mark.parametrize("name", SERVICES)
def test_the_pod_image_is_named_without_a_place_and_with_the_version_of_this_checkout(name: str) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    cluster = one(overlay(name), "RayService")["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    for template in templates:
        image, _, tag = template["spec"]["containers"][0]["image"].partition(":")
        assert image == "tide-serve"
        assert f'\nversion = "{tag}"\n' in project

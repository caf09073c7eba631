"""What each component changes, in every kind of pod that needs it, and in no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.kustomize import REPOSITORY, WEIGHTS, one, render, with_component
from tests.k8s.pods import env_of, gigabytes, ray_container, templates_of

SERVICE, JOB, POINT_BACK = "gpu", "gpu-calibration", "point-back"
WORKERS = "gpu-workers"


def pods(folder: Path, base: str, *components: str) -> dict[str, dict[str, Any]]:
    """Specs of the pods by their role."""
    templates = templates_of(render(with_component(folder, base, *components)))
    return {role: template["spec"] for role, template in templates.items()}


def mount_of(spec: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    mount = next(mount for mount in ray_container(spec)["volumeMounts"] if mount["mountPath"] == path)
    return mount, next(volume for volume in spec["volumes"] if volume["name"] == mount["name"])


@pytest.mark.parametrize("base", [JOB, WEIGHTS])
def test_the_hubs_token_is_a_file_from_a_secret_that_no_variable_holds(tmp_path: Path, base: str) -> None:
    for spec in pods(tmp_path, base, "hf-token").values():
        path = Path(env_of(ray_container(spec))["HF_TOKEN_PATH"])
        mount, volume = mount_of(spec, str(path.parent))
        assert (volume["secret"]["secretName"], mount["readOnly"]) == ("tide-hf-token", True)
        assert volume["secret"]["defaultMode"] == 0o440
        assert "HF_TOKEN" not in env_of(ray_container(spec))


def test_the_library_reads_the_token_from_the_file_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_abc\n", encoding="utf-8")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found = subprocess.run(
        [sys.executable, "-c", "import huggingface_hub; print(huggingface_hub.get_token())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "hf_abc"


def test_the_service_has_no_token_of_the_hub(tmp_path: Path) -> None:
    for spec in pods(tmp_path, SERVICE, "hf-token").values():
        assert "HF_TOKEN_PATH" not in env_of(ray_container(spec))


@pytest.mark.parametrize("base", [SERVICE, JOB, WEIGHTS, POINT_BACK])
def test_every_pod_pulls_its_image_with_the_secret_of_the_registry(tmp_path: Path, base: str) -> None:
    for spec in pods(tmp_path, base, "image-pull-secret").values():
        assert spec["imagePullSecrets"] == [{"name": "tide-registry"}]


@pytest.mark.parametrize("base", [SERVICE, JOB])
@pytest.mark.parametrize(
    ("component", "field", "value"),
    [
        ("node-selector", "nodeSelector", {"nvidia.com/gpu.product": "NVIDIA-H200"}),
        ("runtime-class", "runtimeClassName", "nvidia"),
    ],
)
def test_workers_are_placed_and_the_head_which_needs_no_gpu_is_not(
    tmp_path: Path, base: str, component: str, field: str, value: object
) -> None:
    found = pods(tmp_path, base, component)
    assert found[WORKERS][field] == value
    assert field not in found["head"]


@pytest.mark.parametrize("base", [SERVICE, JOB])
def test_workers_stay_away_from_drivers_that_cannot_run_the_cuda_of_the_image(tmp_path: Path, base: str) -> None:
    """CUDA 13 needs a driver of 580 or later; a higher CUDA in the lock asks for another number here."""
    lock = (REPOSITORY / "deploy" / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(r"^nvidia-cuda-runtime==13\.", lock, re.MULTILINE)
    found = pods(tmp_path, base, "gpu-driver")
    affinity = found[WORKERS]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rules = [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]]
    assert [(rule["operator"], rule["values"]) for (rule,) in rules] == [("Gt", ["579"])] * 2
    assert {rule["key"] for (rule,) in rules} == {
        "nvidia.com/cuda.driver-version.major",
        "nvidia.com/cuda.driver.major",
    }
    assert "affinity" not in found["head"]


@pytest.mark.parametrize("base", [SERVICE, JOB])
def test_without_a_volume_no_pod_waits_for_a_claim(tmp_path: Path, base: str) -> None:
    for spec in pods(tmp_path, base, "no-volume").values():
        assert not [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        assert {mount["name"] for mount in ray_container(spec)["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }


@pytest.mark.parametrize("base", [SERVICE, JOB])
def test_a_worker_for_a_large_model_has_memory_and_cache_for_140_gigabytes(tmp_path: Path, base: str) -> None:
    spec = pods(tmp_path, base, "large-model")[WORKERS]
    resources = ray_container(spec)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert gigabytes(resources["limits"]["memory"]) > 140 * 1.2
    assert gigabytes(mount_of(spec, "/var/cache/tide")[1]["emptyDir"]["sizeLimit"]) > 140
    assert resources["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("base", [SERVICE, JOB, WEIGHTS])
def test_pods_that_read_or_write_a_store_have_its_credentials_where_there_are_any(tmp_path: Path, base: str) -> None:
    for role, spec in pods(tmp_path, base, "object-store").items():
        container = ray_container(spec)
        if (base, role) == (SERVICE, "head"):
            assert "envFrom" not in container, "it has no replica"
            continue
        assert container["envFrom"] == [{"secretRef": {"name": "tide-object-store", "optional": True}}]
        mount, volume = mount_of(spec, "/etc/tide-object-store")
        assert mount["readOnly"] is True
        assert volume["secret"] == {"secretName": "tide-object-store", "defaultMode": 0o440, "optional": True}


def test_no_manifest_holds_a_size_of_the_kv_pool() -> None:
    """It is a setting of the engine, in the Serve config."""
    for path in sorted((REPOSITORY / "k8s").rglob("*.yaml")):
        assert "kv_memory" not in path.read_text(encoding="utf-8"), path


def test_components_that_change_the_same_pods_go_together(tmp_path: Path) -> None:
    names = ["large-model", "no-volume", "object-store", "gpu-driver", "node-selector", "image-pull-secret"]
    service = one(render(with_component(tmp_path, SERVICE, *names)), "RayService")
    spec = templates_of([service])[WORKERS]["spec"]
    assert mount_of(spec, "/artefacts")[1]["emptyDir"]
    assert gigabytes(mount_of(spec, "/var/cache/tide")[1]["emptyDir"]["sizeLimit"]) > 140
    assert spec["imagePullSecrets"]

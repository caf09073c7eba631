"""The RayJob: it calibrates what is served, survives what breaks, and leaves nothing but the artefact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.calibration.settings import JobSettings, read_settings
from deploy.published import CURRENT
from deploy.strict import yaml_file
from tests.k8s.kustomize import JOBS, one, overlay, render, with_component
from tests.k8s.pods import env_of, pod, ray_container, templates_of

jobs = pytest.mark.parametrize("name", JOBS)


def spec_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(overlay(name), "RayJob")["spec"]
    return spec


def settings_of(name: str) -> JobSettings:
    data = one(overlay(name), "ConfigMap", "tide-calibration")["data"]
    return read_settings(yaml_file.parse(data["calibrate.yaml"].encode(), name))


@jobs
def test_the_operator_submits_the_job_because_a_sidecar_takes_no_security_context(name: str) -> None:
    """KubeRay's sidecar would have its pod refused in a restricted namespace, and it takes no template for it."""
    spec = spec_of(name)
    assert spec["submissionMode"] == "HTTPMode"
    assert not {"submitterPodTemplate", "submitterConfig", "clusterSelector"} & spec.keys()


@jobs
def test_the_job_reads_the_settings_that_are_mounted(name: str) -> None:
    command = spec_of(name)["entrypoint"].split()
    assert command[:3] == ["python", "-m", "deploy.calibrate"]
    path = Path(command[command.index("--config") + 1])
    head = pod(name, "head")
    mount = next(each for each in ray_container(head)["volumeMounts"] if each["mountPath"] == str(path.parent))
    volume = next(each for each in head["volumes"] if each["name"] == mount["name"])
    assert path.name in one(overlay(name), "ConfigMap", volume["configMap"]["name"])["data"]


@jobs
def test_runs_and_artefacts_are_on_the_volume_that_the_service_reads(name: str) -> None:
    settings, claim = settings_of(name), {"claimName": "tide-artefacts"}
    assert settings.storage.startswith("/artefacts/")
    assert settings.output is None
    served = templates_of(overlay(name.removesuffix("-calibration")))
    for role, template in (templates_of(overlay(name)) | served).items():
        spec = template["spec"]
        mounted = {volume["name"]: volume.get("persistentVolumeClaim") for volume in spec["volumes"]}
        if role != "head" or template not in served.values():
            assert mounted["artefacts"] == claim, role
    for role in templates_of(overlay(name)):
        mounts = {mount["mountPath"]: mount for mount in ray_container(pod(name, role))["volumeMounts"]}
        assert not mounts["/artefacts"].get("readOnly")


@jobs
def test_what_is_calibrated_is_what_is_served(name: str) -> None:
    service = one(overlay(name.removesuffix("-calibration")), "RayService")["spec"]["serveConfigV2"]
    engine = yaml_file.parse(service.encode(), name)["applications"][0]["args"]["engine"]
    assert settings_of(name).model == engine["model"]


def test_the_service_follows_the_pointer_that_the_job_moves_without_an_edit() -> None:
    service = one(overlay("gpu"), "RayService")["spec"]["serveConfigV2"]
    engine = yaml_file.parse(service.encode(), "gpu")["applications"][0]["args"]["engine"]
    assert engine["artefact"] == f"{settings_of('gpu-calibration').publish}/{CURRENT}"
    assert engine["artefact"].startswith("/artefacts/"), "the volume that both mount"


def test_the_trial_on_cpus_whose_exits_are_poor_moves_nothing() -> None:
    assert settings_of("cpu-calibration").publish is None


@jobs
def test_the_workers_of_the_settings_fit_the_workers_of_the_cluster(name: str) -> None:
    workers = settings_of(name).workers
    (group,) = spec_of(name)["rayClusterSpec"]["workerGroupSpecs"]
    limits = ray_container(group["template"]["spec"])["resources"]["limits"]
    assert workers.count == group["replicas"]
    assert group["rayStartParams"]["num-cpus"] == f"{workers.num_cpus:g}"
    assert limits.get("nvidia.com/gpu", "0") == f"{workers.num_gpus:g}"


@jobs
def test_a_failed_attempt_is_tried_again_in_a_new_cluster(name: str) -> None:
    assert spec_of(name)["backoffLimit"] == 2
    assert pod(name, "head")["restartPolicy"] == "Never"


@jobs
def test_a_job_that_gets_no_place_or_no_end_is_given_up(name: str) -> None:
    """And not before: a worker may take half an hour to load a large model from a slow volume."""
    spec, workers = spec_of(name), settings_of(name).workers
    assert workers.start_s >= (1800 if name.startswith("gpu") else 600)
    assert spec["preRunningDeadlineSeconds"] >= workers.start_s
    assert spec["activeDeadlineSeconds"] > workers.stall_s * workers.attempts


@jobs
def test_the_cluster_goes_when_the_job_has_ended_and_its_logs_can_be_read_before(name: str) -> None:
    spec = spec_of(name)
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] >= 300
    assert "deletionStrategy" not in spec, "it needs a feature gate, and excludes shutdownAfterJobFinishes"


@jobs
def test_the_name_leaves_room_for_what_kuberay_appends(name: str) -> None:
    assert len(one(overlay(name), "RayJob")["metadata"]["name"]) <= 47


@jobs
def test_the_model_is_looked_for_where_the_service_looks_and_not_on_the_hub(name: str) -> None:
    for role in templates_of(overlay(name)):
        env = env_of(ray_container(pod(name, role)))
        assert (env["HF_HUB_CACHE"], env["HF_HUB_OFFLINE"]) == ("/artefacts/hub", "1")


def test_with_the_component_head_and_workers_may_ask_the_hub(tmp_path: Path) -> None:
    for template in templates_of(render(with_component(tmp_path, "gpu-calibration", "hub-egress"))).values():
        assert env_of(ray_container(template["spec"]))["HF_HUB_OFFLINE"] == "0"

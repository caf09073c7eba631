"""The Job that fetches weights, and the volume that it fills."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy import fetch, published
from deploy.object_store import is_url
from tests.k8s.kustomize import JOBS, K8S, OVERLAYS, POINT_BACK, SERVICES, VOLUMES, WEIGHTS, one, overlay, render
from tests.k8s.pods import TASK, env_of, pod, ray_container, templates_of
from tide_core.models.hub import is_hub_id


def spec() -> dict[str, Any]:
    found: dict[str, Any] = one(overlay(WEIGHTS), "Job")["spec"]
    return found


def container() -> dict[str, Any]:
    return ray_container(pod(WEIGHTS, TASK))


def test_the_job_runs_the_command_that_fetches() -> None:
    assert container()["command"] == ["python", "-m", fetch.__name__]


def test_the_overlay_names_a_model_that_can_be_fetched() -> None:
    model = container()["args"][0]
    assert is_hub_id(model) or is_url(model)
    assert not is_hub_id(render(K8S / "base" / "weights")[0]["spec"]["template"]["spec"]["containers"][0]["args"][0])


def test_models_go_where_the_service_and_a_calibration_look_for_them() -> None:
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert not mounts["/artefacts"].get("readOnly")
    assert container()["args"][1:] == ["--models", "/artefacts/models"]
    caches = {env_of(container())["HF_HUB_CACHE"]}
    for name in (*SERVICES, *JOBS):
        for template in templates_of(overlay(name)).values():
            caches |= {value for key, value in env_of(ray_container(template["spec"])).items() if key == "HF_HUB_CACHE"}
    assert caches == {"/artefacts/hub"}


def test_a_failed_fetch_is_tried_again_and_one_of_140_gigabytes_has_time() -> None:
    assert spec()["backoffLimit"] >= 3
    assert spec()["template"]["spec"]["restartPolicy"] == "Never", "so that the logs of each attempt stay"
    assert spec()["activeDeadlineSeconds"] >= 140e9 / 10e6, "at 10 MB a second"


def test_the_fetch_may_ask_the_hub() -> None:
    assert "HF_HUB_OFFLINE" not in env_of(container())


@pytest.mark.parametrize(("name", "mode"), [("rwo", "ReadWriteOnce"), ("rwx", "ReadWriteMany")])
def test_both_volumes_are_the_claim_that_all_pods_mount(name: str, mode: str) -> None:
    (claim,) = render(K8S / "volume" / name)
    assert claim["spec"]["accessModes"] == [mode]
    assert "storageClassName" not in claim["spec"], "the default one of the cluster"
    mounted = set()
    for each in OVERLAYS:
        for template in templates_of(overlay(each)).values():
            volumes = (volume.get("persistentVolumeClaim") for volume in template["spec"]["volumes"])
            mounted |= {volume["claimName"] for volume in volumes if volume}
    assert mounted == {claim["metadata"]["name"]}


def test_a_job_moves_the_pointer_back_once_where_the_calibration_publishes() -> None:
    job, container = one(overlay(POINT_BACK), "Job"), ray_container(pod(POINT_BACK, TASK))
    assert job["spec"]["backoffLimit"] == 0, "a second attempt would move it forward again"
    assert container["command"] == ["python", "-m", published.__name__]
    settings = yaml.safe_load(one(overlay("gpu-calibration"), "ConfigMap")["data"]["calibrate.yaml"])
    assert container["args"][:3] == ["point", settings["publish"], published.PREVIOUS]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert not mounts["/artefacts"].get("readOnly")


def test_the_words_of_that_job_are_those_of_the_command() -> None:
    done = CliRunner().invoke(published.app, ["point", "/nowhere", "previous", "--by", "point-back"])
    assert (done.exit_code, "Usage" in done.output) == (2, False), "nothing is published there"
    assert "a pointer in /nowhere" in done.stderr


def test_there_are_no_other_volumes() -> None:
    assert VOLUMES == ("rwo", "rwx")

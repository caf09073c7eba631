"""Every pod passes Pod Security "restricted", writes only where it may, and says what it needs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.k8s.kustomize import JOBS, OVERLAYS, POINT_BACK, REPOSITORY, SERVICES, WEIGHTS, one, overlay
from tests.k8s.pods import PODS, RAY_PODS, clusters_of, env_of, gigabytes, pod, ray_container, templates_of

every_pod = pytest.mark.parametrize(("name", "role"), PODS)
every_ray_pod = pytest.mark.parametrize(("name", "role"), RAY_PODS)


def security_contexts(name: str, role: str) -> list[dict[str, Any]]:
    """Of all containers of a pod, the autoscaler's too. KubeRay's init container copies the one of Ray's container."""
    found = [container["securityContext"] for container in pod(name, role)["containers"]]
    for cluster in clusters_of(overlay(name)) if role == "head" else ():
        if cluster.get("enableInTreeAutoscaling"):
            found.append(cluster["autoscalerOptions"]["securityContext"])
    return found


def mounts_of(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


@every_pod
def test_no_process_is_root_and_none_may_become_it(name: str, role: str) -> None:
    context = pod(name, role)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] >= 1000
    assert context["runAsGroup"] >= 1000
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in security_contexts(name, role):
        assert container["allowPrivilegeEscalation"] is False
        assert container["capabilities"] == {"drop": ["ALL"]}


@every_pod
def test_the_image_cannot_be_written_to(name: str, role: str) -> None:
    assert all(context["readOnlyRootFilesystem"] is True for context in security_contexts(name, role))


@every_pod
def test_pods_share_nothing_with_their_node(name: str, role: str) -> None:
    spec = pod(name, role)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    allowed = {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}
    for volume in spec["volumes"]:
        assert len(volume.keys() & allowed) == 1, volume
    assert not any("hostPort" in port for port in ray_container(spec).get("ports", ()))


@every_ray_pod
def test_ray_has_its_session_folder_and_shared_memory_although_the_root_is_read_only(name: str, role: str) -> None:
    spec = pod(name, role)
    mounts = mounts_of(ray_container(spec))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for path in ("/tmp", "/tmp/ray", "/dev/shm"):
        assert not mounts[path].get("readOnly")
        assert "sizeLimit" in volumes[mounts[path]["name"]]["emptyDir"], "one pod could fill the node's disk"
    assert mounts["/tmp/ray"]["name"] == "ray-logs", "by another name KubeRay would mount a second volume there"
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()


@every_pod
def test_what_a_process_caches_has_a_place_it_may_write_to(name: str, role: str) -> None:
    container = ray_container(pod(name, role))
    env, mounts = env_of(container), mounts_of(container)
    assert env["HOME"] == "/tmp"
    if "TIDE_CACHE_DIR" in env:
        assert not mounts[env["TIDE_CACHE_DIR"]].get("readOnly")


@every_ray_pod
def test_the_object_store_fits_into_shared_memory(name: str, role: str) -> None:
    cluster = clusters_of(overlay(name))[0]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]} | {"head": cluster["headGroupSpec"]}
    spec = pod(name, role)
    size = next(volume for volume in spec["volumes"] if volume["name"] == "shared-mem")["emptyDir"]["sizeLimit"]
    assert int(groups[role]["rayStartParams"]["object-store-memory"]) / 1e9 < gigabytes(size)


@every_pod
def test_volumes_can_be_written_by_the_user_of_the_pod_without_changing_every_file_at_each_start(
    name: str, role: str
) -> None:
    context = pod(name, role)["securityContext"]
    assert context["fsGroup"] == context["runAsGroup"]
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"


@every_pod
def test_memory_is_reserved_whole_so_that_no_neighbour_gets_a_pod_killed(name: str, role: str) -> None:
    for container in pod(name, role)["containers"]:
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


@every_pod
def test_cpus_are_asked_for_and_not_limited_because_a_throttled_step_stops_every_stream(name: str, role: str) -> None:
    for container in pod(name, role)["containers"]:
        assert "cpu" in container["resources"]["requests"]
        assert "cpu" not in container["resources"]["limits"]


@pytest.mark.parametrize("name", SERVICES)
def test_the_autoscaler_beside_the_head_has_resources_and_a_writable_tmp(name: str) -> None:
    options = clusters_of(overlay(name))[0]["autoscalerOptions"]
    assert options["resources"]["requests"]["memory"] == options["resources"]["limits"]["memory"]
    assert {mount["mountPath"] for mount in options["volumeMounts"]} == {"/tmp", "/tmp/ray"}
    assert {"name": "HOME", "value": "/tmp"} in options["env"]


@every_pod
def test_gpus_are_asked_for_and_limited_alike_and_their_taint_is_tolerated(name: str, role: str) -> None:
    resources = ray_container(pod(name, role))["resources"]
    wanted = resources["requests"].get("nvidia.com/gpu")
    assert wanted == resources["limits"].get("nvidia.com/gpu")
    assert wanted == ("1" if name.startswith("gpu") and role != "head" else None)
    tolerated = [each["key"] for each in pod(name, role).get("tolerations", ())]
    assert tolerated == (["nvidia.com/gpu"] if wanted else [])


@every_pod
def test_only_the_head_with_the_autoscaler_holds_a_token_for_the_kubernetes_api(name: str, role: str) -> None:
    mounted = pod(name, role).get("automountServiceAccountToken", True)
    assert mounted == (role == "head" and name in SERVICES)


@every_ray_pod
def test_probes_are_left_to_kuberay_which_asks_the_node_and_the_serve_proxy(name: str, role: str) -> None:
    """Its probe of a worker also decides whether the worker gets requests; one of ours would replace it."""
    probes = {"livenessProbe", "readinessProbe", "startupProbe"}
    assert not any(probes & container.keys() for container in pod(name, role)["containers"])


@every_ray_pod
def test_no_command_replaces_the_ray_start_of_kuberay(name: str, role: str) -> None:
    assert not {"command", "args"} & ray_container(pod(name, role)).keys()


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_namespace_refuses_pods_that_are_not_restricted(name: str) -> None:
    labels = one(overlay(name), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", OVERLAYS)
def test_policies_and_metrics_find_every_pod_by_its_labels(name: str) -> None:
    tasks = {WEIGHTS: "weights", POINT_BACK: "publishing"}
    component = "server" if name in SERVICES else tasks.get(name, "calibration")
    for template in templates_of(overlay(name)).values():
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "tide-serve"
        assert labels["app.kubernetes.io/component"] == component


@pytest.mark.parametrize("name", [*SERVICES, *JOBS])
def test_the_ray_of_the_manifest_is_the_one_that_is_pinned(name: str) -> None:
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^ray==(.+)$", pins, re.MULTILINE)
    assert pinned is not None
    assert {cluster["rayVersion"] for cluster in clusters_of(overlay(name))} == {pinned[1]}


@pytest.mark.parametrize("name", OVERLAYS)
def test_ray_asks_for_a_token_and_its_dashboard_can_be_reached_by_the_operator(name: str) -> None:
    for cluster in clusters_of(overlay(name)):
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_head_does_no_work_so_that_none_can_starve_it(name: str) -> None:
    for cluster in clusters_of(overlay(name)):
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"

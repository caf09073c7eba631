"""What is in the folder for everyone to read: no secret, no place of images, no key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deploy.keys import KeyRing, add_key
from tests.k8s.kustomize import K8S, OVERLAYS, one, overlay

FILES = sorted(path for path in K8S.rglob("*") if path.suffix in {".yaml", ".md"})
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(K8S)))
IMAGE = re.compile(r"^\s*(?:- )?(?:image|newName): *(\S+)", re.MULTILINE)


@each_file
def test_images_have_a_name_and_no_place(path: Path) -> None:
    assert set(IMAGE.findall(path.read_text(encoding="utf-8"))) <= {"tide-serve"}


@each_file
def test_files_can_be_read_in_one_go(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_secret_is_part_of_an_overlay(name: str) -> None:
    assert not [each for each in overlay(name) if each["kind"] == "Secret"]


def test_the_example_of_keys_is_a_file_that_the_server_reads(tmp_path: Path) -> None:
    secret = yaml.safe_load((K8S / "examples" / "keys.secret.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "keys.json"
    file.write_text(secret["stringData"]["keys.json"], encoding="utf-8")
    assert not KeyRing.read(str(file)).is_open
    assert set(re.findall(r"[0-9a-f]{64}", file.read_text(encoding="utf-8"))) == {"0" * 64}, "somebody's real key"


def test_a_file_of_new_key_goes_into_the_secret_as_it_is(tmp_path: Path) -> None:
    """`kubectl create secret --from-file=keys.json`: the key of the entry is the file's name."""
    file = tmp_path / "keys.json"
    key = add_key(file, "team-a")
    assert KeyRing.read(str(file)).caller(f"Bearer {key}").name == "team-a"
    assert key not in file.read_text(encoding="utf-8")


def test_the_quota_has_room_for_two_clusters_because_an_upgrade_runs_both() -> None:
    hard = one(overlay("gpu-production"), "ResourceQuota")["spec"]["hard"]
    cluster = one(overlay("gpu-production"), "RayService")["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    asked = [template["spec"]["containers"][0]["resources"] for template in (cluster["headGroupSpec"]["template"],)]
    worker = group["template"]["spec"]["containers"][0]["resources"]
    everything = [*asked, cluster["autoscalerOptions"]["resources"], *[worker] * group["maxReplicas"]]
    memory = sum(int(each["limits"]["memory"].removesuffix("Gi")) for each in everything)
    gpus = sum(int(each["limits"].get("nvidia.com/gpu", 0)) for each in everything)
    assert int(hard["limits.memory"].removesuffix("Gi")) >= 2 * memory
    assert int(hard["requests.nvidia.com/gpu"]) >= 2 * gpus + 1, "and for a calibration"
    assert "limits.cpu" not in hard, "no container has one, so every pod would be refused"

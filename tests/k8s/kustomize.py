"""The overlays, rendered: by kubectl, and by a small renderer of the few things that our kustomizations use.

The promises are tested on the second, so that they are tested where there is no kubectl; wherever there is one,
test_render.py holds both against each other.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
WEIGHTS, POINT_BACK = "weights", "point-back"
JOBS = tuple(name for name in OVERLAYS if "calibration" in name)
SERVICES = tuple(name for name in OVERLAYS if name not in (*JOBS, WEIGHTS, POINT_BACK))
VOLUMES = tuple(sorted(path.name for path in (K8S / "volume").iterdir()))
COMPONENTS = tuple(sorted(path.name for path in (K8S / "components").iterdir()))
LOCAL = "config.kubernetes.io/local-config"
CLUSTER_WIDE = ("Namespace",)
HANDLED = {
    "apiVersion",
    "kind",
    "resources",
    "components",
    "generatorOptions",
    "configMapGenerator",
    "patches",
    "namespace",
    "images",
    "replacements",
}

Manifest = dict[str, Any]


@cache
def _overlay(name: str) -> list[Manifest]:
    return render(K8S / "overlays" / name)


def overlay(name: str) -> list[Manifest]:
    """What `kubectl apply -k` would send; a copy, to do with as one likes."""
    return copy.deepcopy(_overlay(name))


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only one of a kind, or of a kind and a name."""
    found = [each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def render(folder: Path) -> list[Manifest]:
    return [each for each in _build(folder, []) if LOCAL not in each["metadata"].get("annotations", {})]


def render_by_kubectl(folder: Path) -> list[Manifest]:
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def with_component(folder: Path, base: str, *names: str) -> Path:
    """A kustomization, as a user would write it, of one overlay and some components."""
    up = Path(*[".."] * len(folder.resolve().relative_to("/").parts))
    overlays, components = (K8S / part for part in ("overlays", "components"))
    lines = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "tide",
        "resources": [str(up / (overlays / base).relative_to("/"))],
        "components": [str(up / (components / name).relative_to("/")) for name in names],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines), encoding="utf-8")
    return folder


def _build(folder: Path, below: list[Manifest]) -> list[Manifest]:
    """The manifests of a kustomization; a component changes those below it."""
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert rules.keys() <= HANDLED, f"{folder}: tests/k8s/kustomize.py does not know {sorted(rules.keys() - HANDLED)}"
    manifests = below
    for name in rules.get("resources", ()):
        path = folder / name
        manifests += _build(path, []) if path.is_dir() else list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for name in rules.get("components", ()):
        manifests = _build(folder / name, manifests)
    options = rules.get("generatorOptions", {})
    for generator in rules.get("configMapGenerator", ()):
        options = {**options, **generator.get("options", {})}
        assert options.get("disableNameSuffixHash"), f"{folder}: RayJob would not know the name with a hash"
        manifests.append(_config_map(folder, generator, options))
    for patch in rules.get("patches", ()):
        _patch(folder, patch, manifests)
    for replacement in rules.get("replacements", ()):
        _replace(replacement, manifests)
    for manifest in manifests:
        if "namespace" in rules and manifest["kind"] not in CLUSTER_WIDE:
            manifest["metadata"]["namespace"] = rules["namespace"]
        for image in rules.get("images", ()):
            _set_image(manifest, image)
    return manifests


def _config_map(folder: Path, generator: dict[str, Any], options: dict[str, Any]) -> Manifest:
    data = {}
    for entry in generator["files"]:
        key, _, path = entry.rpartition("=")
        data[key or Path(path).name] = (folder / path).read_text(encoding="utf-8")
    metadata = {"name": generator["name"]}
    metadata |= {part: dict(options[part]) for part in ("labels", "annotations") if part in options}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(folder: Path, patch: dict[str, Any], manifests: list[Manifest]) -> None:
    """A patch whose target is not there changes nothing: a component has one for each kind that it may meet."""
    target = patch["target"]
    text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text(encoding="utf-8")
    for manifest in manifests:
        if (manifest["kind"], manifest["metadata"]["name"]) == (target["kind"], target["name"]):
            changed = jsonpatch.apply_patch(manifest, yaml.safe_load(text))
            manifest.clear()
            manifest.update(changed)


def _replace(replacement: dict[str, Any], manifests: list[Manifest]) -> None:
    source = replacement["source"]
    value: Any = one(manifests, source["kind"], source["name"])
    for part in source["fieldPath"].split("."):
        value = value[part]
    for target in replacement["targets"]:
        holder: Any = one(manifests, target["select"]["kind"], target["select"]["name"])
        for path in target["fieldPaths"]:
            *parents, last = path.split(".")
            for part in parents:
                holder = holder[part]
            assert last in holder, f"{path}: kustomize replaces only what is there"
            holder[last] = value


def _set_image(node: Any, image: dict[str, str]) -> None:
    if isinstance(node, list):
        for item in node:
            _set_image(item, image)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                for container in value:
                    if container.get("image", "").split(":")[0] == image["name"]:
                        container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
            _set_image(value, image)

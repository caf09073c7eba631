"""The commands of the guide: what each would send, and into which namespace; those of other documents, too."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.documents import Document, commands, documents
from tests.k8s.kustomize import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    REPOSITORY,
    VOLUMES,
    render,
    render_by_kubectl,
    with_component,
)
from tests.k8s.pods import templates_of

GUIDE = Document("docs/kubernetes.md")
NAMESPACES = {"k8s/observability": "monitoring"}
OURS = "tide"
CLUSTER_WIDE = {"crd", "namespace", "node", "nodes"}
KUSTOMIZATIONS = sorted(str(path.parent.relative_to(REPOSITORY)) for path in K8S.rglob("kustomization.yaml"))


@cache
def sent(folder: str) -> list[dict[str, Any]]:
    """By kubectl where there is one."""
    renderer = render if shutil.which("kubectl") is None else render_by_kubectl
    return renderer(REPOSITORY / folder)


def kubectl_commands() -> Iterator[tuple[str, list[str]]]:
    """The words after `kubectl` of each complete command, also of those behind a pipe and in comments of manifests."""
    for document in documents():
        for _, *words in commands(document, "kubectl"):
            yield from ((document.path, part) for part in _split(words))
    for path in sorted(K8S.rglob("*.yaml")):
        for line in re.findall(r"^#.*?(?<![\w-])kubectl ([^`#]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield from ((str(path.relative_to(REPOSITORY)), part) for part in _split(line.rstrip(").,").split()))


def _split(words: list[str]) -> Iterator[list[str]]:
    while "|" in words:
        cut = words.index("|")
        yield words[:cut]
        words = words[cut + 1 :]
        words = words[1:] if words[:1] == ["kubectl"] else []
    if len(words) > 2 or words[:1] == ["get"]:  # shorter ones are names of commands in a sentence
        yield words


def value_of(words: list[str], *options: str) -> str | None:
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word in options), None)


COMMANDS = sorted({(where, tuple(words)) for where, words in kubectl_commands()})
APPLIED = sorted({(where, folder) for where, words in COMMANDS if (folder := value_of(list(words), "-k"))})


def test_the_guide_has_the_commands_of_a_first_token() -> None:
    """So that the tests below look at something."""
    folders = [folder for where, folder in APPLIED if where == GUIDE.path]
    assert {"k8s/base/common", "k8s/volume/rwo", "k8s/overlays/cpu", "k8s/overlays/weights"} <= set(folders)
    assert len([where for where, _ in COMMANDS if where == GUIDE.path]) >= 20


def test_the_guide_installs_the_operator_where_the_network_policies_expect_it() -> None:
    [install] = [words for program, *words in commands(GUIDE, "helm") if words[:1] == ["install"]]
    policies = [each for each in sent("k8s/base/service") if each["kind"] == "NetworkPolicy"]
    assert value_of(install, "--namespace") in str(policies)


def test_the_guide_names_the_image_in_every_overlay_that_has_one() -> None:
    [names] = re.findall(r"^ *for overlay in (.+); do$", GUIDE.text, re.MULTILINE)
    bases = {
        path.name for path in (K8S / "overlays").iterdir() if "images:" in (path / "kustomization.yaml").read_text()
    }
    assert set(names.split()) == bases


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_nothing_lands_in_whatever_namespace_the_context_has(folder: str) -> None:
    """Not even of a base or a component that is applied alone: a default deny elsewhere cuts that namespace off."""
    for each in sent(folder):
        if each["kind"] == "Namespace":
            assert each["metadata"]["name"] == OURS
        else:
            assert each["metadata"].get("namespace") == NAMESPACES.get(folder, OURS), each["metadata"]["name"]


@pytest.mark.parametrize(("where", "folder"), APPLIED)
def test_what_a_command_applies_exists_and_its_namespace_is_left_to_the_manifests(where: str, folder: str) -> None:
    assert folder in KUSTOMIZATIONS
    assert sent(folder)
    for place, words in COMMANDS:
        if place == where and value_of(list(words), "-k") == folder:
            assert value_of(list(words), "-n", "--namespace") is None, "two places would name it"


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=lambda part: part if isinstance(part, str) else part[0])
def test_every_other_command_names_the_namespace_it_works_in(where: str, words: tuple[str, ...]) -> None:
    rest = list(words)
    if value_of(rest, "-k") is not None:
        return
    if value_of(rest, "-n", "--namespace") is not None:
        assert value_of(rest, "-n", "--namespace") in {OURS, *NAMESPACES.values()}
    elif value_of(rest, "-f") == "-":
        assert rest == ["apply", "-f", "-"], "it gets what the command before it made, with its namespace"
    else:
        assert "-A" in rest or rest[1] in CLUSTER_WIDE, f"{where}: kubectl {' '.join(rest)}"


def test_objects_that_commands_name_are_those_of_the_manifests() -> None:
    kinds = {"rayservice": "RayService", "rayjob": "RayJob", "job": "Job"}
    everything = [each for folder in KUSTOMIZATIONS for each in sent(folder)]
    names = {(each["kind"], each["metadata"]["name"]) for each in everything}
    seen = set()
    for _, words in COMMANDS:
        pairs = [*itertools.pairwise(words), *(word.split("/", 1) for word in words if "/" in word)]
        seen |= {(kinds[kind], name) for kind, name in pairs if kind in kinds}
        for kind, name in pairs:
            if kind == "service" and name.endswith("-svc"):
                seen.add(("RayService", name.removesuffix("-serve-svc")))
    assert {kind for kind, _ in seen} == set(kinds.values())
    assert seen <= names


def test_the_guide_makes_every_secret_that_pods_and_the_gateway_read_and_no_other(tmp_path: Path) -> None:
    made = {words[words.index("secret") + 2] for _, words in COMMANDS if "secret" in words and "create" in words}
    used: set[str] = set()
    for base in ("gpu", "gpu-calibration", "weights"):
        (tmp_path / base).mkdir()
        text = yaml.safe_dump(render(with_component(tmp_path / base, base, *COMPONENTS)))
        used |= set(re.findall(r"(?:secretName|secretKeyRef:\n *key: \w+\n *name|secretRef:\n *name): (\S+)", text))
        used |= set(re.findall(r"(?:imagePullSecrets:\n *- name|kind: Secret\n *name): (\S+)", text))
    assert made == used


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS, *(f"k8s/volume/{name}" for name in VOLUMES)])
def test_every_overlay_component_and_volume_is_in_the_guide(name: str) -> None:
    assert any(re.search(rf"(?:^|[\s/]){re.escape(name)}(?![\w-])", line) for line in GUIDE.lines)


def test_the_map_of_the_folder_names_its_parts_and_repeats_no_table_of_the_guide() -> None:
    text = Document("k8s/README.md").text
    folders = {path.name for path in K8S.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders <= set(re.findall(r"^(\w+)/", text, re.MULTILINE))
    assert "|---" not in text
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "gpu-production"])
def test_the_image_that_the_command_names_is_that_of_every_container(tmp_path: Path, name: str) -> None:
    """`kustomize edit set image tide-serve=NAME:TAG` writes the entry that is replaced here."""
    line = next(line for line in GUIDE.lines if "kustomize edit set image" in line)
    found = re.search(r"cd (\S+)/\$overlay && kustomize edit set image (\S+?)=(\w+):(\w+)\)", line)
    assert found is not None
    assert f"{found[1]}/{name}" in KUSTOMIZATIONS
    for part in ("k8s", "deploy"):
        ignored = shutil.ignore_patterns("*.py", "__pycache__", "artefacts")
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=ignored)
    file = tmp_path / "k8s" / "overlays" / name / "kustomization.yaml"
    rules = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert [image["name"] for image in rules["images"]] == [found[2]]
    rules["images"] = [{"name": found[2], "newName": "mine/tide", "newTag": "7"}]
    file.write_text(yaml.safe_dump(rules), encoding="utf-8")
    templates = templates_of(render(file.parent)).values()
    assert {each["image"] for one in templates for each in one["spec"]["containers"]} == {"mine/tide:7"}

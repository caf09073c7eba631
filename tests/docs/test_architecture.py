"""The map is right: files and functions that docs/architecture.md names exist, and the site has its figures."""

from __future__ import annotations

import ast
import re
from xml.etree import ElementTree

import pytest

from tests.docs.documents import ROOT, Document

MAP = Document("docs/architecture.md")
PLACE = re.compile(r"`([\w/]+\.py)` `([A-Za-z_][\w.]*)`")
FIGURES = ("overview", "request", "cycle-plain", "cycle-gpu", "calibration", "deployment")
LIFE = "artefact-life"
"""Of an artefact: in the guides of those who make one and of those who deploy it."""


def defined(path: str) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{one.name}" for one in methods}
    return names


def places() -> list[tuple[str, str]]:
    return PLACE.findall(MAP.text)


def test_functions_that_the_map_names_are_in_the_files_it_names() -> None:
    assert len(places()) > 15
    assert [(path, name) for path, name in places() if name not in defined(path)] == []


def test_the_tree_names_what_exists() -> None:
    [tree] = MAP.blocks("")
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = line.lstrip().split("  ")[0].split()
        if names[0].endswith("/"):
            folders = [*folders[:depth], names[0]]
            names = names[:1]
            parent = "".join(folders[:depth])
        else:
            parent = "".join(folders[:depth])
        for name in [name for name in names if "." in name or name.endswith("/")]:
            assert (ROOT / parent / name).exists(), parent + name


@pytest.mark.parametrize("name", [*FIGURES, LIFE])
def test_a_figure_is_whole_and_needs_nothing_from_elsewhere(name: str) -> None:
    text = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_the_map_and_the_overview_show_all_figures() -> None:
    shown = set(re.findall(r"figures/([\w-]+)\.svg", MAP.text + Document("README.md").text))
    assert shown == set(FIGURES)


@pytest.mark.parametrize("guide", ["docs/calibration-job.md", "docs/upgrade.md"])
def test_the_life_of_an_artefact_is_shown_to_those_who_make_and_those_who_deploy_one(guide: str) -> None:
    assert f"(figures/{LIFE}.svg)" in Document(guide).text


def test_every_figure_is_shown_somewhere() -> None:
    files = {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert files == {*FIGURES, LIFE}


def test_the_overview_stays_short() -> None:
    assert len(Document("README.md").text.splitlines()) <= 160

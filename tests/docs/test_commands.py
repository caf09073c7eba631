"""Every command in the documents can be run: its program, options and files exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import HISTORY, ROOT, Document, commands, documents

DOCUMENTS = documents()
FOLDERS = (
    "benchmarks",
    "csrc",
    "deploy",
    "docs",
    "examples",
    "k8s",
    "protos",
    "tests",
    "tide_client",
    "tide_core",
    "tools",
)
PATH = re.compile(rf"(?<![\w/.$-])(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
BUILT = {"tide_core/kernels/_native", "tide_core/kernels/_cuda"}
"""Modules that a build writes."""
of_each = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.path)


@pytest.fixture(scope="module")
def tide() -> Any:
    import typer

    from tide_core.cli.app import app

    return typer.main.get_command(app)


@of_each
def test_tide_commands_and_their_options_exist(document: Document, tide: Any) -> None:
    for _, *words in commands(document, "tide"):
        if not words:
            continue
        if words[0].startswith("--"):
            assert words[0] in {"--help", "--version"}
            continue
        assert words[0] in tide.commands, words
        known = {option for each in tide.commands[words[0]].params for option in (*each.opts, *each.secondary_opts)}
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--\w", word)}
        assert given <= known | {"--help"}, words


@of_each
def test_make_targets_exist(document: Document) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for _, *words in commands(document, "make"):
        assert {word for word in words if "=" not in word} <= targets, words


@of_each
def test_python_runs_modules_and_files_that_exist(document: Document) -> None:
    for program, *words in commands(document, "python"):
        if words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1]), (program, *words)
        elif words[:1] == ["-c"]:
            compile(words[1], document.path, "exec")
        elif words:
            assert (ROOT / words[0]).is_file(), (program, *words)


@of_each
def test_blocks_of_python_compile(document: Document) -> None:
    for block in document.blocks("python"):
        compile(block, document.path, "exec")


@of_each
def test_blocks_of_yaml_can_be_read(document: Document) -> None:
    import yaml

    for block in document.blocks("yaml"):
        assert yaml.safe_load(block) is not None


@pytest.mark.parametrize(
    "document", [one for one in DOCUMENTS if not one.path.startswith(HISTORY)], ids=lambda document: document.path
)
def test_files_of_the_repository_that_are_named_exist(document: Document) -> None:
    named = {path.rstrip(".,") for line in document.lines for path in PATH.findall(line)}
    folders = ROOT, (ROOT / document.path).parent
    missing = [path for path in sorted(named - BUILT) if not any(_exists(path, folder) for folder in folders)]
    assert missing == []


def _exists(path: str, folder: Path) -> bool:
    """Braces stand for several names, stars for any."""
    if braces := re.search(r"\{([^{}]*)\}", path):
        return all(_exists(path.replace(braces[0], one, 1), folder) for one in braces[1].split(","))
    return any(folder.glob(path)) if "*" in path else (folder / path).exists()

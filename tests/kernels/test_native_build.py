"""The module stands alone: one build serves every Torch version."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (SOURCES / folder).rglob("*") if path.suffix in SUFFIXES]
    assert found
    return found


def test_no_source_includes_a_torch_header() -> None:
    for path in sources("."):
        for header in includes(path):
            assert not re.match(r"(torch|ATen|c10|caffe2)\b", header), f"{path.name} includes {header}"


def test_kernels_and_ops_include_no_python_header() -> None:
    for path in sources("cpu/kernels", "cpu/ops", "cuda"):
        for header in includes(path) if path.name != "bindings.cpp" else []:
            assert "pybind11" not in header, f"{path.name} includes {header}"
            assert header != "Python.h", f"{path.name} includes {header}"


def test_kernels_know_nothing_of_the_ops_above_them() -> None:
    for path in sources("cpu/kernels"):
        assert not [header for header in includes(path) if header.startswith("cpu/ops/")], path.name


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_the_module_links_neither_torch_nor_openmp() -> None:
    native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
    dump = subprocess.run(["readelf", "-d", native.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dump)
    assert needed
    for library in needed:
        assert not re.match(r"lib(torch|c10|gomp|omp|iomp|python)", library), library


def test_the_module_is_built_wherever_there_is_a_compiler() -> None:
    """So that the tests of the native ops cannot be skipped by a build that failed quietly."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    importlib.import_module("tide_core.kernels._native")

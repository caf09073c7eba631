"""A native module that was built for an installed copy serves another copy of the same sources, and no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tide_core.kernels.elsewhere import folders

MODULE = f"_native{EXTENSION_SUFFIXES[0]}"


def copy_at(root: Path, *, built: bool, source: str = "OPS = 1") -> str:
    folder = root / "ours" / "kernels"
    folder.mkdir(parents=True)
    (root / "ours" / "__init__.py").touch()
    (folder / "__init__.py").write_text(source)
    if built:
        (folder / MODULE).touch()
    return str(folder)


def found(own: str) -> list[str]:
    import ours.kernels  # type: ignore[import-not-found]

    assert ours.kernels.__path__ == [own]
    return folders("ours.kernels", [own])


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in ("ours", "ours.kernels"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("own_built", "source", "expected"),
    [(False, "OPS = 1", "both"), (True, "OPS = 1", "own"), (False, "OPS = 2", "own")],
    ids=["not built here", "built here", "other sources there"],
)
def test_the_other_copys_folder_is_searched_only_if_need_be_and_it_is_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_built: bool, source: str, expected: str
) -> None:
    own, other = copy_at(tmp_path / "a", built=own_built), copy_at(tmp_path / "b", built=True, source=source)
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert found(own) == ([own, other] if expected == "both" else [own])


def test_of_several_copies_that_fit_the_first_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = copy_at(tmp_path / "a", built=False)
    first, _ = copy_at(tmp_path / "b", built=True), copy_at(tmp_path / "c", built=True)
    for name in ("c", "b", "a"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert found(own) == [own, first]


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_copy_that_differs_in_any_of_its_files_is_not_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    own, _ = copy_at(tmp_path / "a", built=False), copy_at(tmp_path / "b", built=True)
    (tmp_path / where / "ours" / "kernels" / "one_more.py").write_text("OPS = 2")
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert found(own) == [own]

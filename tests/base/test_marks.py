"""Marks that conftest.py gives by name: none of them is for a test that is not there any more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import MARKS

pytestmark = pytest.mark.unit
FOLDER = Path(__file__).parents[1]
FILES = {f"tests/{path.relative_to(FOLDER).as_posix()}": path for path in FOLDER.rglob("test_*.py")}


@pytest.mark.parametrize("part", [part for parts in MARKS.values() for part in parts])
def test_every_part_of_a_name_is_that_of_a_test(part: str) -> None:
    file, _, name = part.partition("::")
    found = [path for known, path in FILES.items() if file in known]
    assert any(re.search(rf"^(async )?(def )?{name}", path.read_text(encoding="utf-8"), re.MULTILINE) for path in found)

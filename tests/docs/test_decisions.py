"""Decisions are short, dated, and all in their index."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import ROOT, Document, slug

FOLDER = ROOT / "docs" / "decisions"
AREAS = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "index.md")
MOST_LINES, MOST_COLUMNS = 12, 165


def entries(area: str) -> list[tuple[str, list[str]]]:
    """Heading and lines of every entry of a file."""
    text = (FOLDER / area).read_text(encoding="utf-8")
    parts = [part.strip().splitlines() for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return [(heading, [line for line in lines if line]) for heading, *lines in parts]


@pytest.mark.parametrize("area", AREAS)
def test_an_entry_is_short_dated_and_gives_its_reason(area: str) -> None:
    assert entries(area)
    for heading, lines in entries(area):
        assert re.match(r"\d{4}-\d\d-\d\d", lines[0]), heading
        assert any(line.startswith("- **Why**: ") for line in lines), heading
        assert len(lines) <= MOST_LINES, heading
        assert max(map(len, lines)) <= MOST_COLUMNS, heading


def test_the_index_has_every_entry_once_and_marks_those_that_are_superseded() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\((\S+)\)( \(superseded\))?$", index, re.MULTILINE)
    expected = {
        (heading, f"{area}#{slug(heading)}", " (superseded)" if _is_superseded(lines) else "")
        for area in AREAS
        for heading, lines in entries(area)
    }
    assert len(listed) == len(expected)
    assert set(listed) == expected


def test_headings_of_an_area_differ() -> None:
    for area in AREAS:
        headings = [slug(heading) for heading, _ in entries(area)]
        assert len(set(headings)) == len(headings), area
        assert set(headings) <= Document(f"docs/decisions/{area}").anchors


def _is_superseded(lines: list[str]) -> bool:
    return any(line.startswith("- **Superseded by**") for line in lines)

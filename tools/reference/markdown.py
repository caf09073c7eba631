"""Markdown helpers for the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

COMMAND = "python tools/reference_docs.py"
NOTE = f"<!-- Written by {COMMAND}; edit the code, not this page. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text for a table cell: one line, bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def lines(*parts: str) -> str:
    """A paragraph, on one line."""
    return " ".join(parts)


def code(value: object) -> str:
    return f"`{value}`"


def between(text: str, begin: str, end: str, inside: str) -> str:
    """`text` with the part between two marks replaced."""
    before, mark, rest = text.partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise SystemExit(f"{begin} … {end} was not found")
    return f"{before}{begin}\n\n{inside}\n\n{end}{after}"

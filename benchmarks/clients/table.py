"""The table of clients and features in docs/openai.md."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.clients.features import FEATURES
from benchmarks.clients.run import Result
from tools.reference.markdown import code, table

BEGIN = "<!-- clients: python -m benchmarks.clients -->"
END = "<!-- end of the clients -->"
PASSED, FAILED, NOT_ASKED, NOT_INSTALLED = "✓", "✗", "–", "not run"


def markdown(results: Mapping[str, Result], date: str) -> str:
    """A row for each feature, a column for each client."""
    head = ["test", "feature", *(f"{client} {result.version or ''}".strip() for client, result in results.items())]
    rows = [
        [code(feature), text, *(_cell(result, feature) for result in results.values())]
        for feature, text in FEATURES.items()
    ]
    return f"{table(head, rows)}\n\nRun on {date}."


def _cell(result: Result, feature: str) -> str:
    outcome = result.outcomes.get(feature)
    if result.version is None:
        return NOT_INSTALLED
    if outcome is None:
        return NOT_ASKED
    return f"{PASSED} {outcome.remark}".rstrip() if outcome.passed else FAILED

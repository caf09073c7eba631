"""The table of clients: what it shows is what was checked, and each of its cells has a test."""

from __future__ import annotations

import re

import pytest

from benchmarks.clients.features import FEATURES, Checks, Service
from benchmarks.clients.run import CLIENTS, Outcome, Result, run_client
from benchmarks.clients.table import BEGIN, END, FAILED, NOT_ASKED, NOT_INSTALLED, PASSED, markdown
from benchmarks.common import ROOT
from tests.serve import test_serve_run


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def in_document() -> list[list[str]]:
    text = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    return cells(text.partition(BEGIN)[2].partition(END)[0])


@pytest.mark.unit
def test_a_cell_of_the_document_passed_if_and_only_if_it_has_a_check() -> None:
    head, _, *rows = in_document()
    assert [name.split()[0] for name in head[2:]] == list(CLIENTS)
    assert [row[0].strip("`") for row in rows] == list(FEATURES)
    for feature, row in zip(FEATURES, rows, strict=True):
        for checks, cell in zip(CLIENTS.values(), row[2:], strict=True):
            wanted = PASSED if feature in checks.by_feature else NOT_ASKED
            assert cell.split()[0] == wanted, f"{checks.distribution} {feature}: run python -m benchmarks.clients"


@pytest.mark.unit
def test_every_check_is_a_test_of_the_live_service() -> None:
    [marks] = [mark.args[1] for mark in test_serve_run.test_clients.pytestmark]  # type: ignore[attr-defined]
    assert set(marks) == {(client, feature) for client, checks in CLIENTS.items() for feature in checks.by_feature}
    assert {feature for _, feature in marks} == set(FEATURES)


@pytest.mark.unit
def test_the_versions_of_the_document_are_those_that_are_installed() -> None:
    pins = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "tools/clients.txt"))
    for name in in_document()[0][2:]:
        assert re.search(rf"^{name.replace(' ', '==')}$", pins, re.MULTILINE), (
            f"{name}: run python -m benchmarks.clients"
        )


@pytest.mark.unit
def test_no_client_of_the_extra_folder_hides_a_package_that_is_pinned() -> None:
    names = [
        {
            re.sub(r"[-_.]+", "-", line.partition("==")[0].lower())
            for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
            if not line.startswith("#")
        }
        for file in ("constraints.txt", "tools/clients.txt")
    ]
    assert names[0] & names[1] == set()


@pytest.mark.unit
def test_the_table_shows_what_failed_and_who_was_not_asked() -> None:
    results = {
        "one": Result("1.0", {"chat": Outcome(True, "score 0.5"), "stream": Outcome(False, "no text")}),
        "two": Result(),
    }
    rows = {row[0].strip("`"): row[2:] for row in cells(markdown(results, "2026-01-01"))}
    assert rows["test"] == ["one 1.0", "two"]
    assert rows["chat"] == [f"{PASSED} score 0.5", NOT_INSTALLED]
    assert rows["stream"] == [FAILED, NOT_INSTALLED]
    assert rows["models"] == [NOT_ASKED, NOT_INSTALLED]


@pytest.mark.unit
def test_a_feature_is_checked_once_and_is_in_the_list() -> None:
    check = Checks("some")
    check("chat")(lambda at: None)
    for feature in ("chat", "no such feature"):
        with pytest.raises(ValueError, match=feature):
            check(feature)


def test_a_client_without_a_service_fails_every_check() -> None:
    result = run_client("openai", Service("http://127.0.0.1:9", "none"))
    assert result.version is not None
    assert result.outcomes.keys() == CLIENTS["openai"].by_feature.keys()
    assert not any(outcome.passed for outcome in result.outcomes.values())

"""The table of docs/performance.md is made of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import table as gpu_table
from benchmarks.gpu.table import BEGIN, END, ROWS, bars_of, put_into, render

DOCUMENT = Path(gpu_table.__file__).parents[2] / "docs" / "performance.md"


def make_report(
    date: str = "2026-11-15T10:00:00+00:00", *, small: bool = False, **values: float | None
) -> dict[str, Any]:
    measures = {key: {"value": value, "shown": "as given"} for key, value in values.items()}
    return {
        "conditions": {"date": date, "hardware": "a GPU", "kernels": "cuda", "commit": "abc", "small": small},
        "parts": {"step": {"measures": measures, "seconds": 1.0}, "demo": {"error": "none", "seconds": 1.0}},
    }


def line_of(table: str, key: str) -> str:
    what = next(row.what for row in ROWS if row.key == key)
    return next(line for line in table.splitlines() if line.startswith(f"| {what} |"))


def test_a_row_that_was_not_measured_shows_its_command() -> None:
    table = render([make_report(step_1=1.2)])
    assert "| ≥ 1.40× | ≥ 1.80× | - | `python -m benchmarks.gpu --parts demo` |" in line_of(table, "demo_8")
    other = "| ≥ 1.90× | ≥ 2.60× | - | `python -m benchmarks.production --parts measure` |"
    assert other in line_of(table, "demo_x8_1")


def test_a_measured_row_has_its_value_its_date_and_whether_the_bar_was_missed() -> None:
    table = render([make_report(step_1=1.25, step_8=1.351, reads=1, tide=None)])
    assert "**1.25×** (as given) | 2026-11-15, a GPU, cuda kernels, commit abc |" in line_of(table, "step_1")
    assert "**1.35×**, **missed** (as given)" in line_of(table, "step_8")
    assert "| ≤ 1 | ≤ 0 | **1** (as given)" in line_of(table, "reads")
    assert "| reported |  | as given |" in line_of(table, "tide")
    sizes = render([make_report(demo_x8_minutes=12.3456, demo_x8_artefact=151.5)])
    assert "| ≤ 15 min | ≤ 8 min | **12.35 min** (as given)" in line_of(sizes, "demo_x8_minutes")
    assert "| ≤ 150 MB |  | **151.5 MB**, **missed** (as given)" in line_of(sizes, "demo_x8_artefact")


def test_of_several_reports_the_last_that_has_a_row_counts() -> None:
    reports = [make_report(step_1=1.4, shallow=1.1), make_report("2026-12-01T00:00:00+00:00", step_1=1.1)]
    table = render(reports)
    assert "**1.10×** (as given) | 2026-12-01" in line_of(table, "step_1")
    assert "2026-11-15" in line_of(table, "shallow")


def test_bars_are_checked_in_the_right_direction() -> None:
    low, high = bars_of({"deep": {"value": 1.06}, "demo_1": {"value": 1.69}, "eager": {"value": 9.0}})
    assert not low.holds
    assert not high.holds
    assert all(bar.holds for bar in bars_of({"deep": {"value": 1.05}, "demo_1": {"value": 1.7}}))
    assert bars_of({"reads": {"value": None}}) == []


def test_only_the_table_of_a_document_is_replaced(tmp_path: Path) -> None:
    document, report = tmp_path / "doc.md", tmp_path / "report.json"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report.write_text(json.dumps(make_report(step_1=1.0)))
    assert gpu_table.main([str(report), "--into", str(document)]) == 0
    text = document.read_text()
    assert text == f"before\n{BEGIN}\n{render([make_report(step_1=1.0)])}\n{END}\nafter\n"
    with pytest.raises(SystemExit, match="the document has no"):
        put_into("nothing here", "table")


def test_rows_that_no_report_has_stay_as_they_are_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, report = tmp_path / "doc.md", tmp_path / "report.json"
    old = render([make_report(step_1=1.4, shallow=1.1, tide=None)])
    document.write_text(f"before\n{BEGIN}\n{old}\n{END}\nafter\n")
    report.write_text(json.dumps(make_report("2026-12-01T00:00:00+00:00", step_1=1.1, demo_x8_1=2.0)))
    assert gpu_table.main([str(report), "--into", str(document), "--keep"]) == 0
    new = gpu_table.table_of(document.read_text())
    assert "**1.10×** (as given) | 2026-12-01" in line_of(new, "step_1")
    assert "**2.00×** (as given) | 2026-12-01" in line_of(new, "demo_x8_1")
    changed = {line_of(new, key) for key in ("step_1", "demo_x8_1")}
    assert {*new.splitlines()} - {*old.splitlines()} == changed
    assert "2026-11-15" in line_of(new, "tide")
    with pytest.raises(SystemExit):
        gpu_table.main([str(report), "--keep"])
    assert "--keep: there is no document" in capsys.readouterr().err


def test_a_run_at_tiny_sizes_is_kept_out_of_documents(tmp_path: Path) -> None:
    document, report = tmp_path / "doc.md", tmp_path / "report.json"
    document.write_text(f"{BEGIN}\nold\n{END}\n")
    report.write_text(json.dumps(make_report(step_1=1.0, small=True)))
    with pytest.raises(SystemExit, match="--small"):
        gpu_table.main([str(report), "--into", str(document)])
    assert "old" in document.read_text()


def test_the_document_has_every_row_with_its_bar_and_aim() -> None:
    text = DOCUMENT.read_text()
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    empty = render([]).splitlines()
    assert len(table) == len(empty)
    for line, expected in zip(table, empty, strict=True):
        assert line.split(" | ")[:3] == expected.split(" | ")[:3]

"""The GPU table in markdown: bar, aim and measured value of each row.

    python -m benchmarks.gpu.table report.json                             # print it
    python -m benchmarks.gpu.table a.json b.json --into docs/performance.md  # replace the table of the document
    python -m benchmarks.gpu.table b.json --into docs/performance.md --keep  # rows that b.json lacks stay as they are

Reports are those of `python -m benchmarks.gpu --out` and `python -m benchmarks.production --out`; if several have a
row, the last one counts. No number of the table is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar

BEGIN, END = "<!-- gpu table: benchmarks/gpu/table.py -->", "<!-- end of the gpu table -->"
NOT_MEASURED = "-"
NUM_COLUMNS = 5


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    key: str
    part: str
    what: str
    bar: float | None = None
    aim: float | None = None
    at_least: bool = False
    unit: str = "×"
    bench: str = "gpu"
    """The benchmark that measures it: `python -m benchmarks.NAME`."""

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.bench} --parts {self.part}"

    def limit(self, value: float | None) -> str:
        if value is None:
            return "reported"
        return f"{'≥' if self.at_least else '≤'} {self.number(value)}"

    def number(self, value: float) -> str:
        return f"{value:.2f}×" if self.unit == "×" else f"{value:.4g}{self.unit}"

    def bar_of(self, value: float) -> Bar | None:
        return None if self.bar is None else Bar(self.what, value, self.bar, at_least=self.at_least)


ROWS = (
    Row("step_1", "step", "full-depth step, 8B, batch 1, against the weight-read floor", 1.25, 1.10),
    Row("step_8", "step", "full-depth step, 8B, batch 8", 1.35, 1.15),
    Row("step_32", "step", "full-depth step, 8B, batch 32", 1.5, 1.25),
    Row("shallow", "cycle", "shallow pass, 8B, batch 1, against its own byte floor", 1.5, 1.2),
    Row("deep", "cycle", "deep pass over 5 pending tokens against over 1", 1.05, 1.02),
    Row("routers", "cycle", "routers on, no exits, against `full`", 1.02, 1.01),
    Row("reads", "reads", "host reads in a cycle", 1, 0, unit=""),
    Row("demo_1", "demo", "`verified` against `full`, demo, batch 1", 1.7, 2.5, at_least=True),
    Row("demo_8", "demo", "`verified` against `full`, demo, batch 8", 1.4, 1.8, at_least=True),
    Row("demo_32", "demo", "`verified` against `full`, demo, batch 32", 1.1, 1.4, at_least=True),
    Row(
        "demo_8_logprobs",
        "demo",
        "rows with log-probabilities against plain ones, `verified`, demo, batch 8",
        0.9,
        1.0,
        at_least=True,
    ),
    Row(
        "demo_8_penalties",
        "demo",
        "rows with penalties against plain ones, `verified`, demo, batch 8",
        0.9,
        1.0,
        at_least=True,
    ),
    Row(
        "demo_8_temperature",
        "demo",
        "rows with a temperature against plain ones, `verified`, demo, batch 8",
        0.9,
        1.0,
        at_least=True,
    ),
    Row(
        "demo_8_mixed",
        "demo",
        "seven plain rows next to one such row against next to a plain one, the worst kind",
        0.97,
        1.0,
        at_least=True,
    ),
    Row("replay_1", "replay", "8B, acceptance replayed from the demo's traces, batch 1", 1.7, 2.2, at_least=True),
    Row("replay_8", "replay", "8B, acceptance replayed from the demo's traces, batch 8", 1.4, 1.8, at_least=True),
    *(
        Row(
            f"demo_x8_{rows}",
            "measure",
            f"`verified` against `full`, 7.25B (the demo model widened eight times), batch {rows}",
            bar,
            aim,
            at_least=True,
            bench="production",
        )
        for rows, bar, aim in ((1, 1.9, 2.6), (8, 1.7, 2.0), (32, 1.35, 1.6), (128, 1.05, 1.2))
    ),
    Row(
        "demo_x8_minutes",
        "calibrate",
        "calibration of the 7.25B until published",
        15,
        8,
        unit=" min",
        bench="production",
    ),
    Row("demo_x8_artefact", "calibrate", "artefact of the 7.25B", 150, unit=" MB", bench="production"),
    Row("demo_x8_host", "calibrate", "host memory of that calibration, peak", 16, unit=" GB", bench="production"),
    *(
        Row(f"fp8_{rows}", "fp8", f"full-depth step, 8B, weights in FP8 against bfloat16, batch {rows}", bar, aim)
        for rows, bar, aim in ((1, 0.66, 0.55), (8, 0.72, 0.6), (32, 0.85, 0.7))
    ),
    Row("fp8_floor", "fp8", "full-depth step, 8B, FP8, batch 1, against its own weight-read floor", 1.35),
    *(
        Row(f"seventy_{rows}", "seventy", f"full-depth step, 70B, FP8, batch {rows}, against its weight-read floor")
        for rows in (1, 8, 32)
    ),
    Row("load_host", "load", "host memory while an 8B in shards is loaded, over the largest shard", 1.2),
    Row(
        "attention_512", "kernels", "paged attention, 1 to 8 queries, context 512, against the KV-read floor", 1.3, 1.1
    ),
    Row("attention_8192", "kernels", "paged attention, context 8k", 1.3, 1.1),
    Row("attention_32768", "kernels", "paged attention, context 32k", 1.3, 1.1),
    Row("router", "kernels", "norm and router, 1 to 256 rows of 4096, over plain Torch", 3.0, 5.0, at_least=True),
    Row("eager", "rivals", "`transformers` generate, eager, 8B, batch 1: its step over ours"),
    Row("static", "rivals", "`transformers` generate, static cache and compiled, 8B, batch 1: its step over ours"),
    Row("tide", "rivals", "`tide-inference`, 8B, batch 1: its step over ours"),
)
"""In the order of the document."""


def bars_of(measures: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """The bars of these measures."""
    bars = [
        row.bar_of(measures[row.key]["value"]) for row in ROWS if measures.get(row.key, {}).get("value") is not None
    ]
    return [bar for bar in bars if bar is not None]


def measures_of(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Measures of all parts of a report, each with its date and conditions."""
    conditions = report["conditions"]
    origin = f"{conditions['date'][:10]}, {conditions['hardware']}, {conditions['kernels']} kernels"
    origin += f", commit {conditions['commit']}" if conditions.get("commit") else ""
    return {
        key: {**measure, "origin": origin}
        for part in report["parts"].values()
        for key, measure in part.get("measures", {}).items()
    }


def render(reports: Iterable[Mapping[str, Any]], before: str = "") -> str:
    """The table; a row that no report has is that of the table `before`, or shows the command that measures it."""
    known: dict[str, dict[str, Any]] = {}
    for report in reports:
        known |= measures_of(report)
    kept = {cells[0]: cells for cells in map(_cells, before.splitlines()) if len(cells) == NUM_COLUMNS}
    lines = ["| what | bar | aim | measured | date and conditions |", "|---|---|---|---|---|"]
    for row in ROWS:
        measured, origin = NOT_MEASURED, f"`{row.command}`"
        if row.key in known:
            measured, origin = _measured(row, known[row.key]), known[row.key]["origin"]
        elif row.what in kept:
            measured, origin = kept[row.what][-2:]
        cells = row.what, row.limit(row.bar), "" if row.aim is None else row.limit(row.aim), measured, origin
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _measured(row: Row, measure: Mapping[str, Any]) -> str:
    value, shown = measure["value"], str(measure["shown"]).replace("|", "/")
    if value is None:
        return shown
    bar = row.bar_of(value)
    missed = ", **missed**" if bar is not None and not bar.holds else ""
    return f"**{row.number(value)}**{missed} ({shown})"


def table_of(text: str) -> str:
    """The table between the two marks of a document."""
    return _around(text)[1]


def put_into(text: str, table: str) -> str:
    """`text` with `table` between the two marks."""
    before, _, after = _around(text)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _around(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"gpu.table: the document has no {BEGIN} ... {END}")
    return before, table.strip(), after


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Turn reports of the GPU benchmark into the table of docs/performance.md."
    )
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, help="a document that has the marks of the table")
    parser.add_argument("--keep", action="store_true", help="rows that no report has stay as they are in the document")
    options = parser.parse_args(argv)
    if options.keep and options.into is None:
        parser.error("--keep: there is no document; name one with --into")
    reports = [json.loads(path.read_text()) for path in options.reports]
    if options.into is not None and any(report["conditions"]["small"] for report in reports):
        raise SystemExit("gpu.table: a run with --small does not belong in a document")
    if options.into is None:
        print(render(reports))
    else:
        text = options.into.read_text()
        options.into.write_text(put_into(text, render(reports, table_of(text) if options.keep else "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

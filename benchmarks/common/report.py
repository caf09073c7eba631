"""A report that is filled part by part: rows of a table by key, more figures, and the bars."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.bars import Bar, Log, bars_as_json

logger = logging.getLogger("tide")

Report = dict[str, Any]
"""`conditions`, `parts` by name and `bars`, as JSON."""
Session = TypeVar("Session")


@dataclass
class Measures:
    """The result of one part: rows of the table by key, and more figures for the report."""

    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, value: float | None, shown: str) -> None:
        self.measures[key] = {"value": value, "shown": shown}


def run_parts(
    session: Session,
    parts: Mapping[str, Callable[[Session], Measures]],
    report: Report,
    log: Log,
    out: Path | None,
    bars_of: Callable[[Mapping[str, Mapping[str, Any]]], list[Bar]],
) -> None:
    """Fill in the report part by part; a part that fails gets an error, and the next one runs."""
    for name, part in parts.items():
        began = time.perf_counter()
        entry: dict[str, Any] = {}
        try:
            found = part(session)
            entry |= {"measures": found.measures, "figures": found.figures}
        except (Exception, SystemExit) as error:
            logger.exception("part %s failed", name)
            entry["error"] = f"{type(error).__name__}: {error}"
        entry["seconds"] = time.perf_counter() - began
        report["parts"][name] = entry
        log(f"\n{name} ({entry['seconds']:.0f} s)" + (f" FAILED: {entry['error']}" if "error" in entry else ""))
        for key, measure in entry.get("measures", {}).items():
            value = "-" if measure["value"] is None else f"{measure['value']:.3f}"
            log(f"  {key:26} {value:>8}  {measure['shown']}")
        report["bars"] += bars_as_json(bars_of(entry.get("measures", {})))
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n")


def commit() -> str | None:
    """Commit of this tree, with a + if files are changed; None if it is not known."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""What the commands of benchmarks that have parts share: `--parts`, `--json`, the conditions, the report."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.bars import Log, Part, conclude
from tide_core.evaluation.machine import cpu_name


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, parts: Sequence[str]) -> argparse.Namespace:
    """The options, `parts` and `json` among them."""
    parser.add_argument("--parts", default=",".join(parts), help=f"of {', '.join(parts)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output")
    chosen = parser.parse_args(argv)
    chosen.parts = tuple(chosen.parts.split(","))
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return chosen


def logger(options: argparse.Namespace) -> Log:
    """Prints to standard output, or beside it where that is JSON."""
    out = sys.stderr if options.json else sys.stdout

    def log(text: str = "") -> None:
        print(text, file=out, flush=True)

    return log


def report(
    name: str,
    argv: Sequence[str] | None,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Log], list[Part]],
    **more: Any,
) -> int:
    """Print the conditions (`more` are those of this benchmark), measure, conclude; returns the exit code."""
    log = logger(options)
    conditions = {
        "command": f"python -m benchmarks.{name} " + " ".join(sys.argv[1:] if argv is None else argv),
        "hardware": cpu_name(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **more,
    }
    for key, value in conditions.items():
        log(f"{key:12} {value}")
    return conclude(conditions, measure(options, log), log, as_json=options.json)

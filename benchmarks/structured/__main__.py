"""Requests with a JSON schema against free ones, on one engine in one run.

    python -m benchmarks.structured            # a table and the bars, about three minutes on a CPU
    python -m benchmarks.structured --json

Both kinds run in turns with the same prompts, greedy, and have as many tokens: the schema is of a list that is longer,
and free text ignores its end. Every ratio is the median of the ratios within each repeat. Exits with 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.bars import Bar, Part, conclude
from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.runs import Bench, greedy
from tide_core.config import EngineConfig
from tide_core.evaluation.machine import cpu_name
from tide_core.request import Grammar

LEAST_RATIO = 0.8
MODES = ("full", "verified")
TEXT = {"type": "string", "maxLength": 60}
STEP = {
    "type": "object",
    "properties": {"step": {"type": "integer"}, "title": TEXT, "why": TEXT},
    "required": ["step", "title", "why"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "items": STEP, "minItems": 100}))


def measure(bench: Bench, rows: int, count: int, tokens: int, repeats: int) -> Part:
    prompts = bench.spread(count)
    groups = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    contracts = {
        f"{mode} {kind}": greedy(mode, tokens, grammar=grammar)
        for mode in MODES
        for kind, grammar in (("free", None), ("schema", SCHEMA))
    }
    runs = bench.turns(groups, contracts, repeats)
    part = Part(f"batch {rows}", data={name: mine.figures() for name, mine in runs.items()})
    for mode in MODES:
        free, bound = runs[f"{mode} free"], runs[f"{mode} schema"]
        part.lines.append(
            f"  batch {rows}, {mode:8} free {free.rate:7.1f} tokens/s, with a schema {bound.rate:7.1f}: "
            f"{bound.over(free):.3f}"
        )
        part.bars.append(Bar(f"batch {rows}, {mode}: a schema against free text", bound.over(free), LEAST_RATIO))
    return part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure requests with a JSON schema against free ones.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--artefact", default="auto")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    config = EngineConfig(
        model=options.model,
        artefact=options.artefact,
        device=options.device,
        dtype=options.dtype,
        quantization="none",
        suffix_drafts=False,  # the same prompts again and again
    )
    bench = Bench(config, PROMPT_FILE)
    parts = []
    for rows in map(int, options.batches.split(",")):
        parts.append(measure(bench, rows, max(4, rows), options.tokens, options.repeats))
        for line in parts[-1].lines:
            log(line)
    bench.engine.close()
    conditions: dict[str, Any] = {"machine": cpu_name(), "python": platform.python_version(), **vars(options)}
    return conclude(conditions, parts, log, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())

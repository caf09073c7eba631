"""Mode `verified` against `full` on prompts whose answers repeat their text, on one engine in one run.

    python -m benchmarks.copying                          # a table and the bar, about four minutes on a CPU
    python -m benchmarks.copying --artefact none          # suffix drafts alone
    python -m benchmarks.copying --model FOLDER --device cuda --dtype bfloat16 --json

Twenty prompts, edits of code and answers from a text, greedy, until the answer ends. No answer is drafted from an
earlier one. Ratios are medians of the ratios within each repeat. Exits with 1 if the bar is missed or an answer
differs.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.bars import Bar, Part, conclude
from benchmarks.common.prompts import Prompt
from benchmarks.common.runs import Bench
from tide_core.config import EngineConfig
from tide_core.evaluation.machine import cpu_name
from tide_core.request import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MODES = ("full", "verified")
LEAST_SPEEDUP = 2.0


def measure(bench: Bench, rows: int, tokens: int, repeats: int) -> Part:
    groups: list[Sequence[Prompt]] = [
        bench.prompts[start : start + rows] for start in range(0, len(bench.prompts), rows)
    ]
    contracts = {mode: SamplingParams(max_tokens=tokens, mode=mode) for mode in MODES}
    runs = bench.turns(groups, contracts, repeats)
    full, verified = (runs[mode] for mode in MODES)
    same = sum(
        [one.token_id for one in mine.tokens] == [one.token_id for one in other.tokens]
        for mine, other in zip(verified.answers, full.answers, strict=True)
    )
    num_tokens = sum(len(answer.tokens) for answer in verified.answers)
    copied = sum(token.exit_layer == 0 for answer in verified.answers for token in answer.tokens)
    passes = sum(answer.usage.deep_passes for answer in verified.answers)
    part = Part(f"batch {rows}", data={name: mine.figures() for name, mine in runs.items()})
    part.data |= {"speedup": verified.over(full), "share_from_text": copied / num_tokens}
    part.lines.append(
        f"  batch {rows}: full {full.rate:.1f} tokens/s, verified {verified.rate:.1f}: {verified.over(full):.2f}; "
        f"{num_tokens / passes:.2f} tokens per deep pass, {copied / num_tokens:.0%} of the tokens from the text"
    )
    if rows == 1:
        part.bars.append(Bar("batch 1: verified over full", verified.over(full), LEAST_SPEEDUP))
    part.bars.append(Bar(f"batch {rows}: answers equal to those of full", same, len(full.answers)))
    return part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure answers that repeat text of their prompts.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--artefact", default="auto")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    # Without a prefix cache every turn computes its prompts, and no answer is drafted from an earlier one.
    config = EngineConfig(
        model=options.model,
        artefact=options.artefact,
        device=options.device,
        dtype=options.dtype,
        quantization="none",
        prefix_caching=False,
    )
    bench = Bench(config, PROMPTS)
    parts = []
    for rows in map(int, options.batches.split(",")):
        parts.append(measure(bench, rows, options.tokens, options.repeats))
        for line in parts[-1].lines:
            log(line)
    bench.engine.close()
    conditions: dict[str, Any] = {"machine": cpu_name(), "python": platform.python_version(), **vars(options)}
    return conclude(conditions, parts, log, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())

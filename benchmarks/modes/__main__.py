"""The four modes on one engine in one run: speed, identity, disagreement, batches, independence of rows.

    python -m benchmarks.modes                      # every part, as text, and the bars
    python -m benchmarks.modes --json > modes.json  # the same as one JSON object; the text goes to standard error
    python -m benchmarks.modes --parts a,d --device cuda --artefact FOLDER

    a  verified against full, batch 1, by the clock        d  no exits allowed against full
    b  verified emits the tokens of full                   e  batches of 8 and 32, verified against full
    c  bounded: budget, speed; fast: layers, errors        f  a row's tokens and exit layers alone and in a batch

Prompts are those of benchmarks/common/prompts.jsonl in the model's chat template; no artefact is calibrated on them.
Modes run in turns on one engine, and every ratio is the median of the ratios within each repeat. Generation is greedy
and ignores the end of text, so that all answers have the same length. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common.bars import Part, bars_as_json
from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.runs import Bench
from benchmarks.modes import parts
from tide_core.config import EngineConfig
from tide_core.evaluation.machine import cpu_name

PARTS = ("a", "b", "c", "d", "e", "f")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the four modes and check their bars.")
    parser.add_argument("--parts", default=",".join(PARTS), help="of a, b, c, d, e and f")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--artefact", default="auto")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt-file", type=Path, default=PROMPT_FILE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompts", type=int, default=8, help="timed one at a time in a, c and d")
    parser.add_argument("--identity", type=int, default=200, help="prompts of b")
    parser.add_argument("--identity-tokens", type=int, default=64)
    parser.add_argument("--quality", type=int, default=200, help="prompts of c whose answers the library judges")
    parser.add_argument("--batch", type=int, default=8, help="prompts at once in b and c")
    parser.add_argument("--batches", default="8,32", help="prompts at once in e")
    parser.add_argument("--needles", type=int, default=20)
    parser.add_argument("--mates", type=int, default=32, help="most mates of a needle")
    parser.add_argument("--needle-tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-bars", action="store_true", help="do not fail on a missed bar")
    options = parser.parse_args(argv)
    options.parts = tuple(dict.fromkeys(options.parts.split(",")))
    options.batches = tuple(int(size) for size in options.batches.split(","))
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    return options


def sizes_of(options: argparse.Namespace) -> parts.Sizes:
    return parts.Sizes(
        tokens=options.tokens,
        repeats=options.repeats,
        speed_prompts=options.prompts,
        identity_prompts=options.identity,
        identity_tokens=options.identity_tokens,
        quality_prompts=options.quality,
        batch=options.batch,
        batches=options.batches,
        needles=options.needles,
        mates=options.mates,
        needle_tokens=options.needle_tokens,
    )


def conditions(bench: Bench, options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    device, table = bench.parts.runner.cache.device, bench.planner.table
    return {
        "command": " ".join(["python -m benchmarks.modes", *argv]),
        "model": bench.parts.model_name,
        "artefact": bench.parts.artefact_digest,
        "checkpoint_layers": [checkpoint.layer for checkpoint in bench.parts.checkpoints],
        "num_layers": bench.num_layers,
        "dtype": options.dtype,
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "kernels": bench.parts.kernels.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sampling": "greedy, past the end of text",
        "repeats": options.repeats,
        "new_tokens": options.tokens,
        "prompt_file": options.prompt_file.name,
        "num_prompts": len(bench.prompts),
        "prompt_tokens": [min(len(p.ids) for p in bench.prompts), max(len(p.ids) for p in bench.prompts)],
        "max_drafts": bench.planner.max_drafts,
        "sizes": asdict(sizes_of(options)),
        "cost_table_ms": [] if table is None else [_in_ms(point) for point in table.points],
    }


def _in_ms(point: Any) -> dict[str, Any]:
    cycles = {str(drafts): round(1e3 * seconds, 3) for drafts, seconds in point.cycle_s}
    return {"rows": point.rows, "full": round(1e3 * point.full_s, 3), "cycle_by_drafts": cycles}


def work(bench: Bench, options: argparse.Namespace) -> list[Callable[[], Part]]:
    """The requested parts; a, c and d share one timed run."""
    asked, sizes = options.parts, sizes_of(options)
    todo: list[Callable[[], Part]] = []
    if {"a", "c", "d"} & set(asked):
        todo.append(lambda: parts.speed(bench, asked, sizes))
    for name, part in (
        ("b", parts.identity),
        ("c", parts.quality),
        ("e", parts.batches),
        ("f", parts.needle),
    ):
        if name in asked:
            todo.append(lambda part=part: part(bench, sizes))  # type: ignore[misc]
    return todo


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print each part with its bars as soon as it is done."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    started = time.perf_counter()
    bench = Bench(
        EngineConfig(
            model=options.model,
            artefact=options.artefact,
            device=options.device,
            dtype=options.dtype,
            quantization="none",
            prefix_caching=False,  # every turn computes its prompts
            suffix_drafts=False,  # what exits gain; past its end a text repeats itself
        ),
        options.prompt_file,
    )
    report: dict[str, Any] = {"conditions": conditions(bench, options, argv), "parts": {}, "bars": []}
    for key, value in report["conditions"].items():
        log(f"{key:17} {value}")
    with bench.engine:
        for params in parts.contracts_for(options.parts, options.tokens).values():
            bench.check(params)
        for run in work(bench, options):
            before = time.perf_counter()
            part = run()
            seconds = time.perf_counter() - before
            log(f"\n{part.name} ({seconds:.0f} s)")
            for line in part.lines:
                log(f"  {line}")
            for bar in part.bars:
                log(f"  {bar.line()}")
            report["parts"][part.name] = {"seconds": seconds, **part.data}
            report["bars"] += bars_as_json(part.bars)
    report["seconds"] = time.perf_counter() - started
    log(f"\n{report['seconds']:.0f} s in all")
    if options.json:
        print(json.dumps(report, indent=2))
    return int(not options.no_bars and not all(bar["holds"] for bar in report["bars"]))


if __name__ == "__main__":
    sys.exit(main())

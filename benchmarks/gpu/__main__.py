"""The engine on a GPU: the whole table of docs/performance.md in one run.

    python -m benchmarks.gpu --out gpu.json                  # every part, as text, and the bars
    python -m benchmarks.gpu --parts step,cycle --profile    # two parts, with the busy time of the device
    python -m benchmarks.gpu --device cpu --small --no-bars  # a tiny shape: whether it runs
    python -m benchmarks.gpu --parts ablation --out FILE     # each mechanism taken out, in turns
    python -m benchmarks.gpu.table gpu.json --into docs/performance.md

    step     a full-depth step against the time to read the weights
    cycle    a shallow pass, a deep pass, and routers without exits
    demo     verified against full on the demo model, and rows with log-probabilities, penalties or a temperature
    replay   the large shape with the acceptance of the demo model
    kernels  paged attention, norm and router
    rivals   transformers generate and tide-inference
    reads    reads of the device by the host in a cycle
    fp8      a full-depth step with the weights of the layers in 8 bits against half width; only if it is named
    seventy  such a step of the shape of Llama 3.1 70B; only if it is named
    load     host memory while a checkpoint is loaded; only if it is named
    ablation the engine without each of its mechanisms; only if it is named

The large shape is Llama 3.1 8B in bfloat16 with random weights. Times are medians by the
host's clock; a floor is a number of bytes over the rate at which this device reads, measured in the same run. If a part
fails, its error is reported and the other parts run; `--out` is written after each part. Exits with 1 if a part failed
or a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.report import Measures, Report, commit, run_parts
from benchmarks.common.shapes import EIGHT_B, SMALL, Subject
from benchmarks.common.timing import read_rate
from benchmarks.gpu import parts, rivals
from benchmarks.gpu.ablation import ablation
from benchmarks.gpu.demo import demo
from benchmarks.gpu.fp8 import fp8, seventy
from benchmarks.gpu.load import load
from benchmarks.gpu.parts import Session, Sizes
from benchmarks.gpu.replay import replay
from benchmarks.gpu.table import bars_of
from tide_core.evaluation.machine import device_name
from tide_core.kernels import native_digest, select_kernels

LARGE_SIZES = Sizes(
    batches=(1, 8, 32),
    steps=40,
    repeats=30,
    tokens=128,
    prompts=24,
    turns=3,
    batch_turns=7,
    rounds=7,
    replays=(1, 8),
    calls=24,
    rival_tokens=36,
    rival_limit_s=90.0,
)
SMALL_SIZES = replace(
    LARGE_SIZES, steps=8, repeats=3, tokens=12, prompts=2, turns=1, batch_turns=1, rounds=2, calls=2, rival_tokens=8
)
PARTS: dict[str, Callable[[Session], Measures]] = {
    "step": parts.step,
    "cycle": parts.cycle,
    "demo": demo,
    "replay": replay,
    "kernels": parts.ops,
    "rivals": rivals.rivals,
    "reads": parts.reads,  # last: no other part is timed in a process that was profiled
}
MORE_PARTS: dict[str, Callable[[Session], Measures]] = {
    "fp8": fp8,
    "seventy": seventy,
    "load": load,
    "ablation": ablation,
}
"""Parts that run only if they are named."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the engine on a GPU and check its bars.")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join([*PARTS, *MORE_PARTS])}")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="a tiny shape and few repeats")
    parser.add_argument("--batches", help="rows of the parts step, demo and ablation, such as 1,8")
    parser.add_argument("--kernels", default="auto", choices=("auto", "reference"))
    parser.add_argument("--profile", action="store_true", help="also the busy time of the device in steps and cycles")
    parser.add_argument(
        "--demo", default="demo", help="the model whose modes are measured and whose traces are replayed"
    )
    parser.add_argument("--demo-artefact", default="auto")
    parser.add_argument("--prompt-file", type=Path, default=PROMPT_FILE)
    parser.add_argument("--out", type=Path, help="a file for the report, written after every part")
    parser.add_argument("--json", action="store_true", help="print the report; the text goes to standard error")
    parser.add_argument("--no-bars", action="store_true", help="do not fail on a missed bar")
    options = parser.parse_args(argv)
    options.parts = tuple(dict.fromkeys(options.parts.split(",")))
    if unknown := set(options.parts) - {*PARTS, *MORE_PARTS}:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    if options.batches is not None:
        if not all(rows.isdecimal() and int(rows) for rows in options.batches.split(",")):
            parser.error(f"--batches: got {options.batches}, expected numbers of rows such as 1,8")
        options.batches = tuple(int(rows) for rows in options.batches.split(","))
    return options


def conditions(session: Session, argv: Sequence[str]) -> dict[str, Any]:
    subject, device = session.subject, session.subject.device
    return {
        "command": " ".join(["python -m benchmarks.gpu", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": device_name(device),
        "cuda": torch.version.cuda,
        "kernels": select_kernels(subject.kernels, device).name,
        "native_digest": native_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": asdict(subject.shape),
        "small": subject.shape is SMALL,
        "dtype": subject.dtype,
        "demo": session.demo,
        "sizes": asdict(session.sizes),
        "timing": "medians by the host's clock, results read back",
        "read_bytes_per_s": session.read_bytes_per_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmark: no CUDA device can be used here; --device cpu --small runs without one")
    started = time.perf_counter()
    shape, sizes = (SMALL, SMALL_SIZES) if options.small else (EIGHT_B, LARGE_SIZES)
    if options.batches is not None:
        sizes = replace(sizes, batches=options.batches)
    subject = Subject(shape, options.device, kernels=options.kernels, max_rows=max(sizes.batches))
    sources = options.demo, options.demo_artefact, options.prompt_file
    session = Session(subject, sizes, read_rate(subject.device), *sources, with_profile=options.profile)
    report: Report = {"conditions": conditions(session, argv), "parts": {}, "bars": []}
    for key, value in report["conditions"].items():
        log(f"{key:17} {value}")
    all_parts = {**PARTS, **MORE_PARTS}
    try:
        chosen = {name: all_parts[name] for name in options.parts}
        run_parts(session, chosen, report, log, options.out, bars_of)
    finally:
        session.close()
    report["seconds"] = time.perf_counter() - started
    log("")
    for part in report["parts"].values():
        for bar in bars_of(part.get("measures", {})):
            log(f"  {bar.line()}")
    log(f"{report['seconds']:.0f} s in all")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report, indent=1))
    failed = any("error" in part for part in report["parts"].values())
    return int(failed or (not options.no_bars and not all(bar["holds"] for bar in report["bars"])))


if __name__ == "__main__":
    sys.exit(main())

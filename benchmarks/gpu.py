"""The engine on a GPU: the whole table of docs/performance.md in one run.

    python benchmarks/gpu.py --out gpu.json                  # every part, as text, and the bars
    python benchmarks/gpu.py --parts step,cycle --profile    # some, with what the device was busy with
    python benchmarks/gpu.py --device cpu --small --no-bars  # whether it runs at all, on a tiny shape
    python benchmarks/gpu_table.py gpu.json --into docs/performance.md

    step     a full-depth step against the time to read the weights
    cycle    a shallow pass, a deep pass, and routers that let nothing leave
    demo     verified against full on the demo model
    replay   the large shape with the acceptance of the demo model
    kernels  paged attention, norm and router
    rivals   transformers generate and tide-inference
    reads    what the host waits for in a cycle

The large shape is Llama 3.1 8B in bfloat16 with random weights. Times are whole calls of the engine's runner by the
host's clock, medians; floors are bytes over the rate at which this device reads, measured in the same run. A part
that fails is named and the others go on; `--out` is written after each. Exits with 1 if a part failed or a bar is
missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import transformers

from benchmarks import gpu_parts, gpu_replay, gpu_rivals, kernels
from benchmarks.gpu_parts import Found, Sizes, World
from benchmarks.gpu_shapes import EIGHT_B, SMALL, Subject
from benchmarks.gpu_table import bars_of
from benchmarks.gpu_times import read_rate
from benchmarks.mode_runs import PROMPT_FILE
from tide_core.evaluation.machine import device_name
from tide_core.kernels import native_digest, select_kernels

logger = logging.getLogger("tide")

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
Report = dict[str, Any]


def ops(world: World) -> Found:
    """From `kernels.py`: the rows of the table, at the shape of the large model."""
    found, device = Found(), world.subject.device
    dtype = getattr(torch, world.subject.dtype)
    timed = kernels.measure(
        device,
        dtype,
        kernels=world.subject.kernels,
        ops=("attend", "paged_attention", "router"),
        only_large=True,
        calls=world.sizes.calls,
    )
    found.figures["ops"] = [{**asdict(t), "over_floor": t.over_floor, "speedup": t.speedup} for t in timed]
    if wrong := [f"{t.op} {t.what}" for t in timed if not t.agrees]:
        raise RuntimeError(f"differ from their reference: {', '.join(wrong)}")
    for context in dict.fromkeys(context for context, _ in kernels.CONTEXTS):
        of_context = [t for t in timed if t.op == "attend" and t.what.endswith(f" {context}")]
        if of_context:  # with the most rows: fewer are no more than the cost of a launch
            best = max(of_context, key=lambda t: t.rows)
            shown = f"{best.rows} rows: {best.us:.1f} against {best.floor_us:.1f} us"
            found.add(f"attention_{context}", best.over_floor, shown)
    if routers := [t for t in timed if t.op == "router"]:
        worst = min(routers, key=lambda t: t.speedup)
        shown = f"worst at {worst.rows} rows: {worst.us:.1f} against {worst.reference_us:.1f} us"
        found.add("router", worst.speedup, shown)
    return found


PARTS: dict[str, Callable[[World], Found]] = {
    "step": gpu_parts.step,
    "cycle": gpu_parts.cycle,
    "demo": gpu_parts.demo,
    "replay": gpu_replay.replay,
    "kernels": ops,
    "rivals": gpu_rivals.rivals,
    "reads": gpu_parts.reads,  # last: no other part is timed in a process that was profiled
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the engine on a GPU and check it against its bars.")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="a tiny shape and few repeats")
    parser.add_argument("--kernels", default="auto", choices=("auto", "reference"))
    parser.add_argument("--profile", action="store_true", help="also what the device is busy with in steps and cycles")
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
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    return options


def conditions(world: World, argv: Sequence[str]) -> dict[str, Any]:
    subject, device = world.subject, world.subject.device
    return {
        "command": " ".join(["python benchmarks/gpu.py", *argv]),
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
        "demo": world.demo,
        "sizes": asdict(world.sizes),
        "timing": "medians by the host's clock, results read back",
        "read_bytes_per_s": world.read_bytes_per_s,
    }


def commit() -> str | None:
    """Of the tree this file is in, with a mark if it was changed; None where that is not known."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def run_parts(
    world: World,
    parts: Mapping[str, Callable[[World], Found]],
    report: Report,
    say: Callable[[str], None],
    out: Path | None,
) -> None:
    """Fill in the report, part by part; what fails says why and leaves the rest alone."""
    for name, part in parts.items():
        began = time.perf_counter()
        entry: dict[str, Any] = {}
        try:
            found = part(world)
            entry |= {"measures": found.measures, "figures": found.figures}
        except (Exception, SystemExit) as error:
            logger.exception("part %s failed", name)
            entry["error"] = f"{type(error).__name__}: {error}"
        entry["seconds"] = time.perf_counter() - began
        report["parts"][name] = entry
        say(f"\n{name} ({entry['seconds']:.0f} s)" + (f" FAILED: {entry['error']}" if "error" in entry else ""))
        for key, measure in entry.get("measures", {}).items():
            value = "-" if measure["value"] is None else f"{measure['value']:.3f}"
            say(f"  {key:16} {value:>8}  {measure['shown']}")
        report["bars"] += [{**asdict(bar), "holds": bar.holds} for bar in bars_of(entry.get("measures", {}))]
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmark: no CUDA device can be used here; --device cpu --small tries it without one")
    started = time.perf_counter()
    shape, sizes = (SMALL, SMALL_SIZES) if options.small else (EIGHT_B, LARGE_SIZES)
    subject = Subject(shape, options.device, kernels=options.kernels, max_rows=max(sizes.batches))
    sources = options.demo, options.demo_artefact, options.prompt_file
    world = World(subject, sizes, read_rate(subject.device), *sources, with_profile=options.profile)
    report: Report = {"conditions": conditions(world, argv), "parts": {}, "bars": []}
    for key, value in report["conditions"].items():
        say(f"{key:17} {value}")
    try:
        run_parts(world, {name: PARTS[name] for name in options.parts}, report, say, options.out)
    finally:
        world.close()
    report["seconds"] = time.perf_counter() - started
    say("")
    for bar in report["bars"]:
        sign = ">=" if bar["at_least"] else "<="
        say(f"  {'ok  ' if bar['holds'] else 'MISS'} {bar['name']}: {bar['value']:.4g} ({sign} {bar['limit']:g})")
    say(f"{report['seconds']:.0f} s in all")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report, indent=1))
    failed = any("error" in part for part in report["parts"].values())
    return int(failed or (not options.no_bars and not all(bar["holds"] for bar in report["bars"])))


if __name__ == "__main__":
    sys.exit(main())

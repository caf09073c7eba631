"""Every op that the engine calls on a GPU, against plain Torch and against its own floor.

    python -m benchmarks.kernels                   # as text, and the bars
    python -m benchmarks.kernels --json > ops.json # the same as one JSON object; the text goes to standard error
    python -m benchmarks.kernels --ops attend,router
    python -m benchmarks.kernels --device cpu      # native CPU ops at small sizes: whether it runs

The floor of an op is the time to read and write its data at the rate at which this device reads memory, or to do its
arithmetic at the rate of a large matrix product; both rates are measured in the same run. On a GPU an op is timed in a
CUDA graph, without the host, and so is its reference if it does not wait for the host. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch

from benchmarks.common.bars import Bar, Part, conclude
from benchmarks.common.shapes import EIGHT_B
from benchmarks.kernels.measure import CALLS, Rates, Timed, measure
from tide_core.evaluation.machine import device_name
from tide_core.kernels import CudaKernels, select_kernels

ATTENTION, ROUTER = 1.3, 3.0
"""Attention over the KV-read floor at most, with the most rows of each context; router over plain Torch at least."""


def bars_of(found: Iterable[Timed]) -> list[Bar]:
    """Attention with the most rows of each context, the router at its worst number of rows, agreement of all ops."""
    found = list(found)
    attention: dict[str, Timed] = {}
    for timed in found:
        if timed.op == "attend" and timed.what.startswith(EIGHT_B.name):
            attention[timed.what] = max(timed, attention.get(timed.what, timed), key=lambda t: t.rows)
    bars = [
        Bar(
            f"attention, {what}, {timed.rows} rows, over the KV-read floor", timed.over_floor, ATTENTION, at_least=False
        )
        for what, timed in attention.items()
    ]
    routers = [timed.speedup for timed in found if timed.op == "router" and timed.what == EIGHT_B.name]
    if routers:
        bars.append(Bar("norm and router over plain Torch, at the worst number of rows", min(routers), ROUTER))
    wrong = sum(not timed.agrees for timed in found)
    return [*bars, Bar("ops that differ from their reference", float(wrong), 0.0, at_least=False)]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time every op against plain Torch and against its floor.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--ops", default=None, help="names with commas between them; default: all")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of an op that are timed together")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-bars", action="store_true", help="do not fail on a missed bar")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    ops = None if options.ops is None else options.ops.split(",")

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    chosen = select_kernels("auto", device)
    if options.device == "cuda" and not isinstance(chosen, CudaKernels):
        raise SystemExit("benchmark: the CUDA ops are not built or cannot run here; see docs/building.md")
    started, rates = time.monotonic(), Rates.of(device, dtype)
    conditions = {
        "command": " ".join(["python -m benchmarks.kernels", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": device_name(device),
        "kernels": chosen.name,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "timing": f"medians of 5 times {options.calls} calls, in graphs on a GPU",
        **asdict(rates),
    }
    for name, value in conditions.items():
        log(f"{name:18} {value}")
    found = measure(device, dtype, ops=ops, calls=options.calls, rates=rates, log=log)
    log(f"{time.monotonic() - started:.0f} s in all")
    data = [{**asdict(t), "over_floor": t.over_floor, "speedup": t.speedup} for t in found]
    part = Part("ops", "ops against plain Torch and their floors", data, bars_of(found))
    code = conclude(conditions, [part], log, as_json=options.json)
    return 0 if options.no_bars else code


if __name__ == "__main__":
    sys.exit(main())

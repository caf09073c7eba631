"""Every op that the engine calls on a GPU, against plain Torch and against its own floor.

    python benchmarks/kernels.py                   # as text, and the bars
    python benchmarks/kernels.py --json > ops.json # the same as one JSON object; the text goes to standard error
    python benchmarks/kernels.py --ops attend,router
    python benchmarks/kernels.py --device cpu      # the native CPU ops at small sizes: whether it runs at all

The floor is the time to read and write what the op must at the rate at which this device reads memory, or to do its
arithmetic at the rate of a large product, both measured in the same run. On a GPU an op is timed in a graph, without
the host, and its reference too where it asks the host nothing. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.bars import Bar, Part, conclude
from benchmarks.gpu_shapes import DEMO, EIGHT_B, SMALL
from benchmarks.gpu_times import flop_rate, per_call_s, read_rate, synchronize
from benchmarks.kernels_cases import Case, Cases
from tide_core.evaluation.machine import device_name
from tide_core.kernels import CudaKernels, select_kernels

ROWS = (1, 8, 32, 64, 256)
SMALL_ROWS = (1, 5)
CONTEXTS = ((512, 1), (512, 8), (512, 64), (8192, 1), (8192, 8), (32768, 1), (32768, 4))
SMALL_CONTEXTS = ((48, 3),)
CALLS = 24
ATTENTION, ROUTER = 1.3, 3.0
"""Most times the KV-read floor, with the most rows of each context; least times as fast as plain Torch, at any."""
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Timed:
    """One case."""

    op: str
    what: str
    rows: int
    us: float
    reference_us: float
    floor_us: float
    error: float
    """The largest difference from the reference, over 1 or the reference's own size."""
    agrees: bool

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us

    @property
    def speedup(self) -> float:
        return self.reference_us / self.us

    def line(self) -> str:
        agrees = "" if self.agrees else f"  DIFFERS by {self.error:.2g}"
        return (
            f"{self.op:15} {self.what:32} {self.rows:4} rows {self.us:9.2f} us  {self.over_floor:7.2f} of its floor  "
            f"{self.speedup:6.2f} times plain Torch{agrees}"
        )


@dataclass(frozen=True)
class Rates:
    """Of this device, measured."""

    read_bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Rates:
        return cls(read_rate(device), flop_rate(device, dtype))


@torch.inference_mode()
def time_case(case: Case, rates: Rates, device: torch.device, dtype: torch.dtype, calls: int = CALLS) -> Timed:
    torch.manual_seed(0)
    made = case.make()
    error = difference(made.ours(0), made.reference(0))
    ours = per_call_s(made.ours, calls, device)
    plain = per_call_s(made.reference, calls, device, captured=made.captured_reference)
    floor = max(made.num_bytes / rates.read_bytes_per_s, made.num_flops / rates.flops_per_s)
    agrees = error <= TOLERANCES[dtype]
    timed = Timed(case.op, case.what, case.rows, 1e6 * ours, 1e6 * plain, 1e6 * floor, error, agrees)
    del made
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return timed


def difference(ours: Any, plain: Any) -> float:
    """The largest between two results, relative where they are large. What is not finite differs from everything."""
    if isinstance(ours, Tensor):
        gap = ((ours.float() - plain.float()).abs() / plain.float().abs().clamp(min=1.0)).max()
        return float(gap) if bool(gap.isfinite()) else float("inf")
    return max(difference(a, b) for a, b in zip(ours, plain, strict=True))


def bars_of(found: Iterable[Timed]) -> list[Bar]:
    """Attention with the most rows of each context, the router at its worst, and that nothing is wrong."""
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


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: str = "auto",
    ops: Sequence[str] | None = None,
    only_large: bool = False,
    calls: int = CALLS,
    rates: Rates | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Timed]:
    """Time all cases, or those of some ops, or those of the large shape alone."""
    on_gpu = device.type == "cuda"
    chosen = select_kernels(kernels, device)
    cases = Cases(chosen, device, dtype, small=not on_gpu)
    shapes = [SMALL] if not on_gpu else [EIGHT_B] if only_large else [EIGHT_B, DEMO]
    rows, contexts = (ROWS, CONTEXTS) if on_gpu else (SMALL_ROWS, SMALL_CONTEXTS)
    rates = rates or Rates.of(device, dtype)
    found = []
    for case in cases.all(shapes, rows, contexts):
        if ops is None or case.op in ops:
            found.append(time_case(case, rates, device, dtype, calls))
            say(found[-1].line())
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time every op against plain Torch and against its floor.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default=None, choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--ops", default=None, help="some of them, with commas")
    parser.add_argument("--calls", type=int, default=CALLS, help="of an op in a row")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-bars", action="store_true", help="do not fail on a missed bar")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    ops = None if options.ops is None else options.ops.split(",")

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    chosen = select_kernels("auto", device)
    if options.device == "cuda" and not isinstance(chosen, CudaKernels):
        raise SystemExit("benchmark: the CUDA ops are not built or cannot run here; see docs/building.md")
    started, rates = time.monotonic(), Rates.of(device, dtype)
    conditions = {
        "command": " ".join(["python benchmarks/kernels.py", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": device_name(device),
        "kernels": chosen.name,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "timing": f"medians of 5 times {options.calls} calls, in graphs on a GPU",
        **asdict(rates),
    }
    for name, value in conditions.items():
        say(f"{name:18} {value}")
    found = measure(device, dtype, ops=ops, calls=options.calls, rates=rates, say=say)
    say(f"{time.monotonic() - started:.0f} s in all")
    data = [{**asdict(t), "over_floor": t.over_floor, "speedup": t.speedup} for t in found]
    part = Part("ops", "ops against plain Torch and their floors", data, bars_of(found))
    code = conclude(conditions, [part], say, as_json=options.json)
    return 0 if options.no_bars else code


if __name__ == "__main__":
    sys.exit(main())

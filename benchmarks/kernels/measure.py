"""The cases of all ops, and how they are timed against plain Torch and against a floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.bars import Log
from benchmarks.common.shapes import DEMO, EIGHT_B, SMALL, Shape
from benchmarks.common.timing import flop_rate, per_call_s, read_rate, synchronize
from benchmarks.kernels.exits import DrawOps, ExitOps
from benchmarks.kernels.layers import Calls, LayerOps
from tide_core.kernels import select_kernels

ROWS = (1, 8, 32, 64, 256)
SMALL_ROWS = (1, 5)
CONTEXTS = ((512, 1), (512, 8), (512, 64), (8192, 1), (8192, 8), (32768, 1), (32768, 4))
SMALL_CONTEXTS = ((48, 3),)
CALLS = 24
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """An op at one size."""

    op: str
    what: str
    rows: int
    make: Callable[[], Calls]

    @property
    def name(self) -> str:
        return f"{self.op} {self.what}, {self.rows} rows"


class Cases(LayerOps, ExitOps, DrawOps):
    """All cases of one implementation of the ops on one device."""

    def all(self, shapes: Sequence[Shape], rows: Sequence[int], contexts: Sequence[tuple[int, int]]) -> Iterator[Case]:
        """`contexts`: positions and rows of attention."""
        for shape in shapes:
            for count in rows:
                yield from self._of_rows(shape, count)
            for context, count in contexts:
                op = "attend" if self.on_gpu else "paged_attention"
                yield Case(op, f"{shape.name} context {context}", count, partial(self._attend, shape, context, count))
                if self.on_gpu and self._supports_joined(shape):
                    make = partial(self._attend_joined, shape, context, count)
                    yield Case("attend_joined", f"{shape.name} context {context}", count, make)

    def _of_rows(self, shape: Shape, rows: int) -> Iterator[Case]:
        for what, (out, inner) in _linears(shape).items():
            yield Case("linear", f"{shape.name} {what}", rows, partial(self._linear, out, inner, rows))
        if self.on_gpu:
            for what, (out, inner) in _added(shape).items():
                make = partial(self._linear, out, inner, rows, residual=True)
                yield Case("fused_linear", f"{shape.name} {what}", rows, make)
            make = partial(self._linear, shape.intermediate, shape.hidden, rows, gated=True, normed=True)
            yield Case("fused_linear", f"{shape.name} norm, gate and up", rows, make)
            make = partial(self._linear, *_linears(shape)["qkv"], rows, normed=True)
            yield Case("fused_linear", f"{shape.name} norm and qkv", rows, make)
        for op, (sized, needs_gpu) in {
            "rms_norm": (self._rms_norm, False),
            "silu_mul": (self._silu_mul, False),
            "rotary": (self._rotary, False),
            "write_kv": (self._write_kv, False),
            "rotary_write": (self._rotary_write, True),
            "top2_logsumexp": (self._top2, True),
            "router": (self._router, True),
            "scatter_rows": (self._scatter_rows, True),
            "exit_input": (self._exit_input, True),
            "embed": (self._embed, True),
            "plan_cycle": (self._plan_cycle, True),
            "accept_drafts": (self._accept_drafts, True),
            "top_logprobs": (self._top_logprobs, True),
            "draw_numbers": (self._draw_numbers, True),
            "adjust_logits": (self._adjust_logits, True),
            "count_outputs": (self._count_outputs, True),
            "pending_tokens": (self._pending_tokens, True),
            "nth_best": (self._nth_best, True),
            "slot_copier": (self._copy_slots, True),
            "draw": (self._draw, True),
            "verify_drawn": (self._verify_drawn, True),
        }.items():
            if self.on_gpu or not needs_gpu:
                yield Case(op, shape.name, rows, partial(sized, shape, rows))


def _linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears without an epilogue."""
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        "shortlist": (shape.shortlist, shape.hidden),
        "head": (shape.vocabulary, shape.hidden),
    }


def _added(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears that add a residual."""
    return {"o": (shape.hidden, shape.heads * shape.head_dim), "down": (shape.hidden, shape.intermediate)}


@dataclass(frozen=True)
class Timed:
    """The times of one case."""

    op: str
    what: str
    rows: int
    us: float
    reference_us: float
    floor_us: float
    error: float
    """The largest difference from the reference, relative where the reference exceeds 1."""
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
    """Rates of this device, measured."""

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
    plain = per_call_s(made.reference, calls, device, as_graph=made.graph_reference)
    floor = max(made.num_bytes / rates.read_bytes_per_s, made.num_flops / rates.flops_per_s)
    agrees = error <= TOLERANCES[dtype]
    timed = Timed(case.op, case.what, case.rows, 1e6 * ours, 1e6 * plain, 1e6 * floor, error, agrees)
    del made
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return timed


def difference(ours: Any, plain: Any) -> float:
    """The largest difference of two results, relative where they exceed 1; infinite if a number is not finite."""
    if isinstance(ours, Tensor):
        gap = ((ours.float() - plain.float()).abs() / plain.float().abs().clamp(min=1.0)).max()
        return float(gap) if bool(gap.isfinite()) else float("inf")
    return max(difference(a, b) for a, b in zip(ours, plain, strict=True))


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: str = "auto",
    ops: Sequence[str] | None = None,
    only_large: bool = False,
    calls: int = CALLS,
    rates: Rates | None = None,
    log: Log = lambda line: None,
) -> list[Timed]:
    """Time all cases, those of some `ops`, or those of the large shape only."""
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
            log(found[-1].line())
    return found

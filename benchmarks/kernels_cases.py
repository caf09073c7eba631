"""The ops that the engine calls, each with its plain-Torch reference and what it must at least read, write and do.

A case makes its inputs when it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu_shapes import Shape
from benchmarks.kernels_draws import DrawOps
from benchmarks.kernels_exits import ExitOps
from benchmarks.kernels_inputs import Calls
from benchmarks.kernels_layers import LayerOps


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
    """All cases of one version of the ops on one device."""

    def all(self, shapes: Sequence[Shape], rows: Sequence[int], contexts: Sequence[tuple[int, int]]) -> Iterator[Case]:
        """`contexts`: positions and rows of attention."""
        for shape in shapes:
            for count in rows:
                yield from self._of_rows(shape, count)
            for context, count in contexts:
                op = "attend" if self.on_gpu else "paged_attention"
                yield Case(op, f"{shape.name} context {context}", count, partial(self._attend, shape, context, count))
                if self.on_gpu and self._takes_joined(shape):
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
            "peak": (self._peak, True),
            "judge": (self._judge, True),
            "router": (self._router, True),
            "scatter_rows": (self._scatter_rows, True),
            "exit_input": (self._exit_input, True),
            "embed": (self._embed, True),
            "plan_cycle": (self._plan_cycle, True),
            "carry_on": (self._carry_on, True),
            "pending_tokens": (self._pending_tokens, True),
            "nth_best": (self._nth_best, True),
            "slot_copier": (self._copy_slots, True),
            "draw": (self._draw, True),
            "verify_drawn": (self._verify_drawn, True),
        }.items():
            if self.on_gpu or not needs_gpu:
                yield Case(op, shape.name, rows, partial(sized, shape, rows))


def _linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears that nothing follows."""
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        "shortlist": (shape.shortlist, shape.hidden),
        "head": (shape.vocabulary, shape.hidden),
    }


def _added(shape: Shape) -> dict[str, tuple[int, int]]:
    """Those that a residual is added to."""
    return {"o": (shape.hidden, shape.heads * shape.head_dim), "down": (shape.hidden, shape.intermediate)}

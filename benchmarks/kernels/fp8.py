"""Linears of weights in 8 bits against those of half width, on the linears of an 8B layer.

    python -m benchmarks.kernels.fp8                     # as text; exits with 1 if a result has other bits
    python -m benchmarks.kernels.fp8 --json > fp8.json   # the same as one JSON object; the text goes to standard error
    python -m benchmarks.kernels.fp8 --device cpu        # plain Torch at small sizes: whether it runs

For each linear and number of rows: microseconds in bfloat16, in 8 bits with scales of rows, and in 8 bits with scales
of 128x128 blocks, with the share of the byte floor that each reaches; then the sums of a layer. The floor is the time
to read weights and scales, read x and write y, at the rate at which this device reads memory. All in one run, in
graphs, over more copies of the weights than the cache holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.bars import Bar, Part, conclude
from benchmarks.common.shapes import EIGHT_B, SMALL, Shape
from benchmarks.common.timing import per_call_s, read_rate
from tide_core.evaluation.machine import device_name
from tide_core.kernels import cuda_unsupported_reason
from tide_core.kernels.fp8 import Fp8Weight, quantised_by_row
from tide_core.kernels.reference import ops as reference

ROWS = (1, 8, 32, 128)
MORE_THAN_CACHE, MOST_COPIES, FEWEST_CALLS = 2**28, 64, 24
FORMS = ("bf16", "rows", "blocks")
"""Half width; 8 bits with scales of rows; 8 bits with scales of 128x128 blocks."""


@dataclasses.dataclass(frozen=True)
class Timed:
    linear: str
    rows: int
    form: str
    us: float
    floor_us: float
    same_bits: bool


def linears(shape: Shape) -> dict[str, tuple[int, int, bool, bool]]:
    """Outputs and inputs, whether gated, and whether a residual is added."""
    kv = shape.kv_heads * shape.head_dim
    return {
        "qkv": (shape.hidden + 2 * kv, shape.hidden, False, False),
        "keys and values": (2 * kv, shape.hidden, False, False),
        "o": (shape.hidden, shape.hidden, False, True),
        "gate and up": (shape.intermediate, shape.hidden, True, False),
        "down": (shape.hidden, shape.intermediate, False, True),
    }


OF_A_LAYER = ("qkv", "o", "gate and up", "down")


class Linears:
    """The linears of a device: kernels on a GPU, plain Torch elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            from tide_core.kernels.cuda.fp8 import packed
            from tide_core.kernels.cuda.ops import linear

            self.pack: Callable[[Fp8Weight], Fp8Weight] = packed
            self.run: Callable[..., Tensor] = linear
        else:
            self.pack, self.run = lambda weight: weight, _plain_linear

    def time(self, shape: Shape, name: str, rows: Sequence[int], rate: float) -> Iterator[Timed]:
        out, inner, gated, adds = linears(shape)[name]
        size = out * (2 if gated else 1)
        drawn = torch.empty(size, inner, dtype=torch.bfloat16, device=self.device).normal_(0.0, inner**-0.5)
        by_row = quantised_by_row(drawn)
        scales = torch.rand(-(-size // 128), -(-inner // 128), device=self.device) * by_row.scales.mean()
        made = {"rows": by_row, "blocks": Fp8Weight(by_row.values, scales, 128, 128)}
        for form in FORMS:
            weight = drawn if form == "bf16" else made[form]
            count = max(2, min(MOST_COPIES, MORE_THAN_CACHE // weight.nbytes + 1))
            copies: list[Any] = [self._copy(weight) for _ in range(count)]
            for num in rows:
                x = torch.randn(num, inner, device=self.device).bfloat16()
                more = {
                    "gated": gated,
                    "residual": torch.zeros_like(x[:, :1]).expand(num, out).clone() if adds else None,
                }
                same = True
                if form != "bf16":
                    expected = self.run(x, made[form].dequantised(torch.bfloat16), **more)
                    same = torch.equal(self.run(x, copies[0], **more), expected)

                def call(i: int, copies: list[Any] = copies, x: Tensor = x, more: dict[str, Any] = more) -> Tensor:
                    return self.run(x, copies[i % len(copies)], **more)

                seconds = per_call_s(call, max(FEWEST_CALLS, count), self.device)
                num_bytes = weight.nbytes + 2 * num * (inner + out * (1 + adds))
                yield Timed(name, num, form, 1e6 * seconds, 1e6 * num_bytes / rate, same)

    def _copy(self, weight: Any) -> Any:
        if isinstance(weight, Tensor):
            return weight.clone()
        packed = self.pack(weight)
        return dataclasses.replace(packed, values=packed.values.clone(), scales=packed.scales.clone())


def _plain_linear(x: Tensor, weight: Any, *, gated: bool, residual: Tensor | None) -> Tensor:
    wide = weight if isinstance(weight, Tensor) else weight.dequantised(x.dtype)
    return reference.fused_linear(x, wide, None, residual, gated)


def lines_of(found: Sequence[Timed], rows: Sequence[int]) -> Iterator[str]:
    """A line for each linear and number of rows, then the sums of a layer."""

    def line(name: str, num: int, us: dict[str, float], floor: dict[str, float]) -> str:
        each = [f"{form} {us[form]:8.2f} us {floor[form] / us[form]:5.1%}" for form in FORMS]
        gains = [f"{us['bf16'] / us[form]:.2f}" for form in FORMS[1:]]
        return f"{name:16} {num:4} rows  {'  '.join(each)}  times bf16 {' '.join(gains)}"

    by = {(one.linear, one.rows, one.form): one for one in found}
    names = list(dict.fromkeys(one.linear for one in found))
    for name in names:
        for num in rows:
            mine = {form: by[name, num, form] for form in FORMS}
            yield line(name, num, *({f: getattr(mine[f], what) for f in FORMS} for what in ("us", "floor_us")))
    for num in rows:
        sums = [
            {form: sum(getattr(by[name, num, form], what) for name in OF_A_LAYER) for form in FORMS}
            for what in ("us", "floor_us")
        ]
        yield line("a layer", num, *sums)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time linears of weights in 8 bits against those of half width.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows with commas between them")
    parser.add_argument("--json", action="store_true")
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(argv)
    device, rows = torch.device(options.device), [int(one) for one in options.rows.split(",")]

    def log(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    reason = cuda_unsupported_reason(device) if options.device == "cuda" else None
    if reason is not None:
        raise SystemExit(f"benchmark: {reason}")
    torch.manual_seed(0)
    rate, kernels = read_rate(device), Linears(device)
    conditions = {
        "command": " ".join(["python -m benchmarks.kernels.fp8", *argv]),
        "hardware": device_name(device),
        "torch": torch.__version__,
        "read_bytes_per_s": rate,
    }
    for name, value in conditions.items():
        log(f"{name:18} {value}")
    shape = EIGHT_B if options.device == "cuda" else dataclasses.replace(SMALL, hidden=128, intermediate=160)
    found: list[Timed] = []
    with torch.inference_mode():
        for name in linears(shape):
            found.extend(kernels.time(shape, name, rows, rate))
    for line in lines_of(found, rows):
        log(line)
    bars = [Bar("results with other bits", float(sum(not one.same_bits for one in found)), 0.0, at_least=False)]
    part = Part("fp8", "linears in 8 bits", [dataclasses.asdict(one) for one in found], bars)
    return conclude(conditions, [part], log, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

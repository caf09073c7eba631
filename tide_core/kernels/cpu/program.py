"""A small network as one native call: its ops are listed once, with the addresses of its weights, and run together.

Float32 states, weights of float32 or bfloat16. Every op is that of `cpu.ops` or does its arithmetic in
the same order, so a program gives bit for bit what the ops give one by one; `confidence`, `silu` and `sigmoid` stand
for Torch's and differ from them by rounding. A program holds the tensors whose addresses it uses: they may change in
place, not be replaced. One run at a time; several programs may run in several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tide_core.kernels import _native, checks

Integers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of a buffer [T, W], or of one [C, W] over the chosen tokens."""

    buffer: int
    start: int
    width: int
    buffer_width: int
    chosen: bool

    def part(self, start: int, width: int) -> Columns:
        """`width` of these columns, from the one at `start`."""
        if start < 0 or width < 1 or start + width > self.width:
            raise ValueError(f"columns: got {start} to {start + width}, expected some of {self.width}")
        return Columns(self.buffer, self.start + start, width, self.buffer_width, self.chosen)

    @property
    def place(self) -> tuple[int, int, int]:
        return self.buffer, self.start, self.width

    @property
    def is_whole(self) -> bool:
        return self.width == self.buffer_width


class Program:
    """Ops run in the order they are listed in. An op writes `to` a given buffer, or else to a new one."""

    def __init__(self) -> None:
        self._native = _native.Program()
        self._held: list[Tensor] = []
        self._external: list[Columns] = []

    def buffer(self, width: int, *, chosen: bool = False) -> Columns:
        return Columns(self._native.add_buffer(width, chosen, False), 0, width, width, chosen)

    def external(self, width: int, *, chosen: bool = False) -> Columns:
        """A buffer that every run is handed, in the order they are made here."""
        made = Columns(self._native.add_buffer(width, chosen, True), 0, width, width, chosen)
        self._external.append(made)
        return made

    def rms_norm(self, x: Columns, weight: Tensor, eps: float, to: Columns | None = None) -> Columns:
        to = to or self.buffer(x.width, chosen=x.chosen)
        self._native.rms_norm(x.place, self._hold("weight", weight, (x.width,)), eps, to.place)
        return to

    def linear(self, x: Columns, weight: Tensor, bias: Tensor | None = None, to: Columns | None = None) -> Columns:
        """`x` and `to` are whole buffers."""
        width = to.width if to is not None else _matrix("weight", weight)[0]
        address = self._hold("weight", weight, (width, x.width), narrow=True)
        added = 0 if bias is None else self._hold("bias", bias, (width,))
        to = to or self.buffer(width, chosen=x.chosen)
        if not (x.is_whole and to.is_whole):
            raise ValueError("x, to: got some columns of a buffer, expected all of them")
        self._native.linear(x.buffer, checks.DTYPE_CODES[weight.dtype], address, added, to.buffer)
        return to

    def add(self, a: Columns, b: Columns, to: Columns | None = None) -> Columns:
        to = to or self.buffer(a.width, chosen=a.chosen)
        self._native.add(a.place, b.place, to.place)
        return to

    def silu_mul(self, gate: Columns, up: Columns, to: Columns | None = None) -> Columns:
        to = to or self.buffer(gate.width, chosen=gate.chosen)
        self._native.silu_mul(gate.place, up.place, to.place)
        return to

    def silu(self, x: Columns, to: Columns | None = None) -> Columns:
        to = to or self.buffer(x.width, chosen=x.chosen)
        self._native.silu(x.place, to.place)
        return to

    def sigmoid(self, x: Columns, to: Columns | None = None) -> Columns:
        to = to or self.buffer(x.width, chosen=x.chosen)
        self._native.sigmoid(x.place, to.place)
        return to

    def gather(self, table: Tensor, to: Columns | None = None) -> Columns:
        """The row of `table` [N, W] at each token's source, zeros where its distance is 0."""
        num_rows, width = _matrix("table", table)
        to = to or self.buffer(width)
        self._native.gather(self._hold("table", table, (num_rows, width)), num_rows, to.place)
        return to

    def add_distance(self, table: Tensor, to: Columns) -> None:
        """The row of `table` [N, W] at each token's distance, the last one for all beyond, added in place."""
        num_rows, _ = _matrix("table", table)
        self._native.add_distance(self._hold("table", table, (num_rows, to.width)), num_rows, to.place)

    def rotary(self, x: Columns, cos: Tensor, sin: Tensor) -> None:
        """Heads in `x` rotated in place, by the rows of `cos` and `sin` [P, D] at the tokens' positions."""
        num_positions, dim = _matrix("cos", cos)
        cosines, sines = self._hold("cos", cos, (num_positions, dim)), self._hold("sin", sin, (num_positions, dim))
        self._native.rotary(cosines, sines, num_positions, dim, x.place)

    def write_kv(self, k: Columns, v: Columns, k_pool: Tensor, v_pool: Tensor) -> None:
        self._native.write_kv(k.place, v.place, *self._hold_pools(k_pool, v_pool))

    def paged_attention(
        self, q: Columns, k_pool: Tensor, v_pool: Tensor, scaling: float, to: Columns | None = None
    ) -> Columns:
        pools = self._hold_pools(k_pool, v_pool)
        to = to or self.buffer(q.width // k_pool.shape[3] * v_pool.shape[3])
        self._native.paged_attention(q.place, *pools, scaling, to.place)
        return to

    def select(self, x: Columns, to: Columns | None = None) -> Columns:
        """The chosen tokens: the last of each row, or each, as the run asks."""
        to = to or self.buffer(x.width, chosen=True)
        self._native.select(x.place, to.place)
        return to

    def confidence(self, logits: Columns, to: Columns) -> None:
        """Log-probability of the best logit and its lead over the second; runs return its index."""
        if not logits.is_whole:
            raise ValueError("logits: got some columns of a buffer, expected all of them")
        self._native.confidence(logits.buffer, to.place)

    def result(self, x: Columns) -> None:
        """A column of chosen tokens that runs return."""
        self._native.result(x.place)

    def run(
        self,
        external: Sequence[Tensor],
        positions: Integers,
        slots: Integers,
        block_tables: Integers,
        query_starts: Integers,
        context_lens: Integers,
        origins: Integers | None = None,
        *,
        each: bool = False,
    ) -> tuple[list[float], list[int]]:
        """All ops over T tokens of R rows; the result [C] and the indices [C] that `confidence` found, where there are.

        Arrays as for paged attention; `origins` [2, T] are sources and distances. `each`: every token is chosen.
        The native side checks the arrays. An index outside its table raises IndexError, and what was to be written is
        then undefined."""
        num_tokens = len(positions)
        for expected, tensor in zip(self._external, external, strict=True):
            num_rows = len(context_lens) if expected.chosen and not each else num_tokens
            shape = (num_rows, expected.width)
            if not (
                tensor.dtype is torch.float32 and tensor.is_cpu and tensor.shape == shape and tensor.is_contiguous()
            ):
                raise checks.first_fault(checks.held_faults("external", tensor, shape))
        addresses = [tensor.data_ptr() for tensor in external]
        return self._native.run(addresses, positions, slots, block_tables, query_starts, context_lens, origins, each)

    def _hold(self, name: str, tensor: Tensor, shape: tuple[int, ...], *, narrow: bool = False) -> int:
        """The address of a tensor that is right and stays."""
        checks.refuse(checks.held_faults(name, tensor, shape, narrow=narrow))
        self._held.append(tensor)
        return tensor.data_ptr()

    def _hold_pools(self, k_pool: Tensor, v_pool: Tensor) -> tuple[int, int, tuple[int, int, int, int, int]]:
        checks.refuse(checks.program_pool_faults(k_pool, v_pool))
        self._held += (k_pool, v_pool)
        num_blocks, num_heads, block_size, key_dim = k_pool.shape
        return k_pool.data_ptr(), v_pool.data_ptr(), (num_blocks, num_heads, block_size, key_dim, v_pool.shape[3])


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    """The sizes of a tensor of two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected 2 dimensions")
    return tensor.shape[0], tensor.shape[1]

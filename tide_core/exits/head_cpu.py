"""A checkpoint's head, narrow head and router as native programs, one call each to propose and to write K and V.

On the demo model, two Neoverse-N1 cores, a draft's head work takes 0.84 ms as a program and 2.1 ms op by op. The
modules stay what they are and share their weights with the programs: `Exits` runs them op by op where
`unsupported_reason` says why it must.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tide_core.exits.artefact.heads import ExitHead, HeadRMSNorm
from tide_core.exits.artefact.router import CONFIDENCE_SIZE, Router
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV, PagedView
from tide_core.models.adapter import ModelAdapter, NarrowHead
from tide_core.models.stacked import stacked

if TYPE_CHECKING:
    from tide_core.kernels.cpu.program import Columns, Program

DeepSources = np.ndarray[Any, np.dtype[np.int64]]
"""Of every token the slot of the last deep state before it and how far back that is, [2, T]."""


def unsupported_reason(adapter: ModelAdapter, cache: PagedKV, kernels: Kernels, narrow_head: NarrowHead) -> str | None:
    """Why heads on this model cannot run as programs, or None."""
    if kernels.name != "native":
        return f"the {kernels.name} kernels run op by op"
    if adapter.dtype is not torch.float32 or cache.pools[0][0].dtype is not torch.float32:
        return f"programs take float32 states, not {adapter.dtype}"
    if type(adapter._norm).__name__ != "KernelRMSNorm":
        return f"the final norm is a {type(adapter._norm).__name__}, not the plain RMSNorm"
    if narrow_head.plain_linear is None:
        return "the model scales its states or logits around the output embedding"
    return None


class HeadProgram:
    """`propose` and `write_kv` of one checkpoint."""

    def __init__(
        self,
        head: ExitHead,
        router: Router,
        adapter: ModelAdapter,
        cache: PagedKV,
        narrow_head: NarrowHead,
        kv_layer: int,
        index: int,
    ) -> None:
        self._deep = head.spec.deep
        self._shortlist_size = narrow_head.linear.out_features
        self._pools = cache.pools[kv_layer] if kv_layer >= 0 else None
        self._deep_states = cache.deep_states[index]
        if head.spec.hidden:
            self._gate_up = stacked(head.mlp.gate_proj, head.mlp.up_proj)
        if head.spec.attends:
            self._block_gate_up = stacked(head.block.mlp.gate_proj, head.block.mlp.up_proj)
            self._qkv = stacked(head.block.q_proj, head.block.k_proj, head.block.v_proj)
        self._propose = self._propose_program(head, router, adapter._norm, narrow_head)
        self._write_kv = self._write_kv_program(head) if head.spec.attends else None

    def propose(
        self, view: PagedView, states: Tensor, sources: DeepSources | None, *, each: bool
    ) -> tuple[Tensor, list[float], list[int], Tensor]:
        """Logits [C, S], scores [C], best indices [C] and features [C, D] of the last token of each row of the view, or
        of each."""
        num = len(states) if each else len(view._index.context_lens)
        logits, features = torch.empty(num, self._shortlist_size), torch.empty(num, states.shape[1])
        scores, best = self._run(self._propose, (states.contiguous(), logits, features), view, sources, each=each)
        return logits, scores, best, features

    def write_kv(self, view: PagedView, states: Tensor, sources: DeepSources | None) -> None:
        """K and V of the head for the view's tokens, into its pools."""
        assert self._write_kv is not None, "only a head with attention keeps K and V"
        self._run(self._write_kv, (states.contiguous(),), view, sources, each=True)

    def _run(
        self,
        program: Program,
        external: tuple[Tensor, ...],
        view: PagedView,
        sources: DeepSources | None,
        *,
        each: bool,
    ) -> tuple[list[float], list[int]]:
        index = view._index
        return program.run(
            external,
            index.positions,
            index.slots,
            index.block_tables,
            index.query_starts,
            index.context_lens,
            sources if self._deep else None,
            each=each,
        )

    def _propose_program(self, head: ExitHead, router: Router, norm: HeadRMSNorm, narrow_head: NarrowHead) -> Program:
        program = _new_program()
        states = program.external(head.spec.width)
        logits = program.external(self._shortlist_size, chosen=True)
        features = program.external(head.spec.width, chosen=True)
        refined = self._refined(program, head, self._embedded(program, head, states))
        self._widen(program, head, states, refined, to=features)
        normed = _norm(program, norm, features)
        program.linear(normed, narrow_head.linear.weight, narrow_head.linear.bias, to=logits)
        seen = program.buffer(features.width + CONFIDENCE_SIZE, chosen=True)
        _norm(program, router.norm, features, to=seen.part(0, features.width))
        program.confidence(logits, to=seen.part(features.width, CONFIDENCE_SIZE))
        hidden = program.silu(program.linear(seen, router.down.weight, router.down.bias))
        program.result(program.sigmoid(program.linear(hidden, router.out.weight, router.out.bias)))
        return program

    def _write_kv_program(self, head: ExitHead) -> Program:
        program = _new_program()
        embedded = self._embedded(program, head, program.external(head.spec.width))
        normed = _norm(program, head.block.attention_norm, embedded)
        projected = program.linear(normed, self._qkv[head.block.q_proj.out_features :])
        self._write(program, head, projected)
        return program

    def _embedded(self, program: Program, head: ExitHead, states: Columns) -> Columns:
        """`ExitHead.embed`"""
        spec = head.spec
        if spec.kind == "identity":
            return states
        inputs = program.buffer(spec.input_width)
        _norm(program, head.state_norm, states, to=inputs.part(0, spec.width))
        if spec.deep:
            deep = program.gather(self._deep_states)
            _norm(program, head.deep_norm, deep, to=inputs.part(spec.width, spec.deep_width))
            program.add_distance(head.distance.weight, to=inputs)
        mixed = program.linear(inputs, head.mix.weight, head.mix.bias)
        if not spec.hidden:
            return mixed
        return program.add(mixed, _mlp(program, self._gate_up, head.mlp.down_proj, inputs))

    def _refined(self, program: Program, head: ExitHead, embedded: Columns) -> Columns:
        """`ExitHead.refine`"""
        if not head.spec.attends:
            return embedded
        assert self._pools is not None, "a head with attention has pools"
        block, size = head.block, head.spec.head_size
        normed = _norm(program, block.attention_norm, embedded)
        projected = program.linear(normed, self._qkv)
        self._write(program, head, projected)
        queries = projected.part(0, head.spec.num_heads * size)
        attended = program.paged_attention(queries, *self._pools, size**-0.5)
        states = program.add(embedded, program.linear(attended, block.o_proj.weight))
        normed = _norm(program, block.mlp_norm, states)
        return program.add(states, _mlp(program, self._block_gate_up, block.mlp.down_proj, normed))

    def _widen(self, program: Program, head: ExitHead, states: Columns, refined: Columns, to: Columns) -> None:
        """`ExitHead.widen`, of the chosen tokens alone."""
        if not head.spec.narrow:
            program.select(refined, to)
            return
        skipped = _norm(program, head.skip_norm, program.select(states))
        program.add(skipped, program.linear(program.select(refined), head.up.weight), to)

    def _write(self, program: Program, head: ExitHead, projected: Columns) -> None:
        """Rotate what stands before the values, then write K and V, the last columns."""
        assert self._pools is not None, "a head with attention has pools"
        keys = head.spec.num_kv_heads * head.spec.head_size
        values = projected.width - keys
        program.rotary(projected.part(0, values), *head.rotary_table)
        program.write_kv(projected.part(values - keys, keys), projected.part(values, keys), *self._pools)


def _new_program() -> Program:
    """Imported when one is wanted: there may be no native module."""
    program: Program = importlib.import_module("tide_core.kernels.cpu.program").Program()
    return program


def _norm(program: Program, norm: HeadRMSNorm, x: Columns, to: Columns | None = None) -> Columns:
    return program.rms_norm(x, norm.weight, norm.variance_epsilon, to)


def _mlp(program: Program, gate_up: Tensor, down: nn.Linear, x: Columns) -> Columns:
    both, hidden = program.linear(x, gate_up), down.in_features
    return program.linear(program.silu_mul(both.part(0, hidden), both.part(hidden, hidden)), down.weight)

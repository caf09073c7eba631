"""The CUDA kernels' stand-in on a CPU: the same interface over the plain ops, so that what uses it runs anywhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tide_core.kernels import CudaKernels
from tide_core.kernels.reference import adjust
from tide_core.kernels.reference import branches as branching
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.select import native_unsupported_reason


def engine_kernels() -> CudaKernels:
    """The stand-in for whole engines: what a layer runs most is native code, where it is built, for float32. It takes a
    tenth of the time, and tests/kernels compares it with the plain ops."""
    if native_unsupported_reason("cpu") is not None:
        return twin_kernels()
    native = importlib.import_module("tide_core.kernels.cpu.ops")

    def quick(name: str) -> Any:
        op, plain = getattr(native, name), getattr(reference, name)

        def run(x: Tensor, other: Tensor, *rest: Any, **more: Any) -> Any:
            return (op if x.dtype is other.dtype is torch.float32 else plain)(x, other, *rest, **more)

        return run

    linear, rms_norm, silu_mul, write_kv = map(quick, ("linear", "rms_norm", "silu_mul", "write_kv"))
    rotary, paged_attention = quick("rotary"), quick("paged_attention")

    def fused_linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        norm: reference.Norm | None = None,
    ) -> Tensor:
        y: Tensor = linear(x if norm is None else rms_norm(x, *norm), weight, bias)
        if gated:
            y = reference.silu_mul(*y.chunk(2, dim=-1))
        return y if residual is None else residual + y

    def rotary_write(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        num_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
        heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
        q, k, v = heads.tensor_split((-2 * num_heads, -num_heads), dim=1)
        q = q if q_norm is None else rms_norm(q, q_norm, eps)
        k = k if k_norm is None else rms_norm(k, k_norm, eps)
        turn = (cos, sin) if positions is None else (cos[positions], sin[positions])
        write_kv(rotary(k, *turn), v, k_pool, v_pool, slots)
        rotated: Tensor = rotary(q, *turn)
        return rotated

    return replace(
        twin_kernels(rotary_write, paged_attention),
        linear=linear,
        rms_norm=rms_norm,
        silu_mul=silu_mul,
        rotary=rotary,
        write_kv=write_kv,
        paged_attention=paged_attention,
        fused_linear=fused_linear,
    )


def twin_kernels(
    write: Callable[..., Tensor] = reference.rotary_write, attention: Callable[..., Tensor] = reference.paged_attention
) -> CudaKernels:
    def workspace(*sizes: Any, **more: Any) -> torch.Tensor:
        held = sizes[5] if len(sizes) > 5 else None
        return torch.zeros(1) if held is None else held

    written: list[torch.Tensor] = []
    """The pool that new tokens were written to just before."""

    def rotary_write(*given: Any, **more: Any) -> torch.Tensor:
        written[:] = [given[5]]
        return write(*given, **more)

    def attend(
        *tensors: Any, max_queries: int, max_context: int, workspace: torch.Tensor, queries_are_new: bool = False
    ) -> torch.Tensor:
        _, k_pool, _, tables, starts, lens, *_ = tensors
        assert not queries_are_new or any(pool is k_pool for pool in written), "a promise that is not kept"
        written.clear()
        assert int(lens.max()) <= max_context <= tables.shape[1] * tensors[1].shape[2]
        assert int(starts.diff().max()) <= max_queries
        return attention(*tensors)

    def attend_joined(*tensors: Any, max_queries: int, max_context: int, workspace: torch.Tensor) -> torch.Tensor:
        qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps, *rest = tensors
        q = write(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps)
        return attend(q, k_pool, v_pool, *rest, max_queries=max_queries, max_context=max_context, workspace=workspace)

    def supports(k_pool: torch.Tensor, v_pool: torch.Tensor) -> bool:
        return k_pool.shape == v_pool.shape

    return CudaKernels(
        name="cuda",
        linear=reference.linear,
        rms_norm=reference.rms_norm,
        silu_mul=reference.silu_mul,
        rotary=reference.rotary,
        write_kv=reference.write_kv,
        paged_attention=reference.paged_attention,
        quantised_linear=None,
        fused_linear=reference.fused_linear,
        rotary_write=rotary_write,
        attend=attend,
        attention_workspace=workspace,
        top2_logsumexp=reference.top2_logsumexp,
        router=reference.router,
        score_scratch=workspace,
        exit_input=reference.exit_input,
        norm_into=reference.norm_into,
        embed=reference.embed,
        scatter_rows=reference.scatter_rows,
        plan_cycle=cycle_plan.plan_cycle,
        pending_tokens=cycle_plan.pending_tokens,
        accept_drafts=cycle_plan.accept_drafts,
        top_logprobs=cycle_plan.top_logprobs,
        nth_best=branching.nth_best,
        slot_copier=branching.slot_copier,
        draw=draw_plan.draw,
        draw_numbers=draw_plan.draw_numbers,
        adjust_logits=adjust.adjust_logits,
        count_outputs=adjust.count_outputs,
        verify_drawn=draw_plan.verify_drawn,
        supports=supports,
        attend_joined=attend_joined,
        supports_joined=supports,
    )

"""The CUDA kernels' stand-in on a CPU: the same interface over the plain ops, so that what uses it runs anywhere."""

from __future__ import annotations

from typing import Any

import torch

from tide_core.kernels import CudaKernels
from tide_core.kernels.reference import adjust
from tide_core.kernels.reference import branches as branching
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference import ops as reference


def twin_kernels() -> CudaKernels:
    def workspace(*sizes: Any, **more: Any) -> torch.Tensor:
        held = sizes[5] if len(sizes) > 5 else None
        return torch.zeros(1) if held is None else held

    written: list[torch.Tensor] = []
    """The pool that new tokens were written to just before."""

    def rotary_write(*given: Any, **more: Any) -> torch.Tensor:
        written[:] = [given[5]]
        return reference.rotary_write(*given, **more)

    def attend(
        *tensors: Any, max_queries: int, max_context: int, workspace: torch.Tensor, queries_are_new: bool = False
    ) -> torch.Tensor:
        _, k_pool, _, tables, starts, lens, *_ = tensors
        assert not queries_are_new or any(pool is k_pool for pool in written), "a promise that is not kept"
        written.clear()
        assert int(lens.max()) <= max_context <= tables.shape[1] * tensors[1].shape[2]
        assert int(starts.diff().max()) <= max_queries
        return reference.paged_attention(*tensors)

    def attend_joined(*tensors: Any, max_queries: int, max_context: int, workspace: torch.Tensor) -> torch.Tensor:
        qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps, *rest = tensors
        q = reference.rotary_write(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps)
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

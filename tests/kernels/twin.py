"""The CUDA kernels' stand-in on a CPU: the same interface over the plain ops, so that what uses it runs anywhere."""

from __future__ import annotations

from typing import Any

import torch

from tide_core.kernels import CudaKernels, cycle_plan, reference


def twin_kernels() -> CudaKernels:
    def workspace(*sizes: Any, **more: Any) -> torch.Tensor:
        return torch.zeros(1)

    def attend(*tensors: Any, max_queries: int, max_context: int, workspace: torch.Tensor) -> torch.Tensor:
        _, _, _, tables, starts, lens, *_ = tensors
        assert int(lens.max()) <= max_context <= tables.shape[1] * tensors[1].shape[2]
        assert int(starts.diff().max()) <= max_queries
        return reference.paged_attention(*tensors)

    def takes(k_pool: torch.Tensor, v_pool: torch.Tensor) -> bool:
        return k_pool.shape == v_pool.shape

    ops = reference.linear, reference.rms_norm, reference.silu_mul, reference.rotary, reference.write_kv
    exits = (
        lambda logits, _: reference.peak(logits),
        reference.judge,
        workspace,
        reference.scatter_rows,
        cycle_plan.plan_cycle,
    )
    more = reference.fused_linear, reference.rotary_write, attend, workspace, *exits
    return CudaKernels("cuda", *ops, reference.paged_attention, *more, takes)

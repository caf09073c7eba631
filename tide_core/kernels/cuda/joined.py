"""Rotation, page writes and attention of a joined projection in one launch, for few queries. See `cuda.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.attention import attention_workspace, heads_of
from tide_core.kernels.cuda.launch import device_of, launch, module, ptr, result


def supports_joined(k_pool: Tensor, v_pool: Tensor) -> bool:
    """Whether `attend_joined` supports pools such as these, on their device."""
    if cuda_checks.joined_fault(k_pool, v_pool) is not None or not k_pool.is_cuda:
        return False
    with torch.cuda.device(k_pool.device):
        return bool(module().supports_joined(k_pool.shape[3], k_pool.shape[2]))


def attend_joined(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    max_queries: int,
    max_context: int,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rotary_write` and `paged_attention` of its queries in one launch, with the same bits; returns [T, Hq, D].

    No row may have more than `max_queries` queries, at most 8, which are the last of its positions; a slot that is
    inside the pools is the place of its position. Tokens that no row owns are neither read nor written."""
    device = device_of(qkv)
    checks.refuse(
        cuda_checks.rotary_write_faults(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, device)
    )
    checks.refuse([cuda_checks.joined_fault(k_pool, v_pool)])
    num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_tokens, num_heads = heads.shape[0], heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    checks.refuse(
        cuda_checks.paged_attention_faults(q, k_pool, v_pool, block_tables, query_starts, context_lens, device)
    )
    if not 0 < max_queries <= cuda_checks.MOST_JOINED_QUERIES:
        raise ValueError(f"max_queries: got {max_queries}, expected 1 to {cuda_checks.MOST_JOINED_QUERIES}")
    rows, max_blocks = block_tables.shape
    max_context = min(max_context, max_blocks * block_size)
    y = result(out, qkv, tuple(q.shape), device)
    checks.refuse([checks.contiguous_fault("out", y)])
    if y.numel() and rows:
        if workspace is None:
            workspace = attention_workspace(num_tokens, num_heads, head_dim, max_context, device)
        size = module().paged_attention_workspace(num_tokens, num_heads, head_dim, max_context)
        checks.refuse(cuda_checks.scratch_faults("workspace", workspace, torch.uint8, size, device))
        launch(
            device,
            "attend_joined",
            checks.DTYPE_CODES[qkv.dtype],
            *(heads_of(part) for part in (q, k, v)),
            ptr(q_norm),
            ptr(k_norm),
            ptr(cos),
            ptr(sin),
            ptr(positions),
            ptr(slots),
            ptr(k_pool),
            ptr(v_pool),
            ptr(block_tables),
            ptr(query_starts),
            ptr(context_lens),
            ptr(y),
            ptr(workspace),
            rows,
            num_tokens,
            max_queries,
            max_context,
            head_dim,
            cos.shape[0],
            num_blocks,
            block_size,
            max_blocks,
            eps,
            scaling,
            window,
            softcap,
            counters=workspace,
        )
    return y

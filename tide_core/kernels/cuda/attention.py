"""Attention on a GPU: rotary positions, page writes and paged attention. See `tide_core.kernels.cuda.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.launch import device_of, launch, module, ptr, result

_DTYPE_CODES = checks.DTYPE_CODES
_Heads = tuple[int, int, int, int]  # address, heads, stride of tokens, stride of heads
_NO_HEADS = (0, 0, 0, 0)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotary positions in halves of `x` [T, H, D] by `cos` and `sin` [T, D]; `out` may be `x`."""
    device = device_of(x)
    checks.refuse(checks.rotary_faults(x, cos, sin, device))
    y = result(out, x, tuple(x.shape), device, strided_heads=True)
    if y.numel():
        heads = (heads_of(x), _NO_HEADS, _NO_HEADS)
        _rotary_write(device, x, heads, (x.shape[2], 0), q_out=y, tables=(cos, sin))
    return y


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Queries [T, Hq, D] of a joined projection `qkv`, normed and rotated; its keys and values go into the pools.

    Without `positions` row t of the tables is for token t. `out` may be the queries' part of `qkv`. A position outside
    the tables gives NaN; a slot outside the pools is skipped."""
    device = device_of(qkv)
    checks.refuse(
        cuda_checks.rotary_write_faults(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, device)
    )
    num_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_query_heads = heads.shape[1] - 2 * num_heads
    q, k, v = (heads_of(part) for part in heads.tensor_split((num_query_heads, num_query_heads + num_heads), dim=1))
    y = result(out, qkv, (qkv.shape[0], num_query_heads, head_dim), device, strided_heads=True)
    if qkv.numel():
        _rotary_write(
            device,
            qkv,
            (q, k, v),
            (head_dim, head_dim),
            q_out=y,
            norms=(q_norm, k_norm),
            eps=eps,
            tables=(cos, sin),
            positions=positions,
            slots=slots,
            pools=(k_pool, v_pool),
        )
    return y


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Copies `k` [T, H, Dk] and `v` [T, H, Dv] into the pools at `slots` [T], in place; those outside are skipped."""
    device = device_of(k)
    checks.refuse(checks.write_kv_faults(k, v, k_pool, v_pool, slots, device))
    if k.numel() or v.numel():
        heads = (_NO_HEADS, heads_of(k), heads_of(v))
        dims = k.shape[2], v.shape[2]
        _rotary_write(device, k, heads, dims, slots=slots, pools=(k_pool, v_pool))


def attention_workspace(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    max_context: int,
    device: torch.device,
    held: Tensor | None = None,
) -> Tensor:
    """Memory for calls of paged attention with at most these counts, one at a time; `held` where that is enough.

    It begins with counters, which are 0 before a call and after it, so calls of any counts may take turns with it."""
    size = module().paged_attention_workspace(num_tokens, num_heads, head_dim, max_context)
    if held is not None and held.numel() >= size and held.device == device:
        return held
    return torch.zeros(size, dtype=torch.uint8, device=device)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    max_queries: int | None = None,
    max_context: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    queries_are_new: bool = False,
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values; returns [T, Hq, D].

    No row may have more than `max_context` positions, which are at most those of its block table. `max_queries` is the
    most queries a row is expected to have; more are right but slow. Queries that no row owns are left unset.
    `queries_are_new` promises that a `rotary_write` right before wrote keys and values of these queries and nothing
    else, so that older ones can be read meanwhile."""
    device = device_of(q)
    checks.refuse(
        cuda_checks.paged_attention_faults(q, k_pool, v_pool, block_tables, query_starts, context_lens, device)
    )
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    rows, max_blocks = block_tables.shape
    most = max_blocks * block_size
    max_context = most if max_context is None else min(max_context, most)
    y = result(out, q, tuple(q.shape), device)
    checks.refuse([checks.contiguous_fault("out", y)])
    if y.numel() and rows:
        if workspace is None:
            workspace = attention_workspace(num_tokens, num_heads, head_dim, max_context, device)
        size = module().paged_attention_workspace(num_tokens, num_heads, head_dim, max_context)
        checks.refuse(cuda_checks.scratch_faults("workspace", workspace, torch.uint8, size, device))
        launch(
            device,
            "paged_attention",
            _DTYPE_CODES[q.dtype],
            ptr(q),
            ptr(k_pool),
            ptr(v_pool),
            ptr(block_tables),
            ptr(query_starts),
            ptr(context_lens),
            ptr(y),
            ptr(workspace),
            rows,
            num_tokens,
            num_tokens if max_queries is None else max_queries,
            max_context,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            max_blocks,
            k_pool.shape[0],
            q.stride(0),
            q.stride(1),
            scaling,
            window,
            softcap,
            queries_are_new,
            counters=workspace,
        )
    return y


def heads_of(x: Tensor) -> _Heads:
    """`x` [T, H, D] as the CUDA module expects it."""
    return x.data_ptr(), x.shape[1], x.stride(0), x.stride(1)


def _rotary_write(
    device: torch.device,
    tokens: Tensor,
    heads: tuple[_Heads, _Heads, _Heads],
    dims: tuple[int, int],
    *,
    q_out: Tensor | None = None,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
    tables: tuple[Tensor | None, Tensor | None] = (None, None),
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    pools: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """One kernel for all that happens to q, k and v between their projection and attention."""
    k_pool, _ = pools
    cos, _ = tables
    launch(
        device,
        "rotary_write",
        _DTYPE_CODES[tokens.dtype],
        *heads,
        *(ptr(norm) for norm in norms),
        *(ptr(table) for table in tables),
        ptr(positions),
        ptr(slots),
        ptr(q_out),
        *(ptr(pool) for pool in pools),
        tokens.shape[0],
        *((0, 0) if q_out is None else (q_out.stride(0), q_out.stride(1))),
        *dims,
        0 if cos is None else cos.shape[0],
        *((0, 1) if k_pool is None else (k_pool.shape[0], k_pool.shape[2])),
        eps,
    )

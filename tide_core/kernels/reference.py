"""The ops in plain Torch, on any device: the definition of correct.

Letters: T tokens of all rows, R rows, Hq query heads, H kv heads, Dk and Dv head widths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N]. A bfloat16 weight may meet a float32 `x`."""
    return F.linear(x, weight.to(x.dtype), bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face LlamaRMSNorm of `x` [..., D]: float32 inside, back to the dtype, then times `weight` [D]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of an MLP: silu of `gate` times `up`, of one shape."""
    return F.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in halves, as Hugging Face's Llama applies them: `x` [T, H, D], `cos` and `sin` [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Copies `k` [T, H, Dk] and `v` [T, H, Dv] into the pools [num_blocks, H, block_size, D], in place.

    `slots` [T] says where: block * block_size + offset. A token with a negative slot is skipped.
    """
    block_size = k_pool.shape[2]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = k
    v_pool[blocks, :, offsets] = v


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
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values; returns [T, Hq, Dv].

    `q` [T, Hq, Dk]; row r owns the queries `query_starts[r]` to `query_starts[r + 1]`, which are the last of its
    `context_lens[r]` positions, already written to the pages `block_tables[r]`. Nothing at or past
    `context_lens[r]` is read. `window` > 0 limits a query to that many positions, itself included; `softcap` > 0
    bounds scores by softcap * tanh(score / softcap).
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[3])
    starts: list[int] = query_starts.tolist()
    lengths: list[int] = context_lens.tolist()
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        if first < last:
            out[first:last] = attend_row(
                q[first:last], k_pool, v_pool, block_tables[row], length, scaling, window, softcap
            )
    return out


def attend_row(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: int,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of one row's queries `q` [n, Hq, Dk], the last n of its `length` positions."""
    num_queries = q.shape[0]
    oldest = length - num_queries
    begin = max(0, oldest - window + 1) if window > 0 else 0
    keys = _gather(k_pool, block_table, begin, length)
    values = _gather(v_pool, block_table, begin, length)
    mask = _mask(num_queries, begin, length, window, q.device)
    queries = q.transpose(0, 1)  # [Hq, n, Dk]
    if softcap > 0:
        return _softcapped(queries, keys, values, mask, scaling, softcap).transpose(0, 1)
    causal = mask is not None and window <= 0 and num_queries == length
    attended = F.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _gather(pool: Tensor, block_table: Tensor, begin: int, end: int) -> Tensor:
    """The positions `begin` to `end` of one row as [H, end - begin, D], and no others."""
    block_size = pool.shape[2]
    first_block = begin // block_size
    blocks = block_table[first_block : -(-end // block_size)].long()
    pages = pool[blocks].transpose(0, 1).flatten(1, 2)
    skipped = first_block * block_size
    return pages[:, begin - skipped : end - skipped]


def _mask(num_queries: int, begin: int, end: int, window: int, device: torch.device) -> Tensor | None:
    """Which of the positions `begin` to `end` each query sees, [n, end - begin]; None when all see all."""
    if num_queries == 1:
        return None
    query_positions = torch.arange(end - num_queries, end, device=device)[:, None]
    key_positions = torch.arange(begin, end, device=device)[None, :]
    seen = key_positions <= query_positions
    if window > 0:
        seen &= key_positions > query_positions - window
    return seen


def _softcapped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention with capped scores, in float32, as [Hq, n, Dv]."""
    num_heads, num_queries, key_dim = queries.shape
    grouped = queries.float().reshape(keys.shape[0], -1, key_dim)  # [H, group * n, Dk]
    scores = (grouped @ keys.float().transpose(1, 2) * scaling).view(num_heads, num_queries, -1)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = scores.softmax(-1).view(keys.shape[0], -1, keys.shape[1])
    return (probabilities @ values.float()).view(num_heads, num_queries, -1).to(queries.dtype)

"""The ops in plain Torch, on any device: the definition of correct.

Letters: T tokens of all rows, R rows, Hq query heads, H kv heads, Dk and Dv head widths, V width of logits, B width of
a router's bottleneck.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_core.kernels.panels import STEP, Panels

Norm = tuple[Tensor, float]
"""Weight [K] and eps of an RMS norm."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N]. A bfloat16 weight may meet a float32 `x`."""
    return F.linear(x, weight.to(x.dtype), bias)


def quantised_linear(x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] in float32, rounded to 8 bits, times a block-quantised matrix [N, K] transposed, plus `bias` [N].

    Of each 32 neighbours of `x` the largest magnitude becomes 127 times their scale. Products of codes are exact; here
    all is float64, and the kernels add the groups in float32."""
    steps = x.reshape(*x.shape[:-1], -1, STEP)
    largest = steps.abs().amax(-1, keepdim=True)
    codes = torch.round(steps * torch.where(largest > 0, 127.0 / largest, 0.0))
    rounded = (codes.double() * (largest / 127.0).double()).flatten(-2)
    return F.linear(rounded, panels.whole().double(), None if bias is None else bias.double()).to(x.dtype)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
) -> Tensor:
    """`linear` and what stands around it in a layer: `x` is normed first, where there is a norm; `gated` means that
    `weight` [2 N, K] holds the rows of a gate and then those of `up`, and that the result [..., N] is silu(gate) * up;
    `residual` is added last."""
    y = linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    if gated:
        y = silu_mul(*y.chunk(2, dim=-1))
    return y if residual is None else residual + y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face LlamaRMSNorm of `x` [..., D]: float32 inside, back to the dtype, then times `weight` [D]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def norm_into(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """`rms_norm` to where it is wanted."""
    return out.copy_(rms_norm(x, weight, eps))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of an MLP: silu of `gate` times `up`, of one shape."""
    return F.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in halves, as Hugging Face's Llama applies them: `x` [T, H, D], `cos` and `sin` [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Copies `k` [T, H, Dk] and `v` [T, H, Dv] into the pools [num_blocks, H, block_size, D], in place.

    `slots` [T]: block * block_size + offset. A token with a negative slot is skipped.
    """
    block_size = k_pool.shape[2]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = k
    v_pool[blocks, :, offsets] = v


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
    """What attention asks of its joined projection `qkv` [T, (Hq + 2 H) D]: returns the queries [T, Hq, D].

    Queries and keys are normed head by head where there is a weight [D], as in Qwen3, and rotated by the rows of `cos`
    and `sin` [P, D] at `positions` [T], or one by one without them. Keys and values go into the pools at `slots` [T],
    in place.
    """
    num_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.tensor_split((-2 * num_heads, -num_heads), dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    turn = (cos, sin) if positions is None else (cos[positions], sin[positions])
    write_kv(rotary(k, *turn), v, k_pool, v_pool, slots)
    return rotary(q, *turn)


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values; returns [T, Hq, Dv].

    `q` [T, Hq, Dk]; row r owns the queries `query_starts[r]` to `query_starts[r + 1]`, which are the last of its
    `context_lens[r]` positions, already written to the pages `block_tables[r]`. Nothing at or past
    `context_lens[r]` is read. `window` > 0 limits a query to that many positions, itself included; `softcap` > 0
    bounds scores by softcap * tanh(score / softcap). `sinks` [Hq] are scores that take part in the softmax of every
    query and have no value; no other version of the op has them.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[3])
    starts: list[int] = query_starts.tolist()
    lengths: list[int] = context_lens.tolist()
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        if first < last:
            out[first:last] = attend_row(
                q[first:last], k_pool, v_pool, block_tables[row], length, scaling, window, softcap, sinks
            )
    return out


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
) -> Tensor:
    """`rotary_write`, then `paged_attention` of its queries; returns [T, Hq, D]. Results of tokens that no row owns are
    unset."""
    q = rotary_write(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps)
    return paged_attention(q, k_pool, v_pool, block_tables, query_starts, context_lens, scaling, window, softcap)


def attend_row(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: int,
    scaling: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
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
    if sinks is not None:
        return _with_sinks(queries, keys, values, mask, scaling, sinks).transpose(0, 1)
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


def _with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor
) -> Tensor:
    """Attention whose softmax has a sink more than keys, in float32, as [Hq, n, Dv]."""
    num_heads, num_queries, key_dim = queries.shape
    grouped = queries.float().reshape(keys.shape[0], -1, key_dim)  # [H, group * n, Dk]
    scores = (grouped @ keys.float().transpose(1, 2) * scaling).view(num_heads, num_queries, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    column = sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
    probabilities = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    probabilities = probabilities.reshape(keys.shape[0], -1, keys.shape[1])
    return (probabilities @ values.float()).view(num_heads, num_queries, -1).to(queries.dtype)


class Top2(NamedTuple):
    """Of rows of logits, [R] each: the largest number, its index, the second, and the sum of exp(x - best)."""

    best: Tensor
    best_at: Tensor
    second: Tensor
    sum: Tensor


class RouterWeights(NamedTuple):
    """Of a router over features of width D, float32 as it keeps them."""

    norm: Tensor  # [D]
    down: Tensor  # [B, D + 2]
    down_bias: Tensor  # [B]
    out: Tensor  # [B]
    out_bias: Tensor  # [1]
    eps: float


def top2_logsumexp(logits: Tensor, scratch: object = None, *, out: Top2 | None = None) -> Top2:
    """The largest number of each row of `logits` [R, V] and its first index, the largest of the others, and the
    sum of exp(x - best), in float32. A NaN ranks above every number; if the best is not finite the sum is NaN.
    `scratch` is unused."""
    wide = logits.float()
    best, best_at = wide.max(-1, keepdim=True)
    second = wide.scatter(-1, best_at, -torch.inf).amax(-1)
    top2 = Top2(best[:, 0], best_at[:, 0], second, (wide - best).exp().sum(-1))
    return top2 if out is None else Top2(*(part.copy_(found) for part, found in zip(out, top2, strict=True)))


def router(
    features: Tensor, top2: Top2, weights: RouterWeights, *, scratch: object = None, out: Tensor | None = None
) -> Tensor:
    """Scores [R], float32, of a `Router` on `features` [R, D] and on how sure the head is of its best token. `scratch`
    is unused."""
    confidence = torch.stack((-top2.sum.log(), top2.best - top2.second), -1).to(features.dtype)
    normed = rms_norm(features.float(), weights.norm, weights.eps)
    hidden = F.silu(F.linear(torch.cat((normed, confidence.float()), -1), weights.down, weights.down_bias))
    scores = (hidden @ weights.out + weights.out_bias).sigmoid()
    return scores if out is None else out.copy_(scores)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` [N, D] that `index` [R] names, zeros where it is negative, NaN where it is past the end."""
    rows = x[index.clamp(0, x.shape[0] - 1)]
    rows = rows.masked_fill((index < 0)[:, None], 0.0)
    return rows.masked_fill((index >= x.shape[0])[:, None], torch.nan)


def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Row i of `x` [R, D] becomes row `index[i]` of `out` [N, D], in place; rows outside it are dropped."""
    kept = (index >= 0) & (index < out.shape[0])
    out[index[kept]] = x[kept]


def embed(ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The rows of `weight` [V, D] that the tokens `ids` [T] name; an id outside gives NaN."""
    rows = gather_rows(weight, ids.masked_fill(ids < 0, weight.shape[0]))
    return rows if out is None else out.copy_(rows)


def exit_input(
    states: Tensor,
    state_norm: Tensor,
    deep_states: Tensor,
    deep_slots: Tensor,
    deep_norm: Tensor,
    distances: Tensor,
    table: Tensor,
    eps: float,
) -> Tensor:
    """The input of an exit head, [T, D + d]: the normed `states` [T, D] next to the normed rows `deep_slots` [T] of
    `deep_states` [N, d], plus row `distances` [T], or the last, of `table` [M + 1, D + d].

    A distance of 0 means that there is no deep state: it is zeros, whatever the slot."""
    deep = gather_rows(deep_states, deep_slots.masked_fill(distances <= 0, -1))
    both = torch.cat((rms_norm(states, state_norm, eps), rms_norm(deep, deep_norm, eps)), -1)
    return both + table[distances.clamp(0, table.shape[0] - 1)]

"""The ops as `torch.ops.tide.*`, so that `torch.compile` and graphs see what each reads, writes and returns.

On a GPU an op is the one of `tide_core.kernels.cuda`, on the CPU its reference. Those that write into given tensors
(`linear_out` ...) are in `library_out`; importing this module registers all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from tide_core.kernels import cuda, library_out, reference
from tide_core.kernels.reference import Peaks, RouterWeights

__all__ = ["library_out"]

_POOLS = ("k_pool", "v_pool")


@custom_op("tide::linear", mutates_args=(), device_types="cuda")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    return cuda.linear(x, weight, bias, residual=residual, gated=gated)


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


@custom_op("tide::rms_norm", mutates_args=(), device_types="cuda")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return cuda.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("tide::silu_mul", mutates_args=(), device_types="cuda")
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return cuda.silu_mul(gate, up)


@silu_mul.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@custom_op("tide::rotary", mutates_args=(), device_types="cuda")
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return cuda.rotary(x, cos, sin)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("tide::rotary_write", mutates_args=_POOLS, device_types="cuda")
def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    return cuda.rotary_write(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps)


@rotary_write.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    num_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_heads, head_dim))


@custom_op("tide::write_kv", mutates_args=_POOLS, device_types="cuda")
def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    cuda.write_kv(k, v, k_pool, v_pool, slots)


@custom_op("tide::paged_attention", mutates_args=(), device_types="cuda")
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
    tables = block_tables, query_starts, context_lens
    return cuda.paged_attention(q, k_pool, v_pool, *tables, scaling, window, softcap)


@paged_attention.register_fake
def _(
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
    return q.new_empty((q.shape[0], q.shape[1], v_pool.shape[3]))


@custom_op("tide::peak", mutates_args=(), device_types="cuda")
def peak(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    best, best_at, second, total = cuda.peak(logits)
    return best, best_at, second, total


@peak.register_fake
def _(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    best, best_at, second, total = (logits.new_empty((rows,), dtype=dtype) for dtype in dtypes)
    return best, best_at, second, total


@custom_op("tide::router", mutates_args=(), device_types="cuda")
def router(
    features: Tensor,
    best: Tensor,
    second: Tensor,
    sum: Tensor,
    norm: Tensor,
    down: Tensor,
    down_bias: Tensor,
    out: Tensor,
    out_bias: Tensor,
    eps: float,
    thresholds: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = RouterWeights(norm, down, down_bias, out, out_bias, eps)
    scores, flags = cuda.router(features, Peaks(best, best, second, sum), weights, thresholds)
    assert flags is not None
    return scores, flags


@router.register_kernel("cpu")
def _(
    features: Tensor,
    best: Tensor,
    second: Tensor,
    sum: Tensor,
    norm: Tensor,
    down: Tensor,
    down_bias: Tensor,
    out: Tensor,
    out_bias: Tensor,
    eps: float,
    thresholds: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = RouterWeights(norm, down, down_bias, out, out_bias, eps)
    scores = reference.router(features, Peaks(best, best, second, sum), weights)
    return scores, reference.reaches(scores, thresholds)


@router.register_fake
def _(features: Tensor, *others: Tensor | float) -> tuple[Tensor, Tensor]:
    rows = features.shape[0]
    return features.new_empty((rows,), dtype=torch.float32), features.new_empty((rows,), dtype=torch.int32)


@custom_op("tide::gather_rows", mutates_args=(), device_types="cuda")
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return cuda.gather_rows(x, index)


@gather_rows.register_fake
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


@custom_op("tide::scatter_rows", mutates_args=("out",), device_types="cuda")
def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> None:
    cuda.scatter_rows(x, index, out)


@custom_op("tide::embed", mutates_args=(), device_types="cuda")
def embed(ids: Tensor, weight: Tensor) -> Tensor:
    return cuda.embed(ids, weight)


@embed.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


@custom_op("tide::compact", mutates_args=(), device_types="cuda")
def compact(flags: Tensor) -> tuple[Tensor, Tensor]:
    return cuda.compact(flags)


@compact.register_fake
def _(flags: Tensor) -> tuple[Tensor, Tensor]:
    return flags.new_empty(flags.shape, dtype=torch.int64), flags.new_empty((1,), dtype=torch.int32)


linear.register_kernel("cpu")(reference.fused_linear)
rms_norm.register_kernel("cpu")(reference.rms_norm)
silu_mul.register_kernel("cpu")(reference.silu_mul)
rotary.register_kernel("cpu")(reference.rotary)
rotary_write.register_kernel("cpu")(reference.rotary_write)
write_kv.register_kernel("cpu")(reference.write_kv)
paged_attention.register_kernel("cpu")(reference.paged_attention)
peak.register_kernel("cpu")(lambda logits: tuple(reference.peak(logits)))
gather_rows.register_kernel("cpu")(reference.gather_rows)
scatter_rows.register_kernel("cpu")(reference.scatter_rows)
embed.register_kernel("cpu")(reference.embed)
compact.register_kernel("cpu")(reference.compact)

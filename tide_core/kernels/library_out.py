"""The ops that write into given tensors, as `torch.ops.tide.*_out`; see `library`. These allocate nothing on a GPU.

Each declares what it writes: its results, and memory it works in. `num_rows` is that of `tide_core.kernels.cuda`.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from tide_core.kernels import cuda, reference
from tide_core.kernels.reference import Peaks, RouterWeights

_SCRATCH = ("partials", "counters")


@custom_op("tide::linear_out", mutates_args=("out",), device_types="cuda")
def linear_out(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    num_rows: Tensor | None,
    out: Tensor,
) -> None:
    cuda.linear(x, weight, bias, residual=residual, gated=gated, num_rows=num_rows, out=out)


@linear_out.register_kernel("cpu")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    num_rows: Tensor | None,
    out: Tensor,
) -> None:
    _put((out,), (reference.fused_linear(x, weight, bias, residual, gated),), num_rows)


@custom_op("tide::rms_norm_out", mutates_args=("out",), device_types="cuda")
def rms_norm_out(
    x: Tensor, weight: Tensor, eps: float, index: Tensor | None, num_rows: Tensor | None, out: Tensor
) -> None:
    cuda.rms_norm(x, weight, eps, index=index, num_rows=num_rows, out=out)


@rms_norm_out.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, eps: float, index: Tensor | None, num_rows: Tensor | None, out: Tensor) -> None:
    rows = x if index is None else reference.gather_rows(x, index)
    _put((out,), (reference.rms_norm(rows, weight, eps),), num_rows, index)


@custom_op("tide::silu_mul_out", mutates_args=("out",), device_types="cuda")
def silu_mul_out(gate: Tensor, up: Tensor, num_rows: Tensor | None, out: Tensor) -> None:
    cuda.silu_mul(gate, up, num_rows=num_rows, out=out)


@silu_mul_out.register_kernel("cpu")
def _(gate: Tensor, up: Tensor, num_rows: Tensor | None, out: Tensor) -> None:
    _put((out,), (reference.silu_mul(gate, up),), num_rows)


@custom_op("tide::rotary_write_out", mutates_args=("k_pool", "v_pool", "out"), device_types="cuda")
def rotary_write_out(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_rows: Tensor | None,
    out: Tensor,
) -> None:
    tables = cos, sin, positions, slots
    cuda.rotary_write(qkv, *tables, k_pool, v_pool, q_norm, k_norm, eps, num_rows=num_rows, out=out)


@rotary_write_out.register_kernel("cpu")
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_rows: Tensor | None,
    out: Tensor,
) -> None:
    count = _count(num_rows, qkv.shape[0])
    qkv, positions, slots = qkv[:count], positions[:count], slots[:count]
    out[:count] = reference.rotary_write(qkv, cos, sin, positions, slots, k_pool, v_pool, q_norm, k_norm, eps)


@custom_op("tide::paged_attention_out", mutates_args=("workspace", "out"), device_types="cuda")
def paged_attention_out(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scaling: float,
    window: int,
    softcap: float,
    max_queries: int,
    max_context: int,
    num_rows: Tensor | None,
    workspace: Tensor,
    out: Tensor,
) -> None:
    cuda.paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        query_starts,
        context_lens,
        scaling,
        window,
        softcap,
        max_queries=max_queries,
        max_context=max_context,
        num_rows=num_rows,
        workspace=workspace,
        out=out,
    )


@paged_attention_out.register_kernel("cpu")
def _(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scaling: float,
    window: int,
    softcap: float,
    max_queries: int,
    max_context: int,
    num_rows: Tensor | None,
    workspace: Tensor,
    out: Tensor,
) -> None:
    rows = _count(num_rows, context_lens.shape[0])
    tables = block_tables[:rows], query_starts[: rows + 1], context_lens[:rows]
    owned = int(query_starts[rows])
    attended = reference.paged_attention(q[:owned], k_pool, v_pool, *tables, scaling, window, softcap)
    out[:owned] = attended


@custom_op("tide::peak_out", mutates_args=(*_SCRATCH, *Peaks._fields), device_types="cuda")
def peak_out(
    logits: Tensor,
    num_rows: Tensor | None,
    partials: Tensor,
    counters: Tensor,
    best: Tensor,
    best_at: Tensor,
    second: Tensor,
    sum: Tensor,
) -> None:
    scratch = cuda.Scratch(partials, counters)
    cuda.peak(logits, num_rows=num_rows, scratch=scratch, out=Peaks(best, best_at, second, sum))


@peak_out.register_kernel("cpu")
def _(
    logits: Tensor,
    num_rows: Tensor | None,
    partials: Tensor,
    counters: Tensor,
    best: Tensor,
    best_at: Tensor,
    second: Tensor,
    sum: Tensor,
) -> None:
    _put((best, best_at, second, sum), reference.peak(logits), num_rows)


@custom_op("tide::router_out", mutates_args=(*_SCRATCH, "scores", "flags"), device_types="cuda")
def router_out(
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
    num_rows: Tensor | None,
    partials: Tensor,
    counters: Tensor,
    scores: Tensor,
    flags: Tensor,
) -> None:
    weights = RouterWeights(norm, down, down_bias, out, out_bias, eps)
    scratch = cuda.Scratch(partials, counters)
    peaks = Peaks(best, best, second, sum)
    cuda.router(features, peaks, weights, thresholds, num_rows=num_rows, scratch=scratch, out=(scores, flags))


@router_out.register_kernel("cpu")
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
    num_rows: Tensor | None,
    partials: Tensor,
    counters: Tensor,
    scores: Tensor,
    flags: Tensor,
) -> None:
    weights = RouterWeights(norm, down, down_bias, out, out_bias, eps)
    found = reference.router(features, Peaks(best, best, second, sum), weights)
    _put((scores, flags), (found, reference.reaches(found, thresholds)), num_rows)


@custom_op("tide::gather_rows_out", mutates_args=("out",), device_types="cuda")
def gather_rows_out(x: Tensor, index: Tensor, num_rows: Tensor | None, out: Tensor) -> None:
    cuda.gather_rows(x, index, num_rows=num_rows, out=out)


@gather_rows_out.register_kernel("cpu")
def _(x: Tensor, index: Tensor, num_rows: Tensor | None, out: Tensor) -> None:
    _put((out,), (reference.gather_rows(x, index),), num_rows, index)


@custom_op("tide::compact_out", mutates_args=("index", "count"), device_types="cuda")
def compact_out(flags: Tensor, num_rows: Tensor | None, index: Tensor, count: Tensor) -> None:
    cuda.compact(flags, num_rows=num_rows, out=(index, count))


@compact_out.register_kernel("cpu")
def _(flags: Tensor, num_rows: Tensor | None, index: Tensor, count: Tensor) -> None:
    found, how_many = reference.compact(flags[: _count(num_rows, flags.shape[0])])
    index[: int(how_many)] = found[: int(how_many)]
    count.copy_(how_many)


def _count(num_rows: Tensor | None, rows: int) -> int:
    return rows if num_rows is None else min(rows, int(num_rows))


def _put(
    outs: tuple[Tensor, ...], results: tuple[Tensor, ...], num_rows: Tensor | None, index: Tensor | None = None
) -> None:
    """The true rows of `results` into `outs`, those left out that a negative index names."""
    for out, result in zip(outs, results, strict=True):
        count = _count(num_rows, out.shape[0])
        if index is None:
            out[:count] = result[:count]
        else:
            named = index[:count] >= 0
            out[:count][named] = result[:count][named]

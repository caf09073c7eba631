"""The ops as `torch.ops.tide.*`, so that `torch.compile` and graphs see what each reads, writes and returns.

Importing this module registers them, those of a cycle with it (`library_cycle`). On a GPU an op is the one of
`tide_core.kernels.cuda.ops`, on the CPU its reference. Those whose name ends in `_out` write into given tensors and
allocate nothing on a GPU. What an op writes, its results and memory it works in, is marked with `!` in its schema.
`num_rows` is that of `tide_core.kernels.cuda.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tide_core.kernels import library_cycle
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.library_register import returning, writing
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.ops import Peaks, RouterWeights

__all__ = library_cycle.__all__

_POOLS = "Tensor(a!) k_pool, Tensor(b!) v_pool"
_LINEAR = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool gated, Tensor? norm, float eps"
_ROTARY = "Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots"
_HEAD_NORMS = "Tensor? q_norm, Tensor? k_norm, float eps"
_ATTENTION = "Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_tables, Tensor query_starts, Tensor context_lens"
_SCORES = "float scaling, int window, float softcap"
_SCRATCH = "Tensor(a!) partials, Tensor(b!) counters"
_PEAKS = "Tensor(c!) best, Tensor(d!) best_at, Tensor(e!) second, Tensor(f!) sum"
_ROUTER = (
    "Tensor features, Tensor best, Tensor second, Tensor sum, Tensor norm, Tensor down, Tensor down_bias, Tensor out, "
    "Tensor out_bias, float eps, Tensor thresholds"
)
_EXIT_INPUT = (
    "Tensor states, Tensor state_norm, Tensor deep_states, Tensor deep_slots, Tensor deep_norm, Tensor distances, "
    "Tensor table, float eps"
)
_OUT = "Tensor? num_rows, Tensor(z!) out"


def _count(num_rows: Tensor | None, rows: int) -> int:
    return rows if num_rows is None else min(rows, int(num_rows))


def _put(out: Tensor, result: Tensor, num_rows: Tensor | None, index: Tensor | None = None) -> None:
    """The true rows of `result` into `out`, those left out that a negative index names."""
    count = _count(num_rows, out.shape[0])
    if index is None:
        out[:count] = result[:count]
    else:
        named = index[:count] >= 0
        out[:count][named] = result[:count][named]


def _norm(weight: Tensor | None, eps: float) -> reference.Norm | None:
    return None if weight is None else (weight, eps)


def _rotary_write_rows(*given: Any) -> None:
    qkv, cos, sin, positions, slots, *more, num_rows, out = given
    count = _count(num_rows, qkv.shape[0])
    out[:count] = reference.rotary_write(qkv[:count], cos, sin, positions[:count], slots[:count], *more)


def _attend_rows(*given: Any) -> None:
    q, k_pool, v_pool, tables, starts, lens, *scores, _, _, num_rows, _, out = given
    rows = _count(num_rows, lens.shape[0])
    owned = int(starts[rows])
    tables, starts, lens = tables[:rows], starts[: rows + 1], lens[:rows]
    out[:owned] = reference.paged_attention(q[:owned], k_pool, v_pool, tables, starts, lens, *scores)


def _attend_out(*given: Any) -> None:
    *tensors, max_queries, max_context, num_rows, workspace, out = given
    more = {"num_rows": num_rows, "workspace": workspace, "out": out}
    cuda.paged_attention(*tensors, max_queries=max_queries, max_context=max_context, **more)


def _attend_joined(*given: Any) -> Tensor:
    projected, attended, (max_queries, max_context) = given[:10], given[10:16], given[16:]
    k_pool, v_pool = projected[5:7]
    limits = {"max_queries": max_queries, "max_context": max_context}
    if cuda.takes_joined(k_pool, v_pool):
        return cuda.attend_joined(*projected, *attended, **limits)
    query = cuda.rotary_write(*projected)
    return cuda.paged_attention(query, k_pool, v_pool, *attended, **limits)


def _peak_fake(logits: Tensor) -> tuple[Tensor, ...]:
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    return tuple(logits.new_empty(logits.shape[:1], dtype=dtype) for dtype in dtypes)


def _put_peaks(logits: Tensor, num_rows: Tensor | None, *more: Tensor) -> None:
    for out, part in zip(more[2:], reference.peak(logits), strict=True):
        _put(out, part, num_rows)


def _router_arguments(given: tuple[Any, ...]) -> tuple[Tensor, Peaks, RouterWeights]:
    features, best, second, total, *weights = given
    return features, Peaks(best, best, second, total), RouterWeights(*weights)


def _scores(*given: Any) -> tuple[Tensor, Tensor]:
    scores = reference.router(*_router_arguments(given[:-1]))
    return scores, reference.reaches(scores, given[-1])


def _router_out(*given: Any) -> None:
    *inputs, thresholds, num_rows, partials, counters, scores, flags = given
    scratch = cuda.Scratch(partials, counters)
    more = _router_arguments(tuple(inputs))
    cuda.router(*more, thresholds, num_rows=num_rows, scratch=scratch, out=(scores, flags))


def _put_scores(*given: Any) -> None:
    *inputs, num_rows, _, _, scores, flags = given
    for out, part in zip((scores, flags), _scores(*inputs), strict=True):
        _put(out, part, num_rows)


def _router_fake(features: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    rows = features.shape[:1]
    return features.new_empty(rows, dtype=torch.float32), features.new_empty(rows, dtype=torch.int32)


returning(
    "linear",
    _LINEAR,
    lambda x, w, bias, added, gated, n, eps: cuda.linear(x, w, bias, residual=added, gated=gated, norm=_norm(n, eps)),
    lambda x, w, bias, added, gated, n, eps: reference.fused_linear(x, w, bias, added, gated, _norm(n, eps)),
    lambda x, w, bias, added, gated, *_: x.new_empty((*x.shape[:-1], w.shape[0] // 2 if gated else w.shape[0])),
)
writing(
    "linear_out",
    f"{_LINEAR}, {_OUT}",
    lambda x, w, bias, added, gated, n, eps, num_rows, out: cuda.linear(
        x, w, bias, residual=added, gated=gated, norm=_norm(n, eps), num_rows=num_rows, out=out
    ),
    lambda x, w, bias, added, gated, n, eps, num_rows, out: _put(
        out, reference.fused_linear(x, w, bias, added, gated, _norm(n, eps)), num_rows
    ),
)
returning(
    "rms_norm",
    "Tensor x, Tensor weight, float eps",
    cuda.rms_norm,
    reference.rms_norm,
    lambda x, *_: x.new_empty(x.shape),
)
writing(
    "rms_norm_out",
    f"Tensor x, Tensor weight, float eps, Tensor? index, {_OUT}",
    lambda x, w, eps, index, num_rows, out: cuda.rms_norm(x, w, eps, index=index, num_rows=num_rows, out=out),
    lambda x, w, eps, index, num_rows, out: _put(
        out, reference.rms_norm(x if index is None else reference.gather_rows(x, index), w, eps), num_rows, index
    ),
)
returning(
    "silu_mul",
    "Tensor gate, Tensor up",
    cuda.silu_mul,
    reference.silu_mul,
    lambda gate, _: gate.new_empty(gate.shape),
)
writing(
    "silu_mul_out",
    f"Tensor gate, Tensor up, {_OUT}",
    lambda gate, up, num_rows, out: cuda.silu_mul(gate, up, num_rows=num_rows, out=out),
    lambda gate, up, num_rows, out: _put(out, reference.silu_mul(gate, up), num_rows),
)
returning(
    "rotary",
    "Tensor x, Tensor cos, Tensor sin",
    cuda.rotary,
    reference.rotary,
    lambda x, *_: x.new_empty(x.shape),
)
returning(
    "rotary_write",
    f"{_ROTARY}, {_POOLS}, {_HEAD_NORMS}",
    cuda.rotary_write,
    reference.rotary_write,
    lambda qkv, cos, sin, positions, slots, k_pool, *_: qkv.new_empty(
        (qkv.shape[0], qkv.shape[1] // k_pool.shape[3] - 2 * k_pool.shape[1], k_pool.shape[3])
    ),
)
writing(
    "rotary_write_out",
    f"{_ROTARY}, {_POOLS}, {_HEAD_NORMS}, {_OUT}",
    lambda *given: cuda.rotary_write(*given[:-2], num_rows=given[-2], out=given[-1]),
    _rotary_write_rows,
)
writing("write_kv", f"Tensor k, Tensor v, {_POOLS}, Tensor slots", cuda.write_kv, reference.write_kv)
returning(
    "paged_attention",
    f"{_ATTENTION}, {_SCORES}",
    cuda.paged_attention,
    reference.paged_attention,
    lambda q, k_pool, v_pool, *_: q.new_empty((q.shape[0], q.shape[1], v_pool.shape[3])),
)
writing(
    "paged_attention_out",
    f"{_ATTENTION}, {_SCORES}, int max_queries, int max_context, Tensor? num_rows, Tensor(a!) workspace, "
    "Tensor(z!) out",
    _attend_out,
    _attend_rows,
)
returning(
    "attend_joined",
    f"Tensor qkv, Tensor cos, Tensor sin, Tensor? positions, Tensor slots, {_POOLS}, {_HEAD_NORMS}, "
    f"Tensor block_tables, Tensor query_starts, Tensor context_lens, {_SCORES}, int max_queries, int max_context",
    _attend_joined,
    lambda *given: reference.attend_joined(*given[:-2]),
    lambda qkv, cos, sin, positions, slots, k_pool, *_: qkv.new_empty(
        (qkv.shape[0], qkv.shape[1] // k_pool.shape[3] - 2 * k_pool.shape[1], k_pool.shape[3])
    ),
)
returning(
    "peak",
    "Tensor logits",
    lambda logits: tuple(cuda.peak(logits)),
    lambda logits: tuple(reference.peak(logits)),
    _peak_fake,
    "(Tensor, Tensor, Tensor, Tensor)",
)
writing(
    "peak_out",
    f"Tensor logits, Tensor? num_rows, {_SCRATCH}, {_PEAKS}",
    lambda logits, num_rows, partials, counters, *out: cuda.peak(
        logits, num_rows=num_rows, scratch=cuda.Scratch(partials, counters), out=Peaks(*out)
    ),
    _put_peaks,
)
returning(
    "router",
    _ROUTER,
    lambda *given: cuda.router(*_router_arguments(given[:-1]), given[-1]),
    _scores,
    _router_fake,
    "(Tensor, Tensor)",
)
writing(
    "router_out",
    f"{_ROUTER}, Tensor? num_rows, {_SCRATCH}, Tensor(c!) scores, Tensor(d!) flags",
    _router_out,
    _put_scores,
)
returning(
    "exit_input",
    _EXIT_INPUT,
    cuda.exit_input,
    reference.exit_input,
    lambda states, *_: states.new_empty((states.shape[0], 2 * states.shape[1])),
)
writing(
    "exit_input_out",
    f"{_EXIT_INPUT}, {_OUT}",
    lambda *given: cuda.exit_input(*given[:-2], num_rows=given[-2], out=given[-1]),
    lambda *given: _put(given[-1], reference.exit_input(*given[:-2]), given[-2]),
)
returning(
    "gather_rows",
    "Tensor x, Tensor index",
    cuda.gather_rows,
    reference.gather_rows,
    lambda x, index: x.new_empty((index.shape[0], x.shape[1])),
)
writing(
    "gather_rows_out",
    f"Tensor x, Tensor index, {_OUT}",
    lambda x, index, num_rows, out: cuda.gather_rows(x, index, num_rows=num_rows, out=out),
    lambda x, index, num_rows, out: _put(out, reference.gather_rows(x, index), num_rows, index),
)
writing("scatter_rows", "Tensor x, Tensor index, Tensor(a!) out", cuda.scatter_rows, reference.scatter_rows)
returning(
    "embed",
    "Tensor ids, Tensor weight",
    cuda.embed,
    reference.embed,
    lambda ids, weight: weight.new_empty((ids.shape[0], weight.shape[1])),
)

"""Ops of exits on a GPU: inputs of heads, top-2 and log-sum-exp of logits, scores of routers, rows by index.

See `tide_core.kernels.cuda.ops`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.launch import device_of, launch, module, ptr, result, row_stride
from tide_core.kernels.reference.ops import RouterWeights, Top2

_DTYPE_CODES = checks.DTYPE_CODES
_TOP2_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that `top2_logsumexp` and `router` work in, one call at a time. The counters are 0 between calls."""

    partials: Tensor  # bytes
    counters: Tensor  # int32

    @classmethod
    def sized(cls, device: torch.device, rows: int, *, vocabulary: int = 1, bottleneck: int = 0) -> Scratch:
        """For calls with at most these counts; an op that is not called may be left out."""
        size = max(module().top2_logsumexp_partials(rows, vocabulary), 4 * rows * bottleneck)
        return cls(
            torch.empty(size, dtype=torch.uint8, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
        )


def top2_logsumexp(logits: Tensor, scratch: Scratch | None = None, *, out: Top2 | None = None) -> Top2:
    """Of each row of `logits` [R, V]: best, its index, second and sum of exp(x - best), [R] each."""
    device = device_of(logits)
    checks.refuse(cuda_checks.top2_faults(logits, device))
    rows, width = logits.shape
    top2 = _top2_out(out, rows, device)
    if rows:
        scratch = scratch or Scratch.sized(device, rows, vocabulary=width)
        _refuse_small(scratch, module().top2_logsumexp_partials(rows, width), rows, device)
        launch(
            device,
            "top2_logsumexp",
            _DTYPE_CODES[logits.dtype],
            ptr(logits),
            *(ptr(part) for part in top2),
            ptr(scratch.partials),
            ptr(scratch.counters),
            rows,
            width,
            row_stride(logits),
            counters=scratch.counters,
        )
    return top2


def router(
    features: Tensor,
    top2: Top2,
    weights: RouterWeights,
    *,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scores [R] of `features` [R, D], float32."""
    device = device_of(features)
    checks.refuse(cuda_checks.router_faults(features, top2, weights, device))
    rows, width = features.shape
    bottleneck = weights.down.shape[0]
    checks.refuse(cuda_checks.out_faults("out", out, torch.float32, (rows,), device))
    scores = torch.empty(rows, device=device) if out is None else out
    if rows:
        scratch = scratch or Scratch.sized(device, rows, bottleneck=bottleneck)
        _refuse_small(scratch, 4 * rows * bottleneck, rows, device)
        launch(
            device,
            "router",
            _DTYPE_CODES[features.dtype],
            ptr(features),
            *(ptr(part) for part in (top2.best, top2.second, top2.sum)),
            *(ptr(part) for part in (weights.norm, weights.down, weights.down_bias, weights.out, weights.out_bias)),
            ptr(scores),
            ptr(scratch.partials),
            ptr(scratch.counters),
            rows,
            width,
            row_stride(features),
            bottleneck,
            weights.eps,
            counters=scratch.counters,
        )
    return scores


def embed(ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The rows of `weight` [V, D] that the tokens `ids` [T] name; an id outside gives NaN."""
    device = device_of(weight)
    checks.refuse(cuda_checks.matrix_faults("weight", weight, device))
    checks.refuse([checks.dims_fault("ids", ids, 1)])
    checks.refuse(checks.exact_faults("ids", ids, torch.int64, (ids.shape[0],), "[T]", device))
    y = result(out, weight, (ids.shape[0], weight.shape[1]), device)
    _copy_rows("embed", weight, y, ids, weight.shape[0], device)
    return y


def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Row i of `x` [R, D] becomes row `index[i]` of `out` [N, D]; rows outside it are dropped, none may come twice."""
    device = device_of(x)
    checks.refuse(cuda_checks.matrix_faults("x", x, device))
    checks.refuse(checks.exact_faults("index", index, torch.int64, (x.shape[0],), "[R]", device))
    checks.refuse(cuda_checks.matrix_faults("out", out, device, x.dtype, x.shape[1]))
    _copy_rows("scatter_rows", x, out, index, out.shape[0], device)


def exit_input(
    states: Tensor,
    state_norm: Tensor,
    deep_states: Tensor,
    deep_slots: Tensor,
    deep_norm: Tensor,
    distances: Tensor,
    table: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The input of an exit head, [T, D + d], from `states` [T, D] and rows of `deep_states` [N, d]."""
    device = device_of(states)
    checks.refuse(
        cuda_checks.exit_input_faults(
            states, state_norm, deep_states, deep_slots, deep_norm, distances, table, device=device
        )
    )
    rows, width = states.shape
    deep_width = deep_states.shape[1]
    y = result(out, states, (rows, width + deep_width), device)
    if y.numel():
        launch(
            device,
            "exit_input",
            _DTYPE_CODES[states.dtype],
            *(ptr(part) for part in (states, state_norm, deep_states, deep_norm, table, deep_slots, distances, y)),
            rows,
            width,
            deep_width,
            deep_states.shape[0],
            table.shape[0] - 1,
            *(row_stride(part) for part in (states, deep_states, y)),
            eps,
        )
    return y


def _copy_rows(op: str, x: Tensor, y: Tensor, index: Tensor, limit: int, device: torch.device) -> None:
    rows, width = index.shape[0], x.shape[1]
    if rows and width:
        code = _DTYPE_CODES[x.dtype]
        strides = row_stride(x), row_stride(y)
        launch(device, op, code, ptr(x), ptr(y), ptr(index), rows, limit, width, *strides)


def _top2_out(out: Top2 | None, rows: int, device: torch.device) -> Top2:
    if out is None:
        return Top2(*(torch.empty(rows, dtype=dtype, device=device) for dtype in _TOP2_DTYPES))
    for name, part, dtype in zip(Top2._fields, out, _TOP2_DTYPES, strict=True):
        checks.refuse(cuda_checks.out_faults(f"out.{name}", part, dtype, (rows,), device))
    return out


def _refuse_small(scratch: Scratch, size: int, num_counters: int, device: torch.device) -> None:
    checks.refuse(cuda_checks.scratch_faults("scratch.partials", scratch.partials, torch.uint8, size, device))
    checks.refuse(cuda_checks.scratch_faults("scratch.counters", scratch.counters, torch.int32, num_counters, device))

"""Ops for branches of a draft, on a GPU. See `tide_core.kernels.reference.branches`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.launch import device_of, launch, ptr, row_stride
from tide_core.kernels.reference.branches import Claims, CopySlots

UNITS = (16, 4, 2)
"""Bytes that are moved at once."""


def nth_best(logits: Tensor, ranks: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Where in each row of `logits` [R, V] the number stands that `ranks` [R], int32, others are before."""
    device = device_of(logits)
    checks.refuse(cuda_checks.matrix_faults("logits", logits, device))
    rows, width = logits.shape
    if rows and not width:
        checks.refuse([checks.shape_error("logits", logits, "[R, V] with a column at least")])
    checks.refuse(checks.exact_faults("ranks", ranks, torch.int32, (rows,), "[R]", device))
    checks.refuse(cuda_checks.out_faults("out", out, torch.int64, (rows,), device))
    index = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    code = checks.DTYPE_CODES[logits.dtype]
    launch(device, "nth_best", code, ptr(logits), ptr(ranks), ptr(index), rows, width, row_stride(logits))
    return index


def slot_copier(pools: Sequence[Tensor], block_size: int) -> CopySlots:
    """For these pools, [blocks, heads, block size, D] or [slots, D] each; they must stay where they are."""
    device = device_of(pools[0])
    kept = [pool for pool in pools if pool.numel()]
    for pool in kept:
        checks.refuse([checks.contiguous_fault("pool", pool), checks.device_fault("pool", pool, device)])
    sizes = [(pool.shape[1] if pool.dim() == 4 else 1, pool.shape[-1] * pool.element_size()) for pool in kept]
    rows = [(pool.data_ptr(), heads, size) for pool, (heads, size) in zip(kept, sizes, strict=True)]
    unit = next(unit for unit in UNITS if all(address % unit == size % unit == 0 for address, _, size in rows))
    table = torch.tensor(rows, dtype=torch.int64, device=device)

    def copy(source: Tensor, target: Tensor, claims: Claims | None = None) -> None:
        count = source.shape[0]
        for name, slots in (("source", source), ("target", target)):
            checks.refuse(checks.exact_faults(name, slots, torch.int32, (count,), "[N]", device))
        claimed = 0, 0, 0
        if claims is not None:
            places, target_ids, draft_ids = claims
            checks.refuse(checks.exact_faults("places", places, torch.int32, (2, count), "[2, N]", device))
            for name, ids in (("target_ids", target_ids), ("draft_ids", draft_ids)):
                checks.refuse(checks.exact_faults(name, ids, torch.int64, (ids.numel(),), "[S]", device))
            claimed = ptr(places), ptr(target_ids), ptr(draft_ids)
        sizes = len(rows), count, block_size, unit
        launch(device, "copy_slots", ptr(table), ptr(source), ptr(target), *claimed, *sizes)

    return copy

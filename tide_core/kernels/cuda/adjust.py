"""Bias, masks and penalties on a GPU. See `tide_core.kernels.reference.adjust`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.checks import DTYPE_CODES, Faults
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.cycle import meta_faults
from tide_core.kernels.cuda.launch import device_of, launch, ptr, row_stride
from tide_core.kernels.reference.adjust import MOST_ENTRIES, AdjustState


def adjust_logits(
    logits: Tensor,
    columns: Tensor | None,
    sources: Tensor,
    starts: Tensor,
    positions: Tensor,
    drafted: Tensor,
    row_meta: Tensor,
    state: AdjustState,
    out: Tensor,
) -> None:
    """Rows of `logits` [N, C] as their requests ask for them, into `out` [N, C] float32."""
    device = device_of(logits)
    checks.refuse(cuda_checks.matrix_faults("logits", logits, device))
    checks.refuse(meta_faults(row_meta, device))
    checks.refuse(_state_faults(state, device))
    checks.refuse([checks.dims_fault("drafted", drafted, 2), checks.dims_fault("positions", positions, 1)])
    (count, width), rows, drafts = logits.shape, row_meta.shape[1], drafted.shape[0]
    slots, vocab_size = state.counts.shape
    if columns is not None:
        checks.refuse(checks.exact_faults("columns", columns, torch.int64, (width,), "[C]", device))
    elif width > vocab_size:
        raise checks.shape_error("logits", logits, f"at most {vocab_size} columns, as state.counts has")
    for name, tensor, dtype, shape, letters in (
        ("sources", sources, torch.int64, (count,), "[N]"),
        ("starts", starts, torch.int32, (rows + 1,), "[R + 1]"),
        ("positions", positions, torch.int64, (rows * (drafts + 1),), "[T]"),
        ("drafted", drafted, torch.int64, (drafts, rows), "[K, R]"),
        ("out", out, torch.float32, (count, width), "[N, C]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, dtype, shape, letters, device))
    launch(
        device,
        "adjust_logits",
        DTYPE_CODES[logits.dtype],
        *(ptr(tensor) for tensor in (logits, columns, sources, starts, positions, drafted, row_meta, *state, out)),
        count,
        width,
        row_stride(logits),
        rows,
        slots,
        vocab_size,
        state.entry_ids.shape[1],
    )


def count_outputs(
    row_meta: Tensor,
    starts: Tensor,
    positions: Tensor,
    following: Tensor,
    next_state: Tensor,
    counts: Tensor,
    drafted: Tensor | None = None,
) -> None:
    """Count the output tokens of a cycle in `counts` [S, V] int16; with `drafted` [K, R], accepted drafts of it."""
    device = device_of(row_meta)
    checks.refuse(meta_faults(row_meta, device))
    checks.refuse([checks.dims_fault("following", following, 1), checks.dims_fault("counts", counts, 2)])
    rows, tokens, (slots, vocab_size) = row_meta.shape[1], following.shape[0], counts.shape
    for name, tensor, dtype, shape, letters in (
        ("starts", starts, torch.int32, (rows + 1,), "[R + 1]"),
        ("positions", positions, torch.int64, (tokens,), "[T]"),
        ("following", following, torch.int64, (tokens,), "[T]"),
        ("next_state", next_state, torch.int64, (2, rows), "[2, R]"),
        ("counts", counts, torch.int16, (slots, vocab_size), "[S, V]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, dtype, shape, letters, device))
    if drafted is not None:
        checks.refuse([checks.dims_fault("drafted", drafted, 2)])
        shape = (drafted.shape[0], rows)
        checks.refuse(checks.exact_faults("drafted", drafted, torch.int64, shape, "[K, R]", device))
    tensors = row_meta, starts, positions, following, next_state, counts, drafted
    launch(device, "count_outputs", *(ptr(tensor) for tensor in tensors), rows, vocab_size)


def _state_faults(state: AdjustState, device: torch.device) -> Faults:
    yield checks.dims_fault("state.counts", state.counts, 2)
    yield checks.dims_fault("state.entry_ids", state.entry_ids, 2)
    (slots, vocab_size), entries = state.counts.shape, state.entry_ids.shape[1]
    if entries > MOST_ENTRIES:
        yield checks.shape_error("state.entry_ids", state.entry_ids, f"at most {MOST_ENTRIES} entries of a slot")
    expected = (
        (torch.int16, (slots, vocab_size), "[S, V]"),
        (torch.float64, (3, slots), "[3, S]"),
        (torch.int32, (slots, entries), "[S, E]"),
        (torch.float32, (slots, entries), "[S, E]"),
        (torch.int32, (slots, entries), "[S, E]"),
    )
    for name, tensor, (dtype, shape, letters) in zip(state._fields, state, expected, strict=True):
        yield from checks.exact_faults(f"state.{name}", tensor, dtype, shape, letters, device)

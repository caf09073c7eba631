"""The plan of a cycle on a GPU. See `tide_core.kernels.reference.cycle`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.checks import DTYPE_CODES
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.launch import device_of, launch, ptr, row_stride
from tide_core.kernels.reference import cycle as cycle_plan


def pending_tokens(
    newest: Tensor, places: Tensor, shortlist: Tensor, sources: Tensor, drafted: Tensor, token_ids: Tensor
) -> None:
    """Write the ids of the drafts at `places` [K, R] of the shortlist into `drafted` [K, R], and those of the deep pass
    into `token_ids` [T]; all int64. A place of -1 - t stands for token t itself."""
    device = device_of(newest)
    checks.refuse([checks.dims_fault("places", places, 2), checks.dims_fault("sources", sources, 1)])
    drafts, rows, tokens = *places.shape, sources.shape[0]
    for name, tensor, shape, letters in (
        ("newest", newest, (rows,), "[R]"),
        ("places", places, (drafts, rows), "[K, R]"),
        ("shortlist", shortlist, (shortlist.numel(),), "[S]"),
        ("sources", sources, (tokens,), "[T]"),
        ("drafted", drafted, (drafts, rows), "[K, R]"),
        ("token_ids", token_ids, (tokens,), "[T]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, torch.int64, shape, letters, device))
    addresses = (ptr(part) for part in (newest, places, shortlist, sources, drafted, token_ids))
    launch(device, "pending_tokens", *addresses, rows, drafts, tokens)


def accept_drafts(
    row_meta: Tensor,
    counting: Tensor,
    starts: Tensor,
    positions: Tensor,
    drafted: Tensor,
    scores: Tensor,
    following: Tensor,
    logits: Tensor,
    gaps: Tensor,
    branches: int,
    device_state: Tensor,
    next_state: Tensor,
) -> None:
    """The token that follows the accepted drafts of each row, its position and the number of differing tokens, into
    `device_state` [3, MOST_ROWS], int32, and the first two into `next_state` [2, R], int64. A draft that a budget keeps
    takes its place in `following`, and `gaps` [T] tells by how much the logit of full depth's choice is larger."""
    device = device_of(row_meta)
    checks.refuse(meta_faults(row_meta, device))
    checks.refuse([checks.dims_fault("drafted", drafted, 2)])
    checks.refuse(cuda_checks.matrix_faults("logits", logits, device))
    rows, drafts, tokens = row_meta.shape[1], drafted.shape[0], following.numel()
    if logits.shape[0] != tokens:
        raise checks.shape_error("logits", logits, f"[T, V] with {tokens} rows")
    if branches < 1 or rows % branches:
        raise ValueError(f"branches: got {branches}, expected a divisor of {rows} rows")
    for name, tensor, kind, shape, letters in (
        ("counting", counting, torch.int32, (rows,), "[R]"),
        ("starts", starts, torch.int32, (rows + 1,), "[R + 1]"),
        ("positions", positions, torch.int64, (tokens,), "[T]"),
        ("drafted", drafted, torch.int64, (drafts, rows), "[K, R]"),
        ("scores", scores, torch.float32, (drafts, rows), "[K, R]"),
        ("following", following, torch.int64, (tokens,), "[T]"),
        ("gaps", gaps, torch.float32, (tokens,), "[T]"),
        ("device_state", device_state, torch.int32, (3, cycle_plan.MOST_ROWS), "[3, MOST_ROWS]"),
        ("next_state", next_state, torch.int64, (2, rows), "[2, R]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, kind, shape, letters, device))
    tensors = row_meta, counting, starts, positions, drafted, scores, following, logits, gaps, device_state, next_state
    sizes = rows, drafts, branches, row_stride(logits)
    launch(device, "accept_drafts", DTYPE_CODES[logits.dtype], *(ptr(tensor) for tensor in tensors), *sizes)


def top_logprobs(
    logits: Tensor,
    sources: Tensor,
    starts: Tensor,
    row_meta: Tensor,
    following: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    chosen: Tensor,
) -> None:
    """The likeliest tokens of `logits` [T, V] into `ids` and `logprobs` [T, N], and the log-probability of `following`
    into `chosen` [T], for rows that have log-probabilities."""
    device = device_of(logits)
    checks.refuse(cuda_checks.matrix_faults("logits", logits, device))
    checks.refuse(meta_faults(row_meta, device))
    checks.refuse([checks.dims_fault("ids", ids, 2)])
    (tokens, width), rows, most = logits.shape, row_meta.shape[1], ids.shape[1]
    if most > min(cycle_plan.MOST_LOGPROBS, width):
        raise checks.shape_error("ids", ids, f"[T, N] with at most {min(cycle_plan.MOST_LOGPROBS, width)} columns")
    for name, tensor, kind, shape, letters in (
        ("sources", sources, torch.int64, (tokens,), "[T]"),
        ("starts", starts, torch.int32, (rows + 1,), "[R + 1]"),
        ("following", following, torch.int64, (tokens,), "[T]"),
        ("ids", ids, torch.int64, (tokens, most), "[T, N]"),
        ("logprobs", logprobs, torch.float32, (tokens, most), "[T, N]"),
        ("chosen", chosen, torch.float32, (tokens,), "[T]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, kind, shape, letters, device))
    addresses = (ptr(part) for part in (logits, sources, starts, row_meta, following, ids, logprobs, chosen))
    sizes = tokens, rows, width, row_stride(logits), most
    launch(device, "top_logprobs", DTYPE_CODES[logits.dtype], *addresses, *sizes)


def meta_faults(row_meta: Tensor, device: torch.device, num: int = cycle_plan.NUM_META) -> checks.Faults:
    """Of `row_meta` [num, R] int32, with at most as many rows as a kernel has threads."""
    yield checks.dims_fault("row_meta", row_meta, 2)
    rows, letters = row_meta.shape[1], f"[{num}, R]"
    yield from checks.exact_faults("row_meta", row_meta, torch.int32, (num, rows), letters, device)
    if rows > cycle_plan.MOST_ROWS:
        yield checks.shape_error("row_meta", row_meta, f"{letters} with at most {cycle_plan.MOST_ROWS} rows")


def plan_cycle(
    row_meta: Tensor,
    next_state: Tensor,
    tables: Tensor,
    block_size: int,
    drafts: int,
    wide: Tensor,
    narrow: Tensor,
    branches: int = 1,
    first_spare: int = 0,
) -> None:
    """Fill both buffers from `row_meta` [5, R], the `next_state` [3, MOST_ROWS] of the previous cycle and the blocks
    [R, B] of the rows, all int32; branches get blocks of their own in `tables`."""
    device = device_of(row_meta)
    checks.refuse(meta_faults(row_meta, device, cycle_plan.NUM_PLANNED))
    checks.refuse([checks.dims_fault("tables", tables, 2)])
    rows, blocks = row_meta.shape[1], tables.shape[1]
    most = cycle_plan.MOST_ROWS
    checks.refuse(checks.exact_faults("next_state", next_state, torch.int32, (3, most), "[3, MOST_ROWS]", device))
    checks.refuse(checks.exact_faults("tables", tables, torch.int32, (rows, blocks), "[R, B]", device))
    num_wide, num_narrow = cycle_plan.sizes(rows, drafts, block_size if branches > 1 else 0)
    checks.refuse(checks.exact_faults("wide", wide, torch.int64, (num_wide,), "cycle_plan.sizes", device))
    checks.refuse(checks.exact_faults("narrow", narrow, torch.int32, (num_narrow,), "cycle_plan.sizes", device))
    addresses = (ptr(part) for part in (row_meta, next_state, tables, wide, narrow))
    launch(device, "plan_cycle", *addresses, rows, drafts, blocks, block_size, branches, first_spare)

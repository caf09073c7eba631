"""The plan of a cycle on a GPU. See `tide_core.kernels.cycle_plan`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks, cycle_plan
from tide_core.kernels.cuda_launch import at, home, launch


def pending_tokens(
    newest: Tensor, places: Tensor, shortlist: Tensor, sources: Tensor, drafted: Tensor, token_ids: Tensor
) -> None:
    """Which tokens the drafts at these `places` [K, R] of the shortlist are, into `drafted` [K, R], and those of the
    deep pass, into `token_ids` [T]; all int64."""
    device = home(newest)
    checks.refuse([checks.dims_fault("places", places, 2), checks.dims_fault("sources", sources, 1)])
    drafts, rows, tokens = *places.shape, sources.shape[0]
    for name, tensor, shape, said in (
        ("newest", newest, (rows,), "[R]"),
        ("places", places, (drafts, rows), "[K, R]"),
        ("shortlist", shortlist, (shortlist.numel(),), "[S]"),
        ("sources", sources, (tokens,), "[T]"),
        ("drafted", drafted, (drafts, rows), "[K, R]"),
        ("token_ids", token_ids, (tokens,), "[T]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, torch.int64, shape, said, device))
    addresses = (at(part) for part in (newest, places, shortlist, sources, drafted, token_ids))
    launch(device, "pending_tokens", *addresses, rows, drafts, tokens)


def plan_cycle(about: Tensor, tables: Tensor, block_size: int, drafts: int, wide: Tensor, narrow: Tensor) -> None:
    """Fill both buffers from what is said `about` the rows [4, R] and their blocks [R, B], int32 both."""
    device = home(about)
    checks.refuse([checks.dims_fault("about", about, 2), checks.dims_fault("tables", tables, 2)])
    rows, blocks = about.shape[1], tables.shape[1]
    if rows > cycle_plan.MOST_ROWS:
        checks.refuse([checks.shape_error("about", about, f"[4, R] with at most {cycle_plan.MOST_ROWS} rows")])
    checks.refuse(checks.exact_faults("about", about, torch.int32, (4, rows), "[4, R]", device))
    checks.refuse(checks.exact_faults("tables", tables, torch.int32, (rows, blocks), "[R, B]", device))
    num_wide, num_narrow = cycle_plan.sizes(rows, drafts)
    checks.refuse(checks.exact_faults("wide", wide, torch.int64, (num_wide,), "cycle_plan.sizes", device))
    checks.refuse(checks.exact_faults("narrow", narrow, torch.int32, (num_narrow,), "cycle_plan.sizes", device))
    launch(device, "plan_cycle", at(about), at(tables), at(wide), at(narrow), rows, drafts, blocks, block_size)

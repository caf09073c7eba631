"""The indices of a whole cycle: of every draft pass and of the deep pass behind them. Here in plain Torch; on a GPU it
is one launch, so that the host sends what it knows of each row and nothing of what follows from that.

Rows come by falling number of drafts, those that take part in a draft pass are the first ones. What is left of the
room belongs to no row: its slot is -1 and its context is empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 256
NEWEST, START, DRAFTS, TRACKED = range(4)
"""What is said of a row: its newest token, where that stands, how many tokens it drafts (-1: there is no row), and
whether it may leave early."""


class CycleParts(NamedTuple):
    """With R rows and K drafts of each, T = R (K + 1). The first eleven are int64, the others int32."""

    newest: Tensor
    """[R] token ids."""
    draft_deep_slots: Tensor
    """[R] where the last deep state before the cycle lies."""
    draft_positions: Tensor
    """[K, R]"""
    draft_slots: Tensor
    """[K, R]"""
    draft_distances: Tensor
    """[K, R] how far back the last deep state is, 0 for none."""
    positions: Tensor
    """[T], from here on of the deep pass: the tokens of each row, one row behind another."""
    slots: Tensor
    """[T]"""
    sources: Tensor
    """[T] where each token stands among newest tokens and drafts, [K + 1, R]."""
    kept_slots: Tensor
    """[T] slots of the tokens of rows that may leave early, -1 for the others."""
    deep_slots: Tensor
    """[T] where the deep state of the token before lies."""
    distances: Tensor
    """[T] 1, or 0 where there is none."""
    draft_starts: Tensor
    """[K, R + 1]"""
    draft_lens: Tensor
    """[K, R]"""
    starts: Tensor
    """[R + 1]"""
    lens: Tensor
    """[R]"""


NUM_WIDE = 11


def part_shapes(rows: int, drafts: int) -> tuple[tuple[int, ...], ...]:
    per_draft, per_token = (drafts, rows), (rows * (drafts + 1),)
    wide = ((rows,), (rows,), per_draft, per_draft, per_draft, *(per_token,) * 6)
    return (*wide, (drafts, rows + 1), per_draft, (rows + 1,), (rows,))


def sizes(rows: int, drafts: int) -> tuple[int, int]:
    """Numbers of 64 and of 32 bits that the parts take."""
    volumes = [torch.Size(shape).numel() for shape in part_shapes(rows, drafts)]
    return sum(volumes[:NUM_WIDE]), sum(volumes[NUM_WIDE:])


def split(wide: Tensor, narrow: Tensor, rows: int, drafts: int) -> CycleParts:
    """The parts in two buffers of these sizes, one behind another."""
    parts, shapes = [], part_shapes(rows, drafts)
    for whole, some in ((wide, shapes[:NUM_WIDE]), (narrow, shapes[NUM_WIDE:])):
        end = 0
        for shape in some:
            begin, end = end, end + torch.Size(shape).numel()
            parts.append(whole[begin:end].view(shape))
    return CycleParts(*parts)


def pending_tokens(
    newest: Tensor, places: Tensor, shortlist: Tensor, sources: Tensor, drafted: Tensor, token_ids: Tensor
) -> None:
    """Which tokens the drafts at these `places` [K, R] of the shortlist are, into `drafted` [K, R], and those of the
    deep pass, into `token_ids` [T]; all int64."""
    drafted[:] = shortlist[places]
    token_ids[:] = torch.cat((newest, drafted.flatten()))[sources]


def plan_cycle(about: Tensor, tables: Tensor, block_size: int, drafts: int, wide: Tensor, narrow: Tensor) -> None:
    """Fill both buffers from what is said `about` the rows [4, R] and their blocks [R, B], int32 both."""
    num_rows = about.shape[1]
    out = split(wide, narrow, num_rows, drafts)
    start, counts = about[START].long(), about[DRAFTS].long()
    every = torch.arange(num_rows, device=about.device)

    def slots(rows: Tensor, places: Tensor) -> Tensor:
        return tables[rows, places // block_size].long() * block_size + places % block_size

    known = (counts >= 0) & (start > 0)
    out.newest[:] = about[NEWEST]
    out.draft_deep_slots[:] = torch.where(known, slots(every, (start - 1).clamp(min=0)), 0)
    ahead = torch.arange(drafts, device=about.device).unsqueeze(-1)
    drafting = counts > ahead
    places = torch.where(drafting, start + ahead, 0)
    out.draft_positions[:] = places
    out.draft_slots[:] = torch.where(drafting, slots(every.expand_as(places), places), -1)
    out.draft_distances[:] = torch.where(known, ahead + 1, 0)
    out.draft_lens[:] = torch.where(drafting, places + 1, 0)
    out.draft_starts[:] = torch.minimum(torch.arange(num_rows + 1, device=about.device), drafting.sum(1, keepdim=True))

    out.starts[:] = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
    out.lens[:] = torch.where(counts >= 0, start + counts + 1, 0)
    row_of = every.repeat_interleave(counts + 1)
    ahead = torch.arange(len(row_of), device=about.device) - out.starts[row_of]
    places = start[row_of] + ahead
    here = slots(row_of, places)
    for part, values, rest in (
        (out.positions, places, 0),
        (out.slots, here, -1),
        (out.sources, ahead * num_rows + row_of, 0),
        (out.kept_slots, torch.where(about[TRACKED][row_of] != 0, here, -1), -1),
        (out.deep_slots, slots(row_of, (places - 1).clamp(min=0)), 0),
        (out.distances, places > 0, 0),
    ):
        part[: len(row_of)] = values
        part[len(row_of) :] = rest

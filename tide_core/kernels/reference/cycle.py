"""The indices of a whole cycle: of every draft pass and of the deep pass after them. Here in plain Torch; on a GPU it
is one launch, so that the host sends only the metadata of each row.

Rows are ordered by falling number of drafts, so those in a draft pass are the first ones. Unused entries belong to no
row: their slot is -1 and their context is empty.

A cycle may be launched before the previous one was read. The host then does not know the next token of a row, nor its
position: the device carries both from one cycle to the next, by the index that the row had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 256
"""The most rows of a cycle. Up to so many our CUDA linear is always used: a row gets the same bits in every step, so
that verification gives what full depth gives. For more rows, which prompts have, see `fast_for_many_rows`."""
NEWEST, START, DRAFTS, LEAVES, END = range(5)
"""Metadata of a row: its newest token, the position of that, the number of drafts (-1: there is no row), whether it may
leave early, and the position after the last that its answer can have. A start of -1 - p means: token, position and
number of differing tokens are those that the previous cycle left at index p."""
NEVER, IF_RIGHT = range(2)
"""Whether a row may leave early: not at all, or with drafts of an exit that are accepted."""
MIN_SCORE, PROMPT_LEN, ADJUST_SLOT, LOGPROBS, DIFFERING, MARGIN, EPSILON = range(5, 12)
"""More rows of `row_meta`: the score a draft needs to count (float32 bits as int32; -inf for none), the tokens of the
prompt, the slot in an `AdjustState` (-1: none), how many of the likeliest tokens are listed (-1: the row has no
log-probabilities), how many tokens of the answer differ from full depth's choice, and the budget: `margin` (float32
bits) and `epsilon` (float64 bits, the lower half first, in two rows; 0: there is none)."""
NUM_META, NUM_PLANNED = 13, 5
"""Rows of `row_meta`, and how many of them `plan_cycle` reads."""
MOST_LOGPROBS = 32
AGREES = -1.0
"""In place of the gap of a token: full depth chose it."""
BLOCKS_PER_BRANCH = 2
"""A branch has fewer drafts than a block has slots."""


class CycleParts(NamedTuple):
    """With R rows and K drafts of each, T = R (K + 1). The first eleven are int64, the others int32. The last two are
    empty where rows have no branches."""

    newest: Tensor
    """[R] token ids."""
    draft_deep_slots: Tensor
    """[R] slot of the last deep state before the cycle."""
    draft_positions: Tensor
    """[K, R]"""
    draft_slots: Tensor
    """[K, R]"""
    draft_distances: Tensor
    """[K, R] how far back the last deep state is, 0 for none."""
    positions: Tensor
    """[T], from here on of the deep pass: the tokens of each row, one row after another."""
    slots: Tensor
    """[T]"""
    sources: Tensor
    """[T] index of each token among newest tokens and drafts, [K + 1, R]."""
    kept_slots: Tensor
    """[T] slots of the tokens of rows that may leave early, -1 for the others."""
    deep_slots: Tensor
    """[T] slot of the deep state of the token before."""
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
    counting: Tensor
    """[R] drafts that may count: those before the last token that the answer can have; -1 where there is no row."""
    copies: Tensor
    """[2, R B] with blocks of B slots: the slots that branches need of their rows, from and to, -1 for none."""
    returns: Tensor
    """[4, T] slots that a branch has written and their target, if the branch is right: if the token of full depth at
    the third index equals the first draft of the row at the fourth."""


NUM_WIDE = 11


def part_shapes(rows: int, drafts: int, branch_size: int = 0) -> tuple[tuple[int, ...], ...]:
    per_draft, per_token = (drafts, rows), (rows * (drafts + 1),)
    wide = ((rows,), (rows,), per_draft, per_draft, per_draft, *(per_token,) * 6)
    branches = (2, rows * branch_size), (4, *per_token) if branch_size else (4, 0)
    return (*wide, (drafts, rows + 1), per_draft, (rows + 1,), (rows,), (rows,), *branches)


def sizes(rows: int, drafts: int, branch_size: int = 0) -> tuple[int, int]:
    """How many numbers of 64 and of 32 bits the parts need; with branches, `branch_size` is the slots of a block."""
    volumes = [torch.Size(shape).numel() for shape in part_shapes(rows, drafts, branch_size)]
    return sum(volumes[:NUM_WIDE]), sum(volumes[NUM_WIDE:])


def split(wide: Tensor, narrow: Tensor, rows: int, drafts: int, branch_size: int = 0) -> CycleParts:
    """The parts in two buffers of these sizes, one after another."""
    parts, shapes = [], part_shapes(rows, drafts, branch_size)
    for whole, some in ((wide, shapes[:NUM_WIDE]), (narrow, shapes[NUM_WIDE:])):
        end = 0
        for shape in some:
            begin, end = end, end + torch.Size(shape).numel()
            parts.append(whole[begin:end].view(shape))
    return CycleParts(*parts)


def pending_tokens(
    newest: Tensor, places: Tensor, shortlist: Tensor, sources: Tensor, drafted: Tensor, token_ids: Tensor
) -> None:
    """Write the ids of the drafts at `places` [K, R] of the shortlist into `drafted` [K, R], and those of the deep pass
    into `token_ids` [T]; all int64. A place of -1 - t stands for token t itself: a suffix draft."""
    from_suffix = places < 0
    drafted[:] = -1 - places
    drafted[~from_suffix] = shortlist[places[~from_suffix]]
    token_ids[:] = torch.cat((newest, drafted.flatten()))[sources]


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
    """The token that follows the accepted drafts of each row, its position, and how many tokens of the answer differ
    from full depth's choice, into `device_state` [3, MOST_ROWS], int32, and the first two into `next_state` [2, R],
    int64; zeros where there is no row.

    A draft counts if it is one of the first `counting` [R] of its row, and its score is finite and at least MIN_SCORE.
    It is accepted if it equals the token in `following`, or if the row has a budget that keeps it
    (`exits.accept.keeps`): then it takes the place of that token in `following`. The first draft that is not accepted
    ends the row. For rows with a budget `gaps` [T] gets, after each token up to the last draft that may count, by how
    much the logit of full depth's choice, of `logits` [T, V], is larger than that of the kept draft, or `AGREES`."""
    rows = row_meta.shape[1]
    places = (-1 - row_meta[START]).long()
    differing = torch.where(places >= 0, device_state[2, places.clamp(min=0)], row_meta[DIFFERING]).tolist()
    device_state[:, :rows] = next_state[:] = 0
    counts = scores.isfinite() & (scores >= row_meta[MIN_SCORE].view(torch.float32))
    margins = row_meta[MARGIN].view(torch.float32).tolist()
    halves = row_meta[EPSILON : EPSILON + 2].T.clone(memory_format=torch.contiguous_format)
    epsilons = halves.view(torch.float64).flatten().tolist()
    final = following.clone()
    for r, (count, leaves) in enumerate(zip(counting.tolist(), row_meta[LEAVES].tolist(), strict=True)):
        if count < 0:
            continue
        row = first = r - r % branches
        if leaves == IF_RIGHT and len(drafted):
            token = following[starts[first]]
            row = next((branch for branch in range(first, first + branches) if drafted[0, branch] == token), first)
        begin, accepted = int(starts[row]), 0
        emitted = int(positions[begin]) + 1 - int(row_meta[PROMPT_LEN, r])
        has_budget = epsilons[r] > 0.0
        if has_budget:
            gaps[begin : begin + count + 1] = AGREES
        while accepted < count and counts[accepted, row]:
            t, draft = begin + accepted, drafted[accepted, row]
            if draft != following[t]:
                if not has_budget or differing[r] + 1 > epsilons[r] * (emitted + accepted + 1):
                    break
                gap = logits[t, following[t]].float() - logits[t, draft].float()
                if not gap <= margins[r]:
                    break
                final[t], gaps[t] = draft, gap
                differing[r] += 1
            accepted += 1
        next_state[:, r] = torch.stack((following[begin + accepted], positions[begin] + accepted + 1))
        device_state[:2, r], device_state[2, r] = next_state[:, r], differing[r]
    following[:] = final


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
    """After every token of a row with log-probabilities: the likeliest of `logits` [T, V], best first and equals by
    lower id, as many as the row lists, into `ids` and `logprobs` [T, N]; and the log-probability of `following` [T]
    into `chosen` [T]. Nothing is written for other rows."""
    rows, most = row_meta.shape[1], ids.shape[1]
    for t, source in enumerate(sources[: int(starts[rows])].tolist()):
        wanted = int(row_meta[LOGPROBS, source % rows])
        if wanted < 0:
            continue
        wide = logits[t].to(torch.promote_types(logits.dtype, torch.float32))
        of_row, listed = wide.log_softmax(-1), min(wanted, most)
        likeliest = wide.argsort(descending=True, stable=True)[:listed]
        ids[t, :listed], logprobs[t, :listed], chosen[t] = likeliest, of_row[likeliest], of_row[following[t]]


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
    [R, B] of the rows, all int32. With several `branches` of each row, one after another, all but
    the first get blocks of their own in `tables`, from the spare ones."""
    num_rows = row_meta.shape[1]
    out = split(wide, narrow, num_rows, drafts, block_size if branches > 1 else 0)
    place = (-1 - row_meta[START]).long()
    newest, start = torch.where(place >= 0, next_state[:2, place.clamp(min=0)], row_meta[[NEWEST, START]]).long()
    counts = row_meta[DRAFTS].long()
    every = torch.arange(num_rows, device=row_meta.device)
    if branches > 1:
        _branch_off(start.tolist(), counts.tolist(), tables, block_size, branches, first_spare)

    def slots(rows: Tensor, places: Tensor) -> Tensor:
        return tables[rows, places // block_size].long() * block_size + places % block_size

    known = (counts >= 0) & (start > 0)
    out.newest[:] = newest
    out.draft_deep_slots[:] = torch.where(known, slots(every, (start - 1).clamp(min=0)), 0)
    ahead = torch.arange(drafts, device=row_meta.device).unsqueeze(-1)
    drafting = counts > ahead
    places = torch.where(drafting, start + ahead, 0)
    out.draft_positions[:] = places
    out.draft_slots[:] = torch.where(drafting, slots(every.expand_as(places), places), -1)
    out.draft_distances[:] = torch.where(known, ahead + 1, 0)
    out.draft_lens[:] = torch.where(drafting, places + 1, 0)
    out.draft_starts[:] = torch.minimum(
        torch.arange(num_rows + 1, device=row_meta.device), drafting.sum(1, keepdim=True)
    )

    out.starts[:] = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
    out.lens[:] = torch.where(counts >= 0, start + counts + 1, 0)
    # After the newest token the answer has END - start - 1 more at most, and the last is not drafted.
    most = (row_meta[END].long() - start - 2).clamp(min=0)
    out.counting[:] = torch.where(counts >= 0, counts.minimum(most), -1)
    row_of = every.repeat_interleave(counts + 1)
    ahead = torch.arange(len(row_of), device=row_meta.device) - out.starts[row_of]
    places = start[row_of] + ahead
    here = slots(row_of, places)
    for part, values, rest in (
        (out.positions, places, 0),
        (out.slots, here, -1),
        (out.sources, ahead * num_rows + row_of, 0),
        (out.kept_slots, torch.where(row_meta[LEAVES][row_of] != NEVER, here, -1), -1),
        (out.deep_slots, slots(row_of, (places - 1).clamp(min=0)), 0),
        (out.distances, places > 0, 0),
    ):
        part[: len(row_of)] = values
        part[len(row_of) :] = rest
    if branches > 1:
        _plan_branches(out, row_meta[LEAVES].tolist(), start.tolist(), counts.tolist(), tables, block_size, branches)


def _branch_off(
    starts: Sequence[int], counts: Sequence[int], tables: Tensor, block_size: int, branches: int, first_spare: int
) -> None:
    """Give every branch but the first of each row the blocks that it writes to."""
    spare = first_spare
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if r % branches and count >= 0:
            blocks = range(start // block_size, (start + count) // block_size + 1)
            tables[r, blocks.start : blocks.stop] = torch.arange(spare, spare + len(blocks), dtype=tables.dtype)
        if r % branches:
            spare += BLOCKS_PER_BRANCH


def _plan_branches(
    out: CycleParts,
    leaves: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Tensor,
    block_size: int,
    branches: int,
) -> None:
    """The copies that branches need before they run, and of what they wrote back to their rows."""
    out.copies[:] = out.returns[:2] = -1
    out.returns[2:] = 0
    offsets = torch.arange(block_size)
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        first, block = r - r % branches, start // block_size
        if r == first or count < 0:
            continue
        for place, blocks in enumerate(tables[[first, r], block].tolist()):
            before = offsets[: start % block_size]
            out.copies[place, r * block_size : r * block_size + len(before)] = blocks * block_size + before
        if leaves[r] == IF_RIGHT:
            at, places = int(out.starts[r]), torch.arange(start, start + count + 1)
            own = tables[first, places // block_size] * block_size + places % block_size
            target, tried = (torch.full_like(own, value) for value in (int(out.starts[first]), r))
            here = out.slots[at : at + count + 1]
            out.returns[:, at : at + count + 1] = torch.stack((here.to(own.dtype), own, target, tried))

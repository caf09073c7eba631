"""Tokens per deep pass on held-out answers: drafts at every anchor are compared with the text, and cycles are replayed.

A draft counts if it and all before it equal the target's own greedy text. After the accepted drafts the deep pass gives
one more token, and the next cycle begins there. The exit head drafts as in serving: deep states are known up to the
anchor, and the head attends to its own keys and values for the drafts after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.block_drafter.data import Batch, Batches
from benchmarks.block_drafter.train import BlockTrainee, Drafting, HeadTrainee, predicted
from tide_core.calibration.collect.shards import TokenSequence
from tide_core.calibration.risk.simulate import acceptance_by_distance, pack, simulate_all
from tide_core.calibration.risk.traces import SequenceTrace
from tide_core.calibration.train.candidates import Candidate, layers_of
from tide_core.calibration.train.chain import features_by_distance
from tide_core.calibration.train.teacher import Teacher, fast_matmul

ROWS = 8192
"""Rows of logits in memory at once."""
ANCHORS = 64
"""Blocks of a row in one pass."""


def evaluate(
    trainee: BlockTrainee | HeadTrainee,
    teacher: Teacher,
    sequences: Sequence[TokenSequence],
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Tokens per deep pass for each number of drafts in `lengths` that the drafter can make, and the chance by place
    that a draft is right."""
    most = max(lengths)
    if isinstance(trainee, BlockTrainee):
        most = min(most, trainee.drafter.spec.places)
    traces: list[SequenceTrace | None] = [None] * len(sequences)
    device = teacher.shortlist.device
    with torch.no_grad(), fast_matmul(device):
        for indices, batch in Batches(sequences, batch_tokens, seed).in_order():
            right = (
                block_right(trainee.drafting, batch, most)
                if isinstance(trainee, BlockTrainee)
                else head_right(trainee.candidate, teacher, batch, most)
            ).cpu()
            for row, index in enumerate(indices):
                traces[index] = trace(right[row].numpy(), sequences[index])
    return summary([each for each in traces if each is not None], [k for k in lengths if k <= most])


def summary(traces: Sequence[SequenceTrace], lengths: Sequence[int]) -> dict[str, Any]:
    packed = pack(traces)
    walks = {k: simulate_all(packed, draft_threshold=0.0, max_drafts=k).total() for k in lengths}
    most = max(lengths)
    chances = acceptance_by_distance(packed, 0.0, most)
    prefix = ~np.logical_or.accumulate(packed.wrong[:most], 0)
    return {
        "tokens": int(packed.num_positions),
        "tokens_per_pass": {str(k): walk.tokens_per_deep_pass for k, walk in walks.items()},
        "chance_by_place": [float(chance) for chance in chances],
        "prefix_at_every_anchor": [float(share) for share in prefix.mean(1)] if packed.num_positions else [],
    }


def block_right(drafting: Drafting, batch: Batch, most: int) -> Tensor:
    """[B, most, S]: whether the block whose anchor is that position has the text's token at that place."""
    device = drafting.adapter.device
    tokens, lengths = batch.tokens.to(device), batch.lengths.to(device)
    states, length = drafting.states(tokens), tokens.shape[1]
    found = torch.zeros(len(tokens), most, length, dtype=torch.bool, device=device)
    for start in range(0, length, ANCHORS):
        positions = torch.arange(start, min(start + ANCHORS, length), device=device)
        anchors = positions.expand(len(tokens), -1)
        features = drafting.features(states, tokens, anchors)[:, :, :most]
        best = drafting.teacher.exit_logits(features.flatten(0, 2)).argmax(-1).view(features.shape[:-1])
        _, following, valid = predicted(tokens, anchors, lengths, most)
        right = (drafting.teacher.shortlist[best] == following) & valid
        found[:, :, start : start + len(positions)] = right.transpose(1, 2)
    return found


def head_right(candidate: Candidate, teacher: Teacher, batch: Batch, most: int) -> Tensor:
    """The same for an exit head: the draft of distance j at position t belongs to the anchor t - j + 1."""
    device = teacher.shortlist.device
    tokens, head = batch.tokens.to(device), candidate.head
    states = teacher.run(tokens, layers_of([candidate]))
    features = features_by_distance(head, states.at[candidate.layer], states.fed_to(head), range(1, most + 1))
    num_rows, length = tokens.shape
    following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1)
    valid = torch.arange(1, length + 1, device=device) < batch.lengths[:, None].to(device)
    found = torch.zeros(num_rows, most, length, dtype=torch.bool, device=device)
    for distance in range(1, most + 1):
        best = torch.cat([teacher.exit_logits(rows).argmax(-1) for rows in torch.split(features[distance], ROWS)])
        right = (teacher.shortlist[best].view(num_rows, length) == following) & valid
        found[:, distance - 1, : length - distance + 1] = right[:, distance - 1 :]
    return found


def trace(right: NDArray[np.bool_], sequence: TokenSequence) -> SequenceTrace:
    """Of one sequence, from [places, S] by anchor: rows of a trace are by the position that a draft predicts from. The
    first cycle of a row begins at the first token of its answer, which the prompt's own pass gives."""
    places = len(right)
    first, end = sequence.prompt_len, max(sequence.prompt_len, len(sequence.tokens) - 1)
    agree = np.zeros((places, end - first), np.bool_)
    for place in range(places):
        agree[place, place:] = right[place, first : max(first, end - place)]
    return SequenceTrace(agree, np.ones(agree.shape, np.float32))

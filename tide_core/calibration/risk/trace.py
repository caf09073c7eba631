"""Trace trained candidates over held-out sequences: at every position, agreement with full depth and router score.

Teacher-forced: sequences are the model's own continuations, so every position has the inputs that decoding would have
after drafts that were all right. All computation of a head is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.risk.traces import CandidateTraces, SequenceTrace
from tide_core.calibration.train.candidates import Candidate, layers_of
from tide_core.calibration.train.chain import features_by_distance
from tide_core.calibration.train.teacher import States, Teacher, fast_matmul
from tide_core.exits.artefact.router import confidence_of
from tide_core.models.adapter import ModelAdapter

BATCH_TOKENS = 8192


@torch.no_grad()
def trace_candidates(
    adapter: ModelAdapter,
    candidates: Sequence[Candidate],
    shards: TokenShards,
    shortlist: Tensor,
    max_distance: int,
    *,
    progress: Progress | None = None,
) -> list[CandidateTraces]:
    """Traces of all candidates over all sequences, in file order, at distances 1 to `max_distance`."""
    teacher = Teacher(adapter, shortlist)
    layers = layers_of(candidates)
    traces = [CandidateTraces(each.name, each.layer, each.kind, []) for each in candidates]
    stage_name = f"trace {shards.part}"
    with (
        fast_matmul(adapter.device),
        (progress or SilentProgress()).stage(stage_name, shards.num_sequences, "sequence") as stage,
    ):
        for batch in shards.batches(BATCH_TOKENS, seed=None):
            rows = generated_rows(batch).to(adapter.device)
            states = teacher.run(batch.tokens.to(adapter.device), layers)
            top = teacher.top_tokens(states, rows)
            for candidate, found in zip(candidates, traces, strict=True):
                agree, score = _trace_batch(teacher, candidate, states, rows, top, max_distance)
                found.sequences.extend(_by_sequence(batch, agree, score))
            stage.update(len(batch.lengths))
    return traces


def generated_rows(batch: SequenceBatch) -> Tensor:
    """The rows of the flattened batch that predict a token of a continuation, in order."""
    positions = torch.arange(batch.tokens.shape[1])
    inside = (positions >= batch.prompt_lens[:, None] - 1) & (positions < batch.lengths[:, None] - 1)
    return inside.flatten().nonzero().squeeze(-1)


def _trace_batch(
    teacher: Teacher, candidate: Candidate, states: States, rows: Tensor, top: Tensor, max_distance: int
) -> tuple[Tensor, Tensor]:
    """Agreement and scores [J, N] of one candidate."""
    distances = range(1, max_distance + 1)
    head = candidate.head
    features = features_by_distance(head, states.at[candidate.layer], states.fed_to(head), distances, rows=rows)
    agrees: list[Tensor] = []
    scores: list[Tensor] = []
    for distance in distances:
        if distance > 1 and not head.spec.deep:  # such a head does not depend on the distance
            agrees.append(agrees[0])
            scores.append(scores[0])
            continue
        chosen = features[distance]
        logits = teacher.exit_logits(chosen)
        agrees.append(teacher.shortlist[logits.argmax(-1)] == top)
        scores.append(candidate.router.score(chosen, confidence_of(logits)))
    return torch.stack(agrees), torch.stack(scores)


def _by_sequence(batch: SequenceBatch, agree: Tensor, score: Tensor) -> list[SequenceTrace]:
    ends = np.cumsum((batch.lengths - batch.prompt_lens).numpy())[:-1]
    agrees = np.split(agree.cpu().numpy(), ends, axis=1)
    scores = np.split(score.float().cpu().numpy(), ends, axis=1)
    return [SequenceTrace(a.copy(), s.copy()) for a, s in zip(agrees, scores, strict=True)]

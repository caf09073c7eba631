"""What trained candidates are worth on sequences they have not seen: traces, and a few numbers that traces lack.

Teacher-forced: sequences are the model's own continuations, so that every position is met as decoding would meet it
after drafts that were all right. Everything of a head is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

MOST_LIKELY = 4
DEFAULT_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one part of the data; lists in the order of the candidates."""

    traces: list[CandidateTraces]
    containment: list[tuple[float, ...]]
    """Share of the positions at which the full-depth token is among the head's best 1, 2, 3, 4, at distance 1."""
    coverage: float
    """Share of the full-depth tokens that are in the shortlist."""
    num_tokens: int


def trace(
    adapter: ModelAdapter,
    candidates: Sequence[Candidate],
    shards: TokenShards,
    shortlist: Tensor,
    max_distance: int,
    *,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[CandidateTraces]:
    """Traces of all candidates over all sequences, in file order, at distances 1 to `max_distance`."""
    settings = {"batch_tokens": batch_tokens, "progress": progress}
    return evaluate(adapter, candidates, shards, shortlist, max_distance, **settings).traces  # type: ignore[arg-type]


@torch.no_grad()
def evaluate(
    adapter: ModelAdapter,
    candidates: Sequence[Candidate],
    shards: TokenShards,
    shortlist: Tensor,
    max_distance: int,
    *,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: Progress | None = None,
) -> Evaluation:
    """Traces, containment and coverage in one pass over the part."""
    teacher = Teacher(adapter, shortlist)
    layers = layers_of(candidates)
    traces = [CandidateTraces(each.name, each.layer, each.kind, []) for each in candidates]
    contained = torch.zeros(len(candidates), MOST_LIKELY, dtype=torch.long, device=adapter.device)
    covered = torch.zeros((), dtype=torch.long, device=adapter.device)
    num_tokens = 0
    stage_name = f"trace {shards.part}"
    with (
        fast_matmul(adapter.device),
        (progress or SilentProgress()).stage(stage_name, shards.num_sequences, "sequence") as stage,
    ):
        for batch in shards.batches(batch_tokens, seed=None):
            rows = generated_rows(batch).to(adapter.device)
            states = teacher.run(batch.tokens.to(adapter.device), layers)
            top = teacher.top_tokens(states, rows)
            covered += torch.isin(top, teacher.shortlist).sum()
            num_tokens += len(rows)
            for index, candidate in enumerate(candidates):
                agree, score, hits = _look(teacher, candidate, states, rows, top, max_distance)
                contained[index] += hits
                traces[index].sequences.extend(_by_sequence(batch, agree, score))
            stage.update(len(batch.lengths))
    shares = (contained.double() / max(1, num_tokens)).tolist()
    return Evaluation(traces, [tuple(share) for share in shares], int(covered) / max(1, num_tokens), num_tokens)


def generated_rows(batch: SequenceBatch) -> Tensor:
    """The rows of the flattened batch that predict a token of a continuation, in order."""
    positions = torch.arange(batch.tokens.shape[1])
    inside = (positions >= batch.prompt_lens[:, None] - 1) & (positions < batch.lengths[:, None] - 1)
    return inside.flatten().nonzero().squeeze(-1)


def _look(
    teacher: Teacher, candidate: Candidate, states: States, rows: Tensor, top: Tensor, max_distance: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Agreement and scores [J, N] of one candidate, and how often its best 1, 2, ... hold the full-depth token."""
    distances = range(1, max_distance + 1)
    head = candidate.head
    features = features_by_distance(head, states.at[candidate.layer], states.fed_to(head), distances)
    agrees: list[Tensor] = []
    scores: list[Tensor] = []
    hits = torch.zeros(MOST_LIKELY, dtype=torch.long, device=rows.device)
    for distance in distances:
        if distance > 1 and not candidate.head.spec.deep:  # knows no distance
            agrees.append(agrees[0])
            scores.append(scores[0])
            continue
        chosen = features[distance].index_select(0, rows)
        logits = teacher.exit_logits(chosen)
        agrees.append(teacher.shortlist[logits.argmax(-1)] == top)
        scores.append(candidate.router.score(chosen, confidence_of(logits)))
        if distance == 1:
            best = teacher.shortlist[logits.topk(min(MOST_LIKELY, logits.shape[-1])).indices]
            found = (best == top.unsqueeze(-1)).cumsum(-1).sum(0)
            hits[: len(found)] = found
    return torch.stack(agrees), torch.stack(scores), hits


def _by_sequence(batch: SequenceBatch, agree: Tensor, score: Tensor) -> list[SequenceTrace]:
    ends = np.cumsum((batch.lengths - batch.prompt_lens).numpy())[:-1]
    agrees = np.split(agree.cpu().numpy(), ends, axis=1)
    scores = np.split(score.float().cpu().numpy(), ends, axis=1)
    return [SequenceTrace(a.copy(), s.copy()) for a, s in zip(agrees, scores, strict=True)]

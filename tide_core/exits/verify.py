"""Verification of drafts against full depth on the plain path: which agree, and which tokens a row emits.

Greedy rows: full depth agrees with a draft that equals its token, after penalties and masks. Sampled rows: it agrees
with draft x with probability min(1, p(x) / q(x)), where full depth and the exit draw from p and q after all filters; a
rejected draft is replaced by a draw from what p has more than q. A suffix draft has a q of 1. The tokens then have
exactly the distribution p (Leviathan et al., 2023; Chen et al., 2023). Where a greedy row of mode bounded differs, the
gap of the draft is how much larger the logit of full depth's token is. `accept` decides what is kept. In mode fast each
draft leaves: it is emitted, and no deep layer sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch

from tide_core.batch import DraftCounts, RowResult, TokenResult
from tide_core.exits.accept import Compared, accept
from tide_core.exits.row_cycle import FROM_SUFFIX, Draft, RowCycle
from tide_core.outputs.exit_stats import FROM_TEXT
from tide_core.request import Audit
from tide_core.sampling.adjust import adjusted, needs_adjusting
from tide_core.sampling.draw import ACCEPT_STREAM, RESIDUAL_STREAM, draw, uniform
from tide_core.sampling.rows import SampledToken, SamplingRow
from tide_core.sampling.sampler import probabilities_of, sample, with_logprobs


@dataclass(frozen=True, slots=True)
class Target:
    """What full depth would draw from after one token."""

    probabilities: torch.Tensor
    """[V] float64"""
    row: SamplingRow
    error: str | None = None


@dataclass(frozen=True, slots=True)
class FullDepth:
    """Full depth after one token: a choice, or a distribution that a sampled draft is compared with."""

    logits: torch.Tensor
    chosen: SampledToken | None = None
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether full depth agrees with one draft."""

    agrees: bool
    instead: SampledToken
    """The token to emit if the draft is dropped."""
    gap: float = inf
    """By how many nats that token is likelier, where a budget asks for it."""


class Verifier:
    """Turns the logits of a deep pass into the tokens of each row."""

    def __init__(self, layers_of_checkpoints: Sequence[int], num_layers: int) -> None:
        self._layers = tuple(layers_of_checkpoints)
        self._num_layers = num_layers

    def verify(
        self, rows: Sequence[RowCycle], wanted: Sequence[Sequence[int]], logits: torch.Tensor
    ) -> list[RowResult]:
        """`wanted[r]` are the tokens of row r whose full-depth logits are in `logits`, [sum, V], in that order."""
        where = [(r, token) for r, tokens in enumerate(wanted) for token in tokens]
        # Sampled drafts are verified by the rejection rule; everything else is a plain choice at full depth.
        drawn = [i for i, (r, token) in enumerate(where) if _sampled_draft(rows[r], token) is not None]
        found: list[FullDepth] = [FullDepth(logits[i]) for i in range(len(where))]
        for i, target in zip(drawn, self._targets(rows, [where[i] for i in drawn], logits, drawn), strict=True):
            found[i] = FullDepth(logits[i], target=target)
        plain = [i for i in range(len(where)) if found[i].target is None]
        if plain:
            sampling = [rows[r].sampling_row(token) for r, token in (where[i] for i in plain)]
            chosen = sample(logits if len(plain) == len(where) else logits[plain], sampling)
            for i, choice in zip(plain, chosen, strict=True):
                found[i] = FullDepth(logits[i], choice)
        by_row: list[dict[int, FullDepth]] = [{} for _ in rows]
        for (r, token), deep in zip(where, found, strict=True):
            by_row[r][token] = deep
        return [self._row(row, deep) for row, deep in zip(rows, by_row, strict=True)]

    def _targets(
        self, rows: Sequence[RowCycle], places: Sequence[tuple[int, int]], logits: torch.Tensor, drawn: Sequence[int]
    ) -> list[Target]:
        """What full depth would draw from after each token that a sampled draft follows."""
        if not drawn:
            return []
        sampling = [rows[r].sampling_row(token) for r, token in places]
        probabilities, errors = probabilities_of(logits[list(drawn)], sampling)
        return [Target(probabilities[n], row, errors.get(n)) for n, row in enumerate(sampling)]

    def _row(self, row: RowCycle, deep: dict[int, FullDepth]) -> RowResult:
        """The tokens of a row: its accepted drafts, then the token that full depth adds or puts in place of a draft."""
        verdicts: list[Verdict | None] = []
        step = row.step
        gaps = accept(self._compared(row, deep, verdicts), step.policy.budget, len(step.output_ids), step.num_differing)
        accepted = len(gaps)
        tokens = [
            self._unaudited(row, position, draft)
            if verdict is None
            else self._accepted(row, position, draft, deep[position].logits, agrees=verdict.agrees, gap=gap)
            for position, (draft, verdict, gap) in enumerate(zip(row.drafts, verdicts, gaps, strict=False))
        ]
        if accepted < len(row.drafts):
            rejected = verdicts[accepted]
            assert rejected is not None
            following: SampledToken = rejected.instead
            score: float | None = row.drafts[accepted].score
        elif not row.step.samples:
            return self._result(row, tokens, accepted=accepted)
        else:
            chosen = deep[len(row.tokens) - 1].chosen
            assert chosen is not None
            following, score = chosen, row.last_score
        if following.error is not None:
            return self._failed(row, tokens, following.error)
        return self._result(row, [*tokens, self._full_depth(following, score)], accepted=accepted)

    def _compared(
        self, row: RowCycle, deep: dict[int, FullDepth], verdicts: list[Verdict | None]
    ) -> Iterator[Compared]:
        """Drafts as `accept` takes them; the verdict of each that is looked at is kept, None where no deep layer
        ran."""
        policy = row.step.policy
        for position, draft in enumerate(row.drafts):
            if draft.score is None:  # nothing scores a suffix draft
                score, min_score = 0.0, -inf
            else:
                score, min_score = draft.score, policy.draft_thresholds[draft.checkpoint]
            if position not in deep:
                verdicts.append(None)
                yield Compared(score, True, min_score=min_score)
                continue
            verdict = agreement(draft, deep[position], row, position)
            verdicts.append(verdict)
            if verdict.instead.error is not None:
                min_score = inf  # nothing is known of this draft or of those after it
            yield Compared(score, verdict.agrees, verdict.gap, min_score)

    def _failed(self, row: RowCycle, tokens: Sequence[TokenResult], error: str) -> RowResult:
        """Tokens decided before the failure are kept: the text may end with them. If not, the next step fails too."""
        if not tokens:
            return self._result(row, (), error=error)
        return self._result(row, tokens, accepted=len(tokens), still_to_run=1)

    def _accepted(
        self, row: RowCycle, position: int, draft: Draft, logits: torch.Tensor, *, agrees: bool, gap: float | None
    ) -> TokenResult:
        audit = Audit.VERIFIED if agrees else Audit.DISAGREED
        token = with_logprobs(logits, row.sampling_row(position), draft.token_id)
        return self._exit(draft, token, audit, gap)

    def _unaudited(self, row: RowCycle, position: int, draft: Draft) -> TokenResult:
        token = SampledToken(draft.token_id)
        if draft.logits is not None:
            token = with_logprobs(draft.logits, row.sampling_row(position), draft.token_id)
        return self._exit(draft, token, Audit.UNAUDITED)

    def _exit(self, draft: Draft, token: SampledToken, audit: Audit, gap: float | None = None) -> TokenResult:
        layer = FROM_TEXT if draft.checkpoint == FROM_SUFFIX else self._layers[draft.checkpoint]
        return TokenResult(draft.token_id, layer, token.logprob, token.top_logprobs, draft.score, audit, gap)

    def _full_depth(self, token: SampledToken, score: float | None) -> TokenResult:
        return TokenResult(token.token_id, self._num_layers, token.logprob, token.top_logprobs, score)

    def _result(
        self,
        row: RowCycle,
        tokens: Sequence[TokenResult],
        *,
        accepted: int = 0,
        still_to_run: int = 0,
        error: str | None = None,
    ) -> RowResult:
        return RowResult.of(
            tokens,
            num_valid=len(row.step.token_ids) + accepted - still_to_run,
            layers_run=row.layers_run,
            counts=(
                DraftCounts(len(row.drafts), accepted, row.non_finite, row.step.num_drafts, row.has_suffix_drafts),
            ),
            error=error,
        )


def _sampled_draft(row: RowCycle, token: int) -> Draft | None:
    """The draft that follows a token of the row, if there is one and the row is sampled."""
    draft = row.drafts[token] if token < len(row.drafts) else None
    return None if draft is None or row.step.request.params.is_greedy else draft


def agreement(draft: Draft, deep: FullDepth, row: RowCycle, position: int) -> Verdict:
    """The verdict on the draft at a position of its row."""
    if deep.target is not None:
        return rejects(draft, deep.logits, deep.target)
    chosen = deep.chosen
    assert chosen is not None
    if chosen.token_id == draft.token_id or row.step.policy.budget is None or chosen.error is not None:
        return Verdict(chosen.token_id == draft.token_id, chosen)
    sampling, logits = row.sampling_row(position), deep.logits
    if needs_adjusting(sampling):
        [logits] = adjusted(logits.float().unsqueeze(0), [sampling])
    likelier, drafted = (logits[token_id].float() for token_id in (chosen.token_id, draft.token_id))
    return Verdict(False, chosen, float(likelier - drafted))  # both log-probabilities have the same normaliser


def rejects(draft: Draft, logits: torch.Tensor, target: Target) -> Verdict:
    """The rejection rule for one sampled draft, with random numbers of its own for this step of the row."""
    if target.error is not None:
        return Verdict(False, SampledToken(-1, error=target.error))
    row, step = target.row, len(target.row.output_ids)
    p, q = float(target.probabilities[draft.token_id]), 1.0
    if draft.probabilities is not None:
        q = float(draft.probabilities[draft.token_id])
    if uniform(row.seed, step, ACCEPT_STREAM) * q < p:
        return Verdict(True, SampledToken(draft.token_id))
    if draft.probabilities is None:
        rest = target.probabilities.clone()
        rest[draft.token_id] = 0.0
    else:
        rest = (target.probabilities - draft.probabilities).clamp_(min=0.0)
    most = float(rest.max())
    if most <= 0.0:  # q covers p up to rounding, so the draft is as good as any
        return Verdict(True, SampledToken(draft.token_id))
    weights = (rest / most * 2.0 ** (62 - len(rest).bit_length())).long()
    token_id = int(draw(weights.unsqueeze(0), [uniform(row.seed, step, RESIDUAL_STREAM)])[0])
    return Verdict(False, with_logprobs(logits, row, token_id))

"""The draft loop of the plain path: tokens proposed at the exits, one shallow pass after another.

In each round the newest token of every row that still drafts runs up to the first exit. If the router's score reaches
the row's threshold there, the exit's token becomes the row's next token. If not, the token runs on to the next exit at
which the row may leave, together with all that is pending, where its policy has a deeper one (`last_exit`). A row whose
token exits nowhere waits for the deep pass. No decision depends on another row.

Prompt tokens exit too, in mode fast only (`exit_prompts`). A prompt is compute-bound, so every token that skips the
deep layers saves its share of them. A chunk runs up to the first checkpoint and the head scores each of its tokens
(without a deep state: none is known yet for a chunk); those whose score reaches the threshold stop there. The last
token of a prompt never exits: the next token is sampled from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_core.execution.depth_loop import DepthLoop, Ran
from tide_core.exits.accept import counts
from tide_core.exits.propose import Exits, Proposal
from tide_core.exits.row_cycle import Draft, RowCycle
from tide_core.sampling.adjust import needs_adjusting
from tide_core.sampling.draw import DRAFT_STREAM
from tide_core.sampling.sampler import sample_with_chances


@dataclass(slots=True)
class DraftedToken:
    """A token chosen at an exit."""

    token_id: int
    probabilities: torch.Tensor | None = None
    """What it was drawn from, [V] float64; None when greedy."""
    logits: torch.Tensor | None = None
    """[V]; only where log-probabilities will be asked of them."""


class Drafter:
    """Drafts for all rows that may."""

    def __init__(self, depth: DepthLoop, exits: Exits, *, vocab_size: int) -> None:
        self._depth = depth
        self._exits = exits
        self._vocab_size = vocab_size

    def draft(self, rows: Sequence[RowCycle]) -> None:
        """Let the rows draft until each has stopped or has as many drafts as its step allows."""
        while active := [row for row in rows if not row.stopped and len(row.drafts) < row.step.num_drafts]:
            for index in range(self._exits.num_exits):
                ran = self._depth.run(active, index, index + 1)
                staying = self._draft_at(index, active, ran)
                active = [row for row in staying if row.step.policy.last_exit > index]
                for row in staying:
                    row.stopped = row.step.policy.last_exit <= index
                if not active:
                    break

    def exit_prompts(self, rows: Sequence[RowCycle]) -> None:
        """Let prompt tokens of rows in mode fast exit at the first checkpoint, unless their log-probabilities are asked
        for."""
        prompts = [
            row
            for row in rows
            if row.step.policy.skips_layers
            and row.tracked
            and len(row.step.token_ids) > 1
            and row.step.request.params.prompt_logprobs is None
        ]
        if not prompts:
            return
        self._depth.run(prompts, 0, 1)
        parts = [(row, (0, len(row.tokens))) for row in prompts]
        states = torch.cat([states for row, tokens in parts for states in row.take(0, tokens)])
        proposal = self._exits.propose(0, parts, self._depth.view(parts), states, each=True)
        places = [(row, token) for row in prompts for token in range(len(row.tokens))]
        leaving = [
            index
            for index, (row, token) in enumerate(places)
            if token < len(row.tokens) - 1 and counts(proposal.scores[index], row.step.policy.draft_thresholds[0])
        ]
        for index in leaving:
            row, token = places[index]
            row.left_at[token] = 0
        self._keep_codes(0, [places[index] for index in leaving], states[leaving], proposal.features[leaving])

    def _keep_codes(
        self, index: int, places: Sequence[tuple[RowCycle, int]], states: torch.Tensor, features: torch.Tensor
    ) -> None:
        """What the skip map of an exit makes of tokens that leave there, from their states and features [T, D]."""
        if self._exits.skip_maps and places:
            codes = self._exits.skip_maps[index].code(states, features)
            for (row, token), code in zip(places, torch.split(codes, 1), strict=True):
                row.codes[token] = code

    def _draft_at(self, index: int, rows: list[RowCycle], ran: Ran) -> list[RowCycle]:
        """Draft what the exit proposes for rows that have run up to it; returns the rows whose token does not leave."""
        feeds = bool(self._exits.fast)  # the next exit, whether the row may leave here or not
        asked = [row for row in rows if row.step.policy.asks(index, feeds=feeds)]
        if not asked:
            return rows
        if index >= len(self._exits.checkpoints):
            newest = [row.take(index, (len(row.tokens) - 1, len(row.tokens)))[0] for row in asked]
            before = [row.features for row in asked if row.features is not None]
            proposal = self._exits.refine(index, torch.cat(newest), torch.cat(before))
        else:
            parts = [(row, (row.headed[index], len(row.tokens))) for row in asked]
            if parts == ran.parts and ran.view is not None:
                view, states = ran.view, ran.states
            else:  # the head has not run yet on tokens that reached this checkpoint before
                view = self._depth.view(parts)
                states = torch.cat([states for row, tokens in parts for states in row.take(index, tokens)])
            proposal = self._exits.propose(index, parts, view, states)
        staying = self._draft_from(index, asked, proposal)
        gone = {id(row) for row in asked} - {id(row) for row in staying}
        return [row for row in rows if id(row) not in gone]

    def _draft_from(self, exit_index: int, asked: Sequence[RowCycle], proposal: Proposal) -> list[RowCycle]:
        """Draft what is proposed where the score allows it; returns the rows that do not draft."""
        scores, best_ids = proposal.scores, proposal.best_ids
        leaving: list[int] = []
        for index, row in enumerate(asked):
            row.headed[exit_index] = len(row.tokens)
            row.last_score = scores[index]
            if row.step.policy.last_exit > exit_index:
                row.features = proposal.features[index : index + 1]
            if counts(scores[index], row.step.policy.draft_thresholds[exit_index]):
                leaving.append(index)
            elif not math.isfinite(scores[index]):
                row.non_finite += 1
        choices = self._choose([asked[i] for i in leaving], [best_ids[i] for i in leaving], proposal.logits, leaving)
        gone = set()
        for index, choice in zip(leaving, choices, strict=True):
            if choice is not None:
                self._take(asked[index], exit_index, scores[index], choice)
                gone.add(index)
        skipping = [index for index in sorted(gone) if asked[index].step.policy.skips_layers]
        if skipping and self._exits.skip_maps:
            places = [(asked[index], len(asked[index].tokens) - 2) for index in skipping]
            at_exit = torch.cat([s for row, token in places for s in row.take(exit_index, (token, token + 1))])
            self._keep_codes(exit_index, places, at_exit, proposal.features[skipping])
        return [row for index, row in enumerate(asked) if index not in gone]

    def _choose(
        self, rows: Sequence[RowCycle], best_ids: Sequence[int], logits: torch.Tensor, where: Sequence[int]
    ) -> list[DraftedToken | None]:
        """The exits' tokens after the rows' sampling parameters; None where these leave nothing to choose.

        `where`: the rows of the logits [T, S] that are theirs."""
        sampling = [
            row.sampling_row(len(row.tokens) - 1, stream=DRAFT_STREAM, distance=len(row.drafts)) for row in rows
        ]
        choices: list[DraftedToken | None] = [DraftedToken(best_id) for best_id in best_ids]
        worked = [n for n, row in enumerate(sampling) if not row.params.is_greedy or needs_adjusting(row)]
        if worked:
            wide = self._widened(logits[[where[n] for n in worked]])
            tokens = sample_with_chances(wide, [sampling[n] for n in worked])
            for n, (token, chances) in zip(worked, tokens, strict=True):
                choices[n] = None if token.error is not None else DraftedToken(token.token_id, chances)
        for n, (row, choice) in enumerate(zip(rows, choices, strict=True)):
            wants_logits = row.step.request.params.logprobs is not None and row.step.policy.skips_layers
            if choice is not None and wants_logits:
                choice.logits = self._widened(logits[[where[n]]])[0]
        return choices

    def _take(self, row: RowCycle, checkpoint: int, score: float, choice: DraftedToken) -> None:
        newest = len(row.tokens) - 1
        draft = Draft(choice.token_id, checkpoint, score, choice.probabilities, choice.logits)
        if row.step.policy.skips_layers:
            row.left_at[newest] = checkpoint
        row.drafts.append(draft)
        row.tokens.append(draft.token_id)
        row.last_score = None
        row.stopped = draft.token_id in row.step.request.end_ids

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the shortlist, [T, S], as logits over the vocabulary, [T, V] float32; -inf outside the
        shortlist."""
        wide = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=torch.float32, device=logits.device)
        wide[:, self._exits.shortlist] = logits.float()
        return wide

"""The ops of exits, of cycles in CUDA graphs, and of rows with a temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.shapes import BOTTLENECK, Shape
from benchmarks.kernels.layers import BLOCK, EPS, Calls, Inputs
from tide_core.kernels.reference import adjust as adjust_plan
from tide_core.kernels.reference import branches as branching
from tide_core.kernels.reference import cycle as cycle_plan
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.draw import DrawnCycle
from tide_core.kernels.reference.ops import RouterWeights, Top2

DRAFTS, DRAWN_DRAFTS, LOGPROBS = 4, 3, 5
SETTINGS = (0.8, 0.0, 0.95, 0.0, -torch.inf)
"""Of every row: temperature, top-k, top-p, min-p, least score."""


class ExitOps(Inputs):
    """Each method makes one op at one size."""

    def _top2(self, shape: Shape, rows: int) -> Calls:
        logits = self._randn(rows, shape.vocabulary, scale=3.0)
        scratch = self.kernels.score_scratch(self.device, rows, vocabulary=shape.vocabulary)
        return Calls(
            lambda i: _values(self.kernels.top2_logsumexp(logits, scratch)),
            lambda i: _values(reference.top2_logsumexp(logits)),
            self._bytes(logits.numel()),
        )

    def _router(self, shape: Shape, rows: int) -> Calls:
        """Norm and router."""
        features, weights = self._randn(rows, shape.hidden), self._router_weights(shape)
        top2 = reference.top2_logsumexp(self._randn(rows, shape.shortlist, scale=3.0))
        scratch = self.kernels.score_scratch(self.device, rows, vocabulary=shape.shortlist, bottleneck=BOTTLENECK)
        return Calls(
            lambda i: self.kernels.router(features, top2, weights, scratch=scratch),
            lambda i: reference.router(features, top2, weights),
            self._bytes(features.numel()) + 4 * weights.down.numel(),
        )

    def _scatter_rows(self, shape: Shape, rows: int) -> Calls:
        x, index = self._randn(rows, shape.hidden), self._slots(rows)
        ours, plain = (torch.zeros(4 * rows, shape.hidden, dtype=self.dtype, device=self.device) for _ in range(2))

        def scatter(op: Any, out: Tensor) -> Tensor:
            op(x, index, out)
            return out

        return Calls(
            lambda i: scatter(self.kernels.scatter_rows, ours),
            lambda i: scatter(reference.scatter_rows, plain),
            self._bytes(2 * x.numel()),
            graph_reference=False,
        )

    def _exit_input(self, shape: Shape, rows: int) -> Calls:
        states, slots = self._randn(rows, shape.hidden), self._slots(rows)
        deep = self._randn(4 * rows, shape.hidden)
        norms = [self._randn(shape.hidden) for _ in range(2)]
        distances = torch.arange(rows, device=self.device) % (DRAFTS + 2)
        table = self._randn(DRAFTS + 1, 2 * shape.hidden)
        inputs = states, norms[0], deep, slots, norms[1], distances, table, EPS
        return Calls(
            lambda i: self.kernels.exit_input(*inputs),
            lambda i: reference.exit_input(*inputs),
            self._bytes((4 * rows + 2) * shape.hidden),
        )

    def _embed(self, shape: Shape, rows: int) -> Calls:
        table = self._randn(shape.vocabulary, shape.hidden)
        ids = torch.randint(0, shape.vocabulary, (rows,), device=self.device)
        num_bytes = self._bytes(2 * rows * shape.hidden)
        return Calls(lambda i: self.kernels.embed(ids, table), lambda i: reference.embed(ids, table), num_bytes)

    def _plan_cycle(self, shape: Shape, rows: int) -> Calls:
        """The indices of a cycle in which every row makes `DRAFTS` drafts."""
        blocks = -(-(shape.context + DRAFTS + 1) // BLOCK)
        row_meta = self._decoding_rows(shape, rows)[0][: cycle_plan.NUM_PLANNED]
        tables = torch.arange(rows * blocks, dtype=torch.int32, device=self.device).view(rows, blocks)
        next_state = torch.zeros((3, cycle_plan.MOST_ROWS), dtype=torch.int32, device=self.device)
        wide, narrow = cycle_plan.sizes(rows, DRAFTS)

        def buffers() -> tuple[Tensor, Tensor]:
            long, short = torch.int64, torch.int32
            return torch.zeros(wide, dtype=long, device=self.device), torch.zeros(
                narrow, dtype=short, device=self.device
            )

        def plan(op: Any, into: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            op(row_meta, next_state, tables, BLOCK, DRAFTS, *into)
            return into

        ours, plain = buffers(), buffers()
        return Calls(
            lambda i: plan(self.kernels.plan_cycle, ours),
            lambda i: plan(cycle_plan.plan_cycle, plain),
            4 * (row_meta.numel() + tables.numel() + narrow) + 8 * wide,
            graph_reference=False,
        )

    def _decoding_rows(self, shape: Shape, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Metadata of rows with drafts, logit adjustments and log-probabilities; starts, positions, and drafts."""
        tokens, none = rows * (DRAFTS + 1), int(torch.tensor(-math.inf).view(torch.int32))
        end = shape.context + 2 * (DRAFTS + 1)
        facts = [1, shape.context, DRAFTS, 1, end, none, shape.context // 2, 0, LOGPROBS, 0, 0, 0, 0]
        row_meta = torch.tensor(facts, dtype=torch.int32, device=self.device)[:, None].repeat(1, rows)
        row_meta[cycle_plan.ADJUST_SLOT] = torch.arange(rows, device=self.device)
        starts = torch.arange(0, tokens + 1, DRAFTS + 1, dtype=torch.int32, device=self.device)
        positions = shape.context + torch.arange(tokens, device=self.device) % (DRAFTS + 1)
        return row_meta, starts, positions, torch.randint(0, 2, (DRAFTS, rows), device=self.device)

    def _accept_drafts(self, shape: Shape, rows: int) -> Calls:
        """The next state of rows of which some drafts are accepted."""
        row_meta, starts, positions, drafted = self._decoding_rows(shape, rows)
        counting, scores = row_meta[cycle_plan.DRAFTS], torch.rand(DRAFTS, rows, device=self.device)
        following = torch.randint(0, 2, (len(positions),), device=self.device)
        logits = self._randn(len(positions), shape.vocabulary)
        gaps = torch.zeros(len(positions), device=self.device)
        device_state = torch.zeros((3, cycle_plan.MOST_ROWS), dtype=torch.int32, device=self.device)
        ours, plain = (torch.zeros((2, rows), dtype=torch.int64, device=self.device) for _ in range(2))

        def accept(op: Any, into: Tensor) -> Tensor:
            of_drafts = drafted, scores, following, logits, gaps
            op(row_meta, counting, starts, positions, *of_drafts, 1, device_state, into)
            return into

        return Calls(
            lambda i: accept(self.kernels.accept_drafts, ours),
            lambda i: accept(cycle_plan.accept_drafts, plain),
            4 * (row_meta.numel() + starts.numel() + scores.numel() + 3 * rows) + 8 * (2 * len(positions) + 4 * rows),
            graph_reference=False,
        )

    def _top_logprobs(self, shape: Shape, rows: int) -> Calls:
        """The likeliest tokens after every token of a deep pass."""
        row_meta, starts, positions, _ = self._decoding_rows(shape, rows)
        logits, tokens = self._randn(len(positions), shape.vocabulary, scale=3.0), len(positions)
        following = torch.randint(0, shape.vocabulary, (tokens,), device=self.device)
        given = logits, self._sources(rows), starts, row_meta, following

        def buffers() -> tuple[Tensor, Tensor, Tensor]:
            ids = torch.zeros(tokens, LOGPROBS, dtype=torch.int64, device=self.device)
            return ids, torch.zeros(tokens, LOGPROBS, device=self.device), torch.zeros(tokens, device=self.device)

        def run(op: Any, into: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            op(*given, *into)
            return into[1:]

        ours, plain = buffers(), buffers()
        return Calls(
            lambda i: run(self.kernels.top_logprobs, ours),
            lambda i: run(cycle_plan.top_logprobs, plain),
            self._bytes(logits.numel()),
            graph_reference=False,
        )

    def _sources(self, rows: int) -> Tensor:
        """Index of each token of a deep pass among newest tokens and drafts."""
        every = torch.arange(rows * (DRAFTS + 1), device=self.device)
        return every % (DRAFTS + 1) * rows + every // (DRAFTS + 1)

    def _draw_numbers(self, shape: Shape, rows: int) -> Calls:
        """The random numbers of sampled rows."""
        row_meta, starts, positions, _ = self._decoding_rows(shape, rows)
        keys = torch.randint(-(2**62), 2**62, (draw_plan.NUM_STREAMS, rows), device=self.device)
        size = draw_plan.NUM_STREAMS, DRAFTS + 1, rows
        ours, plain = (torch.zeros(size, dtype=torch.float64, device=self.device) for _ in range(2))

        def draw(op: Any, into: Tensor) -> Tensor:
            op(keys, starts, positions, row_meta, into)
            return into

        return Calls(
            lambda i: draw(self.kernels.draw_numbers, ours),
            lambda i: draw(draw_plan.draw_numbers, plain),
            8 * (keys.numel() + ours.numel()),
            graph_reference=False,
        )

    def _adjust_state(self, shape: Shape, rows: int) -> adjust_plan.AdjustState:
        counts = torch.randint(0, 3, (rows, shape.vocabulary), device=self.device).short()
        penalties = torch.tensor([1.1, 0.5, 0.25], dtype=torch.float64, device=self.device)[:, None].repeat(1, rows)
        entries = torch.full((rows, 8), -1, dtype=torch.int32, device=self.device)
        entries[:, 0] = 7
        always = torch.full_like(entries, 2**31 - 1)
        return adjust_plan.AdjustState(counts, penalties, entries, torch.ones(rows, 8, device=self.device), always)

    def _adjust_logits(self, shape: Shape, rows: int) -> Calls:
        """Bias and penalties of every row of a deep pass."""
        row_meta, starts, positions, drafted = self._decoding_rows(shape, rows)
        logits = self._randn(len(positions), shape.vocabulary)
        given = logits, None, self._sources(rows), starts, positions, drafted, row_meta
        state = self._adjust_state(shape, rows)
        ours, plain = (torch.empty(logits.shape, device=self.device) for _ in range(2))

        def run(op: Any, into: Tensor) -> Tensor:
            op(*given, state, into)
            return into

        return Calls(
            lambda i: run(self.kernels.adjust_logits, ours),
            lambda i: run(adjust_plan.adjust_logits, plain),
            logits.numel() * (logits.element_size() + 2 + 4),
            graph_reference=False,
        )

    def _count_outputs(self, shape: Shape, rows: int) -> Calls:
        """The tokens of a cycle, counted for penalties."""
        row_meta, starts, positions, _ = self._decoding_rows(shape, rows)
        following = torch.randint(0, shape.vocabulary, (len(positions),), device=self.device)
        next_state = torch.zeros((2, rows), dtype=torch.int64, device=self.device)
        next_state[1] = shape.context + DRAFTS + 1
        ours, plain = (torch.zeros(rows, shape.vocabulary, dtype=torch.int16, device=self.device) for _ in range(2))

        def count(op: Any, into: Tensor) -> Tensor:
            op(row_meta, starts, positions, following, next_state, into.zero_())
            return into

        return Calls(
            lambda i: count(self.kernels.count_outputs, ours),
            lambda i: count(adjust_plan.count_outputs, plain),
            2 * ours.numel(),
            graph_reference=False,
        )

    def _pending_tokens(self, shape: Shape, rows: int) -> Calls:
        """From the drafts of a cycle to the tokens of its deep pass."""
        newest = torch.randint(0, shape.vocabulary, (rows,), device=self.device)
        places = torch.randint(0, shape.shortlist, (DRAFTS, rows), device=self.device)
        shortlist = torch.arange(shape.shortlist, device=self.device)
        sources = torch.arange(rows * (DRAFTS + 1), device=self.device)
        ours, plain = ((torch.zeros_like(places), torch.zeros_like(sources)) for _ in range(2))

        def tokens(op: Any, into: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            op(newest, places, shortlist, sources, *into)
            return into

        return Calls(
            lambda i: tokens(self.kernels.pending_tokens, ours),
            lambda i: tokens(cycle_plan.pending_tokens, plain),
            8 * (newest.numel() + 3 * places.numel() + 3 * sources.numel()),
        )

    def _nth_best(self, shape: Shape, rows: int) -> Calls:
        """For branches that take the first four tokens."""
        logits = self._randn(rows, shape.shortlist, scale=3.0)
        ranks = torch.arange(rows, dtype=torch.int32, device=self.device) % 4

        def chosen(op: Any) -> Tensor:  # compare logits: of equal ones any may be chosen
            return logits.gather(-1, op(logits, ranks).unsqueeze(-1))

        return Calls(
            lambda i: chosen(self.kernels.nth_best),
            lambda i: chosen(branching.nth_best),
            self._bytes(logits.numel()),
        )

    def _copy_slots(self, shape: Shape, rows: int) -> Calls:
        """One slot of each row, in the pools of one layer."""
        ours, plain = (list(self._pools(shape, 2 * rows)) for _ in range(2))
        half = len(ours[0]) * BLOCK // 2
        source = torch.arange(rows, dtype=torch.int32, device=self.device)
        target = source + half

        def copy(copier: Any, pools: list[Tensor]) -> list[Tensor]:
            copier(source, target)
            return pools

        copiers = self.kernels.slot_copier(ours, BLOCK), branching.slot_copier(plain, BLOCK)
        return Calls(
            lambda i: copy(copiers[0], ours),
            lambda i: copy(copiers[1], plain),
            self._bytes(2 * rows * 2 * shape.kv_heads * shape.head_dim),
            graph_reference=False,
        )

    def _router_weights(self, shape: Shape) -> RouterWeights:
        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=self.device) * 0.02

        down = draw(BOTTLENECK, shape.hidden + 2)
        return RouterWeights(1 + draw(shape.hidden), down, draw(BOTTLENECK), draw(BOTTLENECK), draw(1), EPS)


def _values(top2: Top2) -> tuple[Tensor, Tensor, Tensor]:
    """Without the index of the best: of equal logits any may be chosen."""
    return top2.best, top2.second, top2.sum


class DrawOps(Inputs):
    """Each method makes one op at one size."""

    def _draw(self, shape: Shape, rows: int) -> Calls:
        """Over the shortlist."""
        logits = self._randn(rows, shape.shortlist, scale=3.0)
        settings, numbers = self._settings(rows), self._numbers(rows)
        return Calls(
            lambda i: self.kernels.draw(logits, settings, numbers, shape.vocabulary)[0],
            lambda i: draw_plan.draw(logits, settings, numbers, shape.vocabulary)[0],
            self._bytes(logits.numel()),
            graph_reference=False,
        )

    def _verify_drawn(self, shape: Shape, rows: int) -> Calls:
        """All drafts of `rows` rows."""
        num_tokens = rows * (DRAWN_DRAFTS + 1)
        logits = self._randn(num_tokens, shape.vocabulary, scale=3.0)
        cycle = self._cycle(shape, rows)
        return Calls(
            lambda i: self.kernels.verify_drawn(logits, cycle),
            lambda i: draw_plan.verify_drawn(logits, cycle),
            self._bytes(logits.numel()),
            graph_reference=False,
        )

    def _cycle(self, shape: Shape, rows: int) -> DrawnCycle:
        settings = self._settings(rows)
        shortlist = torch.arange(shape.shortlist, device=self.device) * (shape.vocabulary // shape.shortlist)
        shallow = self._randn(DRAWN_DRAFTS, rows, shape.shortlist, scale=3.0)
        made = [draw_plan.draw(some, settings, self._numbers(rows), shape.vocabulary) for some in shallow]
        places, heads = (torch.stack(some) for some in zip(*made, strict=True))
        sources = torch.arange((DRAWN_DRAFTS + 1) * rows, device=self.device).view(DRAWN_DRAFTS + 1, rows).T.reshape(-1)
        return DrawnCycle(
            sources.contiguous(),
            torch.tensor([len(sources)], dtype=torch.int32, device=self.device),
            torch.full((rows,), DRAWN_DRAFTS, dtype=torch.int32, device=self.device),
            settings,
            self._numbers(DRAWN_DRAFTS + 1, rows),
            self._numbers(DRAWN_DRAFTS, rows),
            self._numbers(DRAWN_DRAFTS, rows),
            torch.full((DRAWN_DRAFTS, rows), 0.5, device=self.device),
            shortlist[places],
            shallow,
            heads,
            draw_plan.places_of(shortlist, shape.vocabulary),
        )

    def _settings(self, rows: int) -> Tensor:
        settings = torch.tensor(SETTINGS, dtype=torch.float64, device=self.device)
        return settings.unsqueeze(-1).repeat(1, rows)

    def _numbers(self, *size: int) -> Tensor:
        return torch.rand(size, dtype=torch.float64, device=self.device)

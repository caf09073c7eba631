"""An artefact bound to a model: what its checkpoints propose, and the exit state of its heads.

The exit state of a token lies in the same pages as its K and V: the deep state (the final-norm state, once the token
has run all layers), and K and V of each head with attention. Drafting writes head K and V with the last known deep
state, some positions back; the deep pass then writes them again with the deep state of the position just before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tide_core.exits.artefact.fast import SkipMap, refine
from tide_core.exits.artefact.heads import ExitHead
from tide_core.exits.artefact.router import Router, confidence_of
from tide_core.exits.head_cpu import DeepSources, HeadProgram, unsupported_reason
from tide_core.exits.head_cuda import FusedHead
from tide_core.exits.row_cycle import Part
from tide_core.kernels import CudaKernels, Kernels
from tide_core.kernels.reference.ops import RouterWeights, Top2
from tide_core.kv.cache import PagedKV, PagedView
from tide_core.kv.kernel_view import KernelView
from tide_core.models.adapter import ModelAdapter, NarrowHead

logger = logging.getLogger("tide")

MAX_SCORED = 256
"""Tokens at once, by the kernels."""


@dataclass(frozen=True, slots=True)
class BoundCheckpoint:
    """One checkpoint layer with its head and router, cast and placed like the model."""

    layer: int
    head: ExitHead
    router: Router
    kv_layer: int
    """The pool layer of the head's K and V; -1 for a head without attention."""


@dataclass(frozen=True, slots=True)
class BoundFastExit:
    """An exit of mode fast behind the checkpoint, cast and placed like the model."""

    head: ExitHead
    router: Router


@dataclass(frozen=True, slots=True)
class Scorer:
    """A router and the largest logit, in two launches."""

    weights: RouterWeights
    scratch: Any
    kernels: CudaKernels

    @classmethod
    def of(cls, router: Router, kernels: CudaKernels, shortlist_size: int) -> Scorer:
        norm, down, out = router.norm, router.down, router.out
        tensors = (norm.weight, down.weight, down.bias, out.weight[0], out.bias)
        first, second, third, fourth, fifth = (tensor.detach().float().contiguous() for tensor in tensors)
        weights = RouterWeights(first, second, third, fourth, fifth, norm.variance_epsilon)
        sizes = {"vocabulary": shortlist_size, "bottleneck": down.out_features}
        return cls(weights, kernels.score_scratch(down.weight.device, MAX_SCORED, **sizes), kernels)

    def __call__(self, features: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top2 = self.kernels.top2_logsumexp(logits, self.scratch)
        return self.kernels.router(features, top2, self.weights, scratch=self.scratch), top2.best_at

    def top2(self, logits: torch.Tensor, out: Top2) -> None:
        self.kernels.top2_logsumexp(logits, self.scratch, out=out)

    def score_features(self, features: torch.Tensor, top2: Top2, out: torch.Tensor) -> None:
        self.kernels.router(features, top2, self.weights, scratch=self.scratch, out=out)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a checkpoint proposes after some tokens."""

    logits: torch.Tensor
    """[T, S], over the shortlist."""
    scores: list[float]
    """[T]; one that is not finite must not be used."""
    best_ids: list[int]
    """[T], the token with the largest logit."""
    features: torch.Tensor
    """[T, D], of the exit's head."""


class Exits:
    """All checkpoints of an artefact, bound to the model and its pool.

    Where `kernels` are given and can, a checkpoint's work is one native call; else its modules run op by op."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        checkpoints: Sequence[BoundCheckpoint],
        shortlist: torch.Tensor,
        narrow_head: NarrowHead,
        kernels: Kernels | None = None,
        *,
        fast: Sequence[BoundFastExit] = (),
        skip_maps: Sequence[SkipMap] = (),
    ) -> None:
        """`fast`: the exits of mode fast behind the only checkpoint; `skip_maps`: of all exits, or none."""
        self.checkpoints = tuple(checkpoints)
        self.fast, self.skip_maps = tuple(fast), tuple(skip_maps)
        self.shortlist = shortlist.to(cache.device)
        self.vocab_size = adapter.vocab_size
        self.num_exits = self.last_segment = len(self.checkpoints) + len(self.fast)
        self._adapter = adapter
        self._cache = cache
        self._narrow_head = narrow_head
        self._fed = any(checkpoint.head.spec.deep for checkpoint in self.checkpoints)
        self._ids: list[int] = shortlist.tolist()
        self._programs: list[HeadProgram] = []
        why_not = "as asked" if kernels is None else unsupported_reason(adapter, cache, kernels, narrow_head)
        if why_not is None:
            self._programs = [
                HeadProgram(point.head, point.router, adapter, cache, narrow_head, point.kv_layer, index)
                for index, point in enumerate(self.checkpoints)
            ]
        else:
            logger.debug("exit heads run op by op: %s", why_not)
        self._scorers: list[Scorer] = []
        self._fused: list[FusedHead] = []
        self._entering: torch.Tensor | None = None
        if isinstance(kernels, CudaKernels):
            self._entering = self._entering_rows()
            self._fused = [FusedHead(point.head, kernels) for point in self.checkpoints]
            self._scorers = [Scorer.of(point.router, kernels, len(self._ids)) for point in self.checkpoints]

    def propose(
        self, index: int, parts: Sequence[Part], view: PagedView, states: torch.Tensor, *, each: bool = False
    ) -> Proposal:
        """What follows the last token (or each) of each part, from states [T, D] of all."""
        sources = self.deep_sources(parts, drafting=True)
        if self._programs:
            logits, scores, best, features = self._programs[index].propose(view, states, sources, each=each)
            return Proposal(logits, scores, [self._ids[i] for i in best], features)
        features = self._features(index, view, states, *self._deep_slots(index, sources))
        if len(states) != len(parts) and not each:
            ends = np.cumsum([stop - first for _, (first, stop) in parts]) - 1
            features = features[torch.from_numpy(ends).to(states.device)]
        if not self._scorers or len(features) > MAX_SCORED:
            logits = self._narrow_head(self._adapter.norm(features))
            score, top = self.checkpoints[index].router.score(features, confidence_of(logits)), logits.argmax(-1)
        else:
            logits = self._narrow_logits(features)
            score, top = self._scorers[index](features, logits)
        return self._proposal(logits, score, top, features)

    def refine(self, index: int, states: torch.Tensor, before: torch.Tensor) -> Proposal:
        """What follows each token at an exit behind the checkpoint, from its states there and the features of the exit
        before, [T, D] each."""
        exit_ = self.fast[index - len(self.checkpoints)]
        features = refine(exit_.head, states, before)
        logits = self._narrow_head(self._adapter.norm(features))
        score = exit_.router.score(features, confidence_of(logits))
        return self._proposal(logits, score, logits.argmax(-1), features)

    def _proposal(
        self, logits: torch.Tensor, score: torch.Tensor, top: torch.Tensor, features: torch.Tensor
    ) -> Proposal:
        # One read of the device; float64 holds ids exactly.
        scores, best_ids = torch.stack((score.double(), self.shortlist[top].double())).tolist()
        return Proposal(logits, scores, [int(i) for i in best_ids], features)

    def draft(
        self, view: KernelView, states: torch.Tensor, deep_slots: torch.Tensor, distances: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [T, D] and logits [T, S] at the only checkpoint, without scores."""
        features = self._features(0, view, states, deep_slots, distances)
        return features, self._narrow_logits(features)

    def top2(self, logits: torch.Tensor, out: Top2) -> None:
        """The two largest logits of `draft` and their sum of exponentials; on one stream with `score_features`."""
        self._scorers[0].top2(logits, out)

    def score_features(self, features: torch.Tensor, top2: Top2, out: torch.Tensor) -> None:
        """Router scores [T] of features and top-two values of several drafts at once."""
        self._scorers[0].score_features(features, top2, out)

    def _features(
        self,
        index: int,
        view: PagedView,
        states: torch.Tensor,
        deep_slots: torch.Tensor | None,
        distances: torch.Tensor | None,
    ) -> torch.Tensor:
        checkpoint, pool = self.checkpoints[index], self._cache.deep_states[index]
        if self._fused and isinstance(view, KernelView):
            fused = self._fused[index]
            embedded = fused.embed(states, pool, deep_slots, distances)
            return fused.widen(fused.refine(view, checkpoint.kv_layer, embedded), states)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            view.write(checkpoint.kv_layer, key, value)
            return view.attend_paged(checkpoint.kv_layer, query, query.shape[-1] ** -0.5)

        deep = None if deep_slots is None else pool.index_select(0, deep_slots)
        head = checkpoint.head
        return head.widen(head.refine(head.embed(states, deep, distances), view.positions, attend), states)

    def _narrow_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Final norm and narrow head, in one launch where both are plain."""
        norm, linear, kernels = self._adapter.plain_norm, self._narrow_head.plain_linear, self._scorers[0].kernels
        if norm is None or linear is None:
            return self._narrow_head(self._adapter.norm(features))
        return kernels.fused_linear(features, linear.weight, linear.bias, norm=norm)

    def _entering_rows(self) -> torch.Tensor | None:
        """The embedding of the shortlist, where that is all there is to entering: the narrow head's own rows if the
        model has them in common."""
        rows, head = self._adapter.plain_embedding, self._narrow_head.linear.weight
        if rows is None:
            return None
        shared = rows.data_ptr() == self._adapter.head_rows.data_ptr() and head.dtype == rows.dtype
        return head.detach() if shared else rows.detach()[self.shortlist].contiguous()

    def embed_drafts(self, best: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The embedding [1, T, D] of the tokens with these shortlist indices [T]."""
        if self._entering is None:
            return self._adapter.embed(self.shortlist[best], positions)
        return self._scorers[0].kernels.embed(best, self._entering).unsqueeze(0)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose states `write_deep_states` needs."""
        return tuple(sorted({tap for checkpoint in self.checkpoints for tap in checkpoint.head.spec.taps}))

    def write_deep_states(self, view: PagedView, normed: torch.Tensor, tapped: Mapping[int, torch.Tensor]) -> None:
        """Of the view's tokens, which ran all layers: from their final-norm states and those at the taps."""
        for checkpoint, states in zip(self.checkpoints, self._cache.deep_states, strict=True):
            head = checkpoint.head
            if head.spec.deep:
                states[view.slots] = head.deep_state(normed, [tapped[tap] for tap in head.spec.taps])

    def gather_buffer(self, states: torch.Tensor) -> torch.Tensor | None:
        """A buffer for the inputs of `write_exit_state`, of tokens with states [T, D]; None if there is one input
        only."""
        return self._fused[0].gather_buffer(states) if self.checkpoints[0].head.spec.deep else None

    def gather(self, tapped: Mapping[int, torch.Tensor], gathered: torch.Tensor) -> None:
        """Write the normed states at the taps into the buffer: this can run before the last layer."""
        self._fused[0].gather([tapped[tap] for tap in self.checkpoints[0].head.spec.taps], gathered)

    def norm(self, states: torch.Tensor, gathered: torch.Tensor | None) -> torch.Tensor:
        """The final norm of states [T, D], written into the buffer where one of our kernels runs it."""
        norm = self._adapter.plain_norm
        if gathered is None or norm is None:
            return self._adapter.norm(states)
        return self._scorers[0].kernels.norm_into(states, *norm, out=gathered[:, : states.shape[1]])

    def write_exit_state(
        self,
        view: KernelView,
        states: torch.Tensor,
        normed: torch.Tensor,
        gathered: torch.Tensor | None,
        slots: torch.Tensor,
        deep_slots: torch.Tensor,
        distances: torch.Tensor,
    ) -> None:
        """`write_deep_states` and `write_head_kv` at the only checkpoint, with all indices on the device: of the tokens
        whose slot is not negative, from their states at the checkpoint and after all layers, [T, D], and `gathered`."""
        [checkpoint], [kept] = self.checkpoints, self._cache.deep_states
        head, [fused] = checkpoint.head, self._fused
        if head.spec.deep:
            view.kernels.scatter_rows(fused.deep_state(normed, gathered), slots, kept)
        if checkpoint.kv_layer >= 0:
            fused.write(view, checkpoint.kv_layer, fused.embed(states, kept, deep_slots, distances), slots)

    def write_head_kv(self, index: int, parts: Sequence[Part], view: PagedView, states: torch.Tensor) -> None:
        """Write the head's K and V again, with the deep states of the tokens before, which are known now."""
        sources = self.deep_sources(parts, drafting=False)
        if self._programs:
            self._programs[index].write_kv(view, states, sources)
            return
        checkpoint = self.checkpoints[index]
        slots, distances = self._deep_slots(index, sources)
        deep = None if slots is None else self._cache.deep_states[index].index_select(0, slots)
        embedded = checkpoint.head.embed(states, deep, distances)
        view.write(checkpoint.kv_layer, *checkpoint.head.keys_values(embedded, view.positions))

    def _deep_slots(self, index: int, sources: DeepSources | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the last deep state before every token lies, [T], and how far back it is, [T]."""
        if sources is None or not self.checkpoints[index].head.spec.deep:
            return None, None
        slots, distances = torch.from_numpy(sources).to(self._cache.device)
        return slots, distances

    def deep_sources(self, parts: Sequence[Part], *, drafting: bool) -> DeepSources | None:
        """Where the last deep state before every token of the parts is."""
        if not self._fed:
            return None
        slots: list[int] = []
        distances: list[int] = []
        size = self._cache.block_size
        for row, (first, stop) in parts:
            blocks = row.step.table.block_ids
            if drafting:  # nothing of this cycle has run deep yet
                known = row.step.start > 0 and len(row.step.token_ids) == 1
                slots += [row.deep_slot(size)] * (stop - first)
                distances += range(first + 1, stop + 1) if known else [0] * (stop - first)
            elif not row.left_at:  # each token follows one that ran deep, but for the first of all
                before = range(row.step.start + first - 1, row.step.start + stop - 1)
                slots += [blocks[max(p, 0) // size] * size + max(p, 0) % size for p in before]
                distances += [int(p >= 0) for p in before]
            else:
                sources, away = row.deep_sources((first, stop), self.last_segment)
                slots += row.slots(sources, size).tolist()
                distances += away.tolist()
        return np.array((slots, distances), dtype=np.int64)

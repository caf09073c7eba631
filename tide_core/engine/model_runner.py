"""A scheduled batch in, one result per row out. The only file of the engine that builds tensors."""

from __future__ import annotations

import torch

from tide_core.batch import RowResult, ScheduledBatch, StepResult
from tide_core.engine.depth_loop import run_full_depth
from tide_core.kernels import Kernels
from tide_core.kv.cache import GatheredView, PagedKV, PagedView, RowSpan
from tide_core.models.adapter import ModelAdapter
from tide_core.sampling.sampler import SamplingRow, sample


class ModelRunner:
    """Holds the model and its KV pool; keeps nothing of a step once it is run."""

    def __init__(self, adapter: ModelAdapter, cache: PagedKV, kernels: Kernels, segments: tuple[range, ...]) -> None:
        self.adapter = adapter
        self.cache = cache
        self.kernels = kernels
        self.segments = segments

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """Run every token of the batch at full depth and sample where a row asks for it."""
        states = self._forward(batch)
        sampling = [index for index, row in enumerate(batch.rows) if row.samples]
        results = [RowResult() for _ in batch.rows]
        if sampling:
            logits = self.adapter.head(self.adapter.norm(states[self._last_tokens(batch, sampling)]))
            rows = [_sampling_row(batch, index) for index in sampling]
            for index, token in zip(sampling, sample(logits, rows), strict=True):
                results[index] = RowResult(
                    token_id=token.token_id,
                    exit_layer=self.adapter.num_layers,
                    logprob=token.logprob,
                    top_logprobs=token.top_logprobs,
                    error=token.error,
                )
        return StepResult(tuple(results))

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        spans = [RowSpan(row.table.block_ids, row.start, len(row.token_ids)) for row in batch.rows]
        kind = GatheredView if self.adapter.gathers_kv else PagedView
        view = kind(self.cache, self.kernels, spans)
        flat = [token for row in batch.rows for token in row.token_ids]
        token_ids = torch.tensor(flat, dtype=torch.long, device=self.cache.device)
        return run_full_depth(self.adapter, self.segments, token_ids, view.positions, view)

    def _last_tokens(self, batch: ScheduledBatch, sampling: list[int]) -> torch.Tensor:
        """Where in the step the last token of each sampling row stands."""
        ends, end = [], 0
        for row in batch.rows:
            end += len(row.token_ids)
            ends.append(end - 1)
        return torch.tensor([ends[index] for index in sampling], device=self.cache.device)


def _sampling_row(batch: ScheduledBatch, index: int) -> SamplingRow:
    row = batch.rows[index]
    return SamplingRow(
        params=row.request.params,
        seed=row.request.seed,
        prompt_ids=row.request.prompt_ids,
        output_ids=row.output_ids,
        eos_ids=row.request.eos_ids,
    )

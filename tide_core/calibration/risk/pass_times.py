"""Times of drafting and full passes of a model on its device, for exits that need not be trained.

A full pass and, for each candidate, a drafting pass (its layers, head, shortlist and router) are timed at several
numbers of tokens. On CUDA a pass is a graph, as in the engine, so that launches from the host do not count. Attention
has no context here, and layers and heads are the library's own modules: the engine is somewhat faster in both, and
ratios are what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tide_core.calibration.risk.costs import MeasuredCosts
from tide_core.calibration.train.candidates import Candidate
from tide_core.calibration.train.teacher import fused_norms, plain_inputs, runs_layer_by_layer
from tide_core.exits.artefact.router import confidence_of
from tide_core.models.adapter import ModelAdapter

CUDA_TOKENS = (1, 4, 8, 32, 128)
CPU_TOKENS = (1, 4, 8, 32)
CPU_SECONDS = 0.3
"""For one pass, all its repeats; it runs twice at least."""
CUDA_REPEATS = 20


@torch.no_grad()
def measure_costs(
    adapter: ModelAdapter, candidates: Sequence[Candidate], shortlist_size: int
) -> dict[str, MeasuredCosts] | None:
    """Costs by the name of the candidate; None for a model whose layers cannot be called one by one.

    Weights of the candidates do not matter; they are cast like the model."""
    if not runs_layer_by_layer(adapter):
        return None
    on_cuda = adapter.device.type == "cuda"
    with fused_norms(adapter.model, enabled=on_cuda):
        return _measured(adapter, candidates, shortlist_size, CUDA_TOKENS if on_cuda else CPU_TOKENS)


def _measured(
    adapter: ModelAdapter, candidates: Sequence[Candidate], shortlist_size: int, sizes: tuple[int, ...]
) -> dict[str, MeasuredCosts]:
    narrow_head = adapter.narrow_head(torch.arange(shortlist_size, device=adapter.device))
    full = [_seconds(_full_pass(adapter, num_tokens), adapter.device) for num_tokens in sizes]
    layers = [_seconds(_layers(adapter, num_tokens), adapter.device) for num_tokens in sizes]
    costs = {}
    for candidate in candidates:
        candidate.head.to(adapter.dtype)
        candidate.router.to(adapter.dtype)
        passes = (_drafting_pass(adapter, candidate, narrow_head, num_tokens) for num_tokens in sizes)
        draft = [_seconds(each, adapter.device) for each in passes]
        share = candidate.layer / adapter.num_layers
        shallow = [min(seconds * share, own) for seconds, own in zip(layers, draft, strict=True)]
        costs[candidate.name] = MeasuredCosts(sizes, tuple(shallow), tuple(draft), tuple(full))
    return costs


def _layers(adapter: ModelAdapter, num_tokens: int) -> Callable[[], Tensor]:
    """All layers."""
    states, positions = _inputs(adapter, num_tokens)
    inputs = plain_inputs(adapter, positions)
    return lambda: adapter.run_layers(states, 0, adapter.num_layers, inputs)


def _full_pass(adapter: ModelAdapter, num_tokens: int) -> Callable[[], Tensor]:
    run_layers = _layers(adapter, num_tokens)
    return lambda: adapter.head(adapter.norm(run_layers()[0]))


def _drafting_pass(
    adapter: ModelAdapter, candidate: Candidate, narrow_head: torch.nn.Module, num_tokens: int
) -> Callable[[], Tensor]:
    states, positions = _inputs(adapter, num_tokens)
    inputs, head = plain_inputs(adapter, positions), candidate.head
    deep = states.new_zeros(num_tokens, head.spec.deep_width)
    distances = torch.ones(num_tokens, dtype=torch.long, device=adapter.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    def run() -> Tensor:
        seen = adapter.run_layers(states, 0, candidate.layer, inputs)[0]
        features = head.widen(head.refine(head.embed(seen, deep, distances), positions, attend), seen)
        logits = narrow_head(adapter.norm(features))
        return candidate.router.score(features, confidence_of(logits))

    return run


def _inputs(adapter: ModelAdapter, num_tokens: int) -> tuple[Tensor, Tensor]:
    """States [1, T, D] and positions [T]."""
    positions = torch.arange(num_tokens, device=adapter.device)
    return adapter.embed(torch.zeros_like(positions), positions).view(1, num_tokens, -1), positions


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """The time of one run: the best of several on a CPU, the mean of many replays on CUDA."""
    if device.type == "cuda":
        return _replayed(run)
    best, started = float("inf"), time.monotonic()
    run()
    while best == float("inf") or time.monotonic() - started < CPU_SECONDS:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best


def _replayed(run: Callable[[], Tensor]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(CUDA_REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000.0 / CUDA_REPEATS

"""Rows to draw from, and cycles whose drafts were drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference.draw import DrawnCycle
from tide_core.request import SamplingParams

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 1e-40, "top_k": 7, "top_p": 0.3},
    {"temperature": 0.8, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 2**31 - 1, "top_p": 0.999},
    {"temperature": 0.0, "top_k": 3},
]


def params_of(num_rows: int) -> list[SamplingParams]:
    """Every kind in turn."""
    return [SamplingParams(**KINDS[r % len(KINDS)]) for r in range(num_rows)]


def settings_of(params: Sequence[SamplingParams], least: float = -math.inf) -> torch.Tensor:
    rows = [(one.temperature, one.top_k, one.top_p, one.min_p, least) for one in params]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, draw_plan.NUM_SETTINGS).T.contiguous()


def logits_of(seed: int, num_rows: int, width: int, *, spread: float = 3.0, ties: bool = False) -> torch.Tensor:
    """Float32; with `ties` there are few different numbers, zeros of both signs among them."""
    logits = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits.round() * 0.5).where(logits.round() != 0, -logits * 0) if ties else logits


def numbers_of(seed: int, *shape: int) -> torch.Tensor:
    numbers = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    flat = numbers.flatten()  # both ends of the interval come up
    flat[0:1], flat[-1:] = 0.0, 1.0 - 2.0**-53
    return numbers


def cycle_of(
    seed: int,
    params: Sequence[SamplingParams],
    counts: Sequence[int],
    shortlist: torch.Tensor,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    least: float = -math.inf,
    ties: bool = False,
    draw: Any = draw_plan.draw,
) -> tuple[torch.Tensor, DrawnCycle]:
    """Logits at full depth [T, V], and rows by falling number of drafts, with space for two tokens more."""
    rows, drafts = len(params), max(counts, default=0)
    size = len(shortlist)
    sources = [ahead * rows + r for r, count in enumerate(counts) for ahead in range(count + 1)]
    settings = settings_of(params, least).to(device)
    shallow = logits_of(seed + 1, drafts * rows, size, ties=ties).to(device, dtype)
    made = [
        draw(
            shallow[ahead * rows : (ahead + 1) * rows],
            settings,
            numbers_of(seed + 10 + ahead, rows).to(device),
            vocab_size,
        )
        for ahead in range(drafts)
    ]
    empty = torch.empty(0, rows, dtype=torch.int64), torch.empty(0, rows, draw_plan.NUM_HEAD, dtype=torch.float64)
    places, heads = (torch.stack(some) for some in zip(*made, strict=True)) if made else empty
    scores = torch.rand(drafts, rows, generator=torch.Generator().manual_seed(seed + 4))
    # Full depth says nearly what the exit says, so that drafts are accepted and rejected.
    deep = logits_of(seed + 5, len(sources) + 2, vocab_size, spread=0.7, ties=ties)
    deep[:, shortlist] += 1.0
    for token, source in enumerate(sources):
        if source < drafts * rows:
            deep[token, shortlist] += shallow[source].float().cpu()
    cycle = DrawnCycle(
        torch.tensor([*sources, 0, 0]),
        torch.tensor([len(sources)], dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        settings,
        numbers_of(seed + 6, drafts + 1, rows),
        numbers_of(seed + 7, drafts, rows),
        numbers_of(seed + 8, drafts, rows),
        scores,
        shortlist.to(device)[places.to(device)],
        shallow.reshape(drafts, rows, size),
        heads,
        draw_plan.places_of(shortlist, vocab_size),
    )
    return deep.to(device, dtype), DrawnCycle(*(part.to(device) for part in cycle))

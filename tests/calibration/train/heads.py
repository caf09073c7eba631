"""Heads, models and sequences to calibrate with."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

from tests.tiny_models import tiny_model
from tide_core.calibration.collect.shards import TokenSequence, TokenShards, write_shard
from tide_core.exits.artefact.heads import ExitHead, HeadSpec
from tide_core.models.adapter import ModelAdapter

WIDTH = 16
SHORTLIST = torch.arange(0, 384, 2)


def random_head(
    kind: str = "block",
    *,
    deep: bool = True,
    max_distance: int = 4,
    seed: int = 0,
    inner: int = 0,
    hidden: int = 12,
) -> ExitHead:
    """A head in which no part is idle."""
    block = {"num_heads": 4, "num_kv_heads": 2, "head_size": 6, "ffn": 20} if kind == "block" else {}
    hidden = hidden if kind in ("mlp", "block") else 0
    head = ExitHead(HeadSpec(kind, WIDTH, deep, max_distance if deep else 0, hidden, **block, inner=inner))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head


def tiny_adapter(family: str = "llama", dtype: torch.dtype = torch.float32) -> ModelAdapter:
    return ModelAdapter(copy.deepcopy(tiny_model(family)).to(dtype), paged=False)


def write_sequences(folder: Path, part: str = "train", num: int = 12, *, seed: int = 0) -> TokenShards:
    """Random sequences of 8 to 20 tokens, half of which are prompt."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(random.integers(8, 21))
        sequences.append(TokenSequence(random.integers(2, 384, length).astype(np.int32), length // 2))
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder, part, 0, sequences)
    return TokenShards(folder, part)

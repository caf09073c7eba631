"""Token sequences straight through an engine's layers and pool, without scheduler or sampler, to compare logits."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.factories import make_parts, make_request, poison
from tests.tiny_models import tiny_model
from tide_core.batch import RowStep
from tide_core.execution.depth_loop import DepthLoop, plan_segments
from tide_core.execution.runner import ModelRunner
from tide_core.exits.row_cycle import RowCycle
from tide_core.kv.block_manager import BlockTable


class Forward:
    """Runs token sequences through an engine's layers and pool, and returns all logits."""

    def __init__(self, family: str, checkpoint_layers: tuple[int, ...] = (), **settings: Any) -> None:
        self._block_size = 8 if settings.get("device") == "cuda" else 4  # the smallest that the kernels there take
        self.runner: ModelRunner = make_parts(family, block_size=self._block_size, **settings).runner
        poison(self.runner.cache, range(self.runner.cache.num_blocks))
        self.segments = plan_segments(self.runner.adapter.num_layers, checkpoint_layers)

    @torch.inference_mode()
    def __call__(self, rows: list[list[int]], chunk: int) -> list[torch.Tensor]:
        blocks_each = -(-max(map(len, rows)) // self._block_size)
        tables = [list(range(r * blocks_each, (r + 1) * blocks_each)) for r in range(len(rows))]
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        for start in range(0, max(map(len, rows)), chunk):
            active = [r for r, row in enumerate(rows) if start < len(row)]
            pieces = [rows[r][start : start + chunk] for r in active]
            out = self._step([BlockTable(start, tables[r]) for r in active], pieces)
            for r, piece in zip(active, out.split([len(p) for p in pieces]), strict=True):
                logits[r].append(piece)
        return [torch.cat(pieces) for pieces in logits]

    def _step(self, tables: list[BlockTable], pieces: list[list[int]]) -> torch.Tensor:
        steps = [RowStep(make_request(), table, piece, (), False) for table, piece in zip(tables, pieces, strict=True)]
        adapter = self.runner.adapter
        loop = DepthLoop(adapter, self.runner.cache, self.runner.kernels, self.segments)
        ran = loop.run([RowCycle.begin(step, len(self.segments)) for step in steps], 0, len(self.segments))
        return adapter.head(adapter.norm(ran.states))


def library_logits(family: str, row: list[int], device: str = "cpu", dtype: str = "float32") -> torch.Tensor:
    """What the library's own forward gives for every position."""
    model = tiny_model(family)
    if (device, dtype) != ("cpu", "float32"):
        model = copy.deepcopy(model).to(device, getattr(torch, dtype))
    with torch.inference_mode():
        return model(torch.tensor([row], device=device)).logits[0]

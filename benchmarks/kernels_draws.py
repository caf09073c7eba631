"""The ops of rows that draw at random: a draft of each row, and the verdict on all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_shapes import Shape
from benchmarks.kernels_inputs import Calls, Inputs
from tide_core.kernels.reference import draw as draw_plan
from tide_core.kernels.reference.draw import DrawnCycle

DRAFTS = 3
SETTINGS = (0.8, 0.0, 0.95, 0.0, -torch.inf)
"""Of every row: temperature, top-k, top-p, min-p, least score."""


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
            captured_reference=False,
        )

    def _verify_drawn(self, shape: Shape, rows: int) -> Calls:
        """As many rows, with all their drafts."""
        num_tokens = rows * (DRAFTS + 1)
        logits = self._randn(num_tokens, shape.vocabulary, scale=3.0)
        cycle = self._cycle(shape, rows)
        return Calls(
            lambda i: self.kernels.verify_drawn(logits, cycle),
            lambda i: draw_plan.verify_drawn(logits, cycle),
            self._bytes(logits.numel()),
            captured_reference=False,
        )

    def _cycle(self, shape: Shape, rows: int) -> DrawnCycle:
        settings = self._settings(rows)
        shortlist = torch.arange(shape.shortlist, device=self.device) * (shape.vocabulary // shape.shortlist)
        shallow = self._randn(DRAFTS, rows, shape.shortlist, scale=3.0)
        made = [draw_plan.draw(some, settings, self._numbers(rows), shape.vocabulary) for some in shallow]
        places, heads = (torch.stack(some) for some in zip(*made, strict=True))
        sources = torch.arange((DRAFTS + 1) * rows, device=self.device).view(DRAFTS + 1, rows).T.reshape(-1)
        return DrawnCycle(
            sources.contiguous(),
            torch.tensor([len(sources)], dtype=torch.int32, device=self.device),
            torch.full((rows,), DRAFTS, dtype=torch.int32, device=self.device),
            settings,
            self._numbers(DRAFTS + 1, rows),
            self._numbers(DRAFTS, rows),
            self._numbers(DRAFTS, rows),
            torch.full((DRAFTS, rows), 0.5, device=self.device),
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

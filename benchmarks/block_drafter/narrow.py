"""A sequential exit head whose block is narrower than the model: `embed` and `refine` as an exit head has them.

    z = norm(h) + U·block(M·[norm(h); norm(F·[d; norm(t_1); ...])] + e_j)

M and F project down to the inner width and U projects up to the model's width, so a draft reads smaller matrices. U
starts at zero, so the features of an untrained head are norm(h), as those of all exit heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tide_core.exits.artefact.heads import Attend, ExitHead, HeadBlock, HeadRMSNorm, HeadSpec
from tide_core.kernels import reference_kernels


class NarrowExitHead(ExitHead):
    """`embed` returns [norm(h); inner state] as one tensor, which `refine` splits again."""

    def __init__(self, spec: HeadSpec, inner: int) -> None:
        """`spec.width` is the model's width; heads and feed-forward of `spec` are those of the block, whose width is
        `inner`."""
        nn.Module.__init__(self)
        self.spec = spec
        self.kernels = reference_kernels()
        self._rotary_table = None
        width = spec.width
        self.state_norm = HeadRMSNorm(width, spec.norm_eps)
        self.tap_norms = nn.ModuleList(HeadRMSNorm(width, spec.norm_eps) for _ in spec.taps)
        self.fuse = nn.Linear((1 + len(spec.taps)) * width, inner)
        self.deep_norm = HeadRMSNorm(inner, spec.norm_eps)
        self.distance = nn.Embedding(spec.max_distance + 1, inner)
        self.mix = nn.Linear(width + inner, inner)
        self.block = HeadBlock(replace(spec, width=inner))
        self.up = nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.distance.weight)
        nn.init.zeros_(self.up.weight)

    def deep_state(self, last: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        normed = [norm(state) for norm, state in zip(self.tap_norms, tapped, strict=True)]
        fused: Tensor = self.fuse(torch.cat((last.to(self.fuse.weight.dtype), *normed), -1))
        return fused

    def embed(self, states: Tensor, deep: Tensor | None = None, distances: Tensor | None = None) -> Tensor:
        assert deep is not None, "a narrow head needs the last deep state"
        assert distances is not None, "a narrow head needs the distance to it"
        normed = self.state_norm(states)
        known = (distances > 0).unsqueeze(-1)
        inputs = torch.cat((normed, self.deep_norm(deep.masked_fill(~known, 0.0))), -1)
        inner = self.mix(inputs) + self.distance(distances.clamp(max=self.spec.max_distance))
        return torch.cat((normed, inner.to(normed.dtype)), -1)

    def refine(self, embedded: Tensor, positions: Tensor, attend: Attend | None = None) -> Tensor:
        assert attend is not None, "a block head needs its attention"
        state, inner = embedded[..., : self.spec.width], embedded[..., self.spec.width :]
        refined = self.block(inner, *self._rotations(positions, inner.dtype), attend, self.kernels)
        features: Tensor = state + self.up(refined)
        return features

    def keys_values(self, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys_values(embedded[..., self.spec.width :], positions)

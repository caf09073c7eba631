"""A drafter that proposes a whole block of tokens in one pass.

A block begins at its anchor, the position of the newest token. That token has not run deep; all tokens before it have.

    place           0             1             2            ...
    position        anchor        anchor + 1    anchor + 2
    input           newest token  mask          mask
    predicts        anchor + 1    anchor + 2    anchor + 3

The input of place 0 is the state of the newest token at the checkpoint layer, or its embedding. The input of the others
is a learned mask for each place; `seed` adds a projection of the newest token and of the deep state before it.
Attention within a block is bidirectional. In every layer a block also attends to the context: keys and values made from
the fused states of the target at all positions before the anchor, that is the final state and the states at some layers
(taps). With `own_mix` every layer of the drafter mixes these states with weights of its own.

The output of a place goes through the target's own final norm and (a shortlist of) its LM head; a drafter that is
narrower than the target adds its projected output to the normed state of the newest token. As in the exit heads, output
projections start at zero, so that the logits of an untrained drafter are those of its input state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import HeadMLP, HeadRMSNorm

SEEDS = ("none", "first", "all")
MASK_STD = 0.02

KeysValues = tuple[Tensor, Tensor]
"""Of one layer, [B, Hk, S, size] each, with positions applied."""


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Shape of a drafter; the sizes of its tensors follow from it."""

    width: int
    """Of the target's states."""
    inner: int
    """Of the drafter's own states."""
    layers: int
    places: int
    """Tokens of a block."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    checkpoint: int = 2
    """Layers that the newest token has run; 0: the input is its embedding."""
    taps: tuple[int, ...] = ()
    """Layers, counted as layers that have run, whose states are fused with the final one."""
    own_mix: bool = False
    """Whether every layer of the drafter has its own mix of the final state and the taps."""
    seed: str = "all"
    """Places whose input has the newest token and the deep state before it: `all`, or `first` (place 0). With `none`
    place 0 has the newest token alone."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("width", "inner", "layers", "places", "num_heads", "num_kv_heads", "head_size", "ffn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"drafter.{name}", getattr(self, name), "at least 1")
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            shape = (self.num_heads, self.num_kv_heads, self.head_size)
            raise ConfigError(
                "drafter heads", shape, "whole groups of query heads per KV head, and an even size of a head"
            )
        if self.seed not in SEEDS:
            raise ConfigError("drafter.seed", self.seed, f"one of {', '.join(SEEDS)}")

    @property
    def num_sources(self) -> int:
        """Target states that are fused."""
        return 1 + len(self.taps)


class BlockDrafter(nn.Module):
    """Call `fuse` and `keys_values` once for positions that have run deep, then `forward` for blocks."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        width, inner = spec.width, spec.inner
        self.tap_norms = nn.ModuleList(HeadRMSNorm(width, spec.norm_eps) for _ in spec.taps)
        if spec.own_mix:
            self.mixes = nn.Parameter(torch.zeros(spec.layers, spec.num_sources, width))
            self.fuse_linear = nn.Linear(width, inner)
        else:
            self.fuse_linear = nn.Linear(spec.num_sources * width, inner)
        self.token_norm = HeadRMSNorm(width, spec.norm_eps)
        self.first = nn.Linear(width + (inner if spec.seed != "none" else 0), inner)
        if spec.seed != "none":
            self.before_norm = HeadRMSNorm(inner, spec.norm_eps)
        if spec.seed == "all":
            self.later = nn.Linear(width + inner, inner)
        self.masks = nn.Parameter(torch.randn(spec.places, inner) * MASK_STD)
        self.layers = nn.ModuleList(DrafterLayer(spec) for _ in range(spec.layers))
        if inner != width:
            self.up = nn.Linear(inner, width, bias=False)
        self._reset()

    def _reset(self) -> None:
        if self.spec.own_mix:
            with torch.no_grad():
                self.mixes[:, 0] = 1.0  # start with the final state
        if self.spec.inner != self.spec.width:
            nn.init.zeros_(self.up.weight)
        linears = [self.fuse_linear, self.first, *([self.later] if self.spec.seed == "all" else [])]
        for linear in linears:
            nn.init.zeros_(linear.bias)
            if self.spec.inner == self.spec.width:
                nn.init.eye_(linear.weight)  # start with the final state, and with that of the newest token

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def fuse(self, normed: Tensor, tapped: Sequence[Tensor]) -> list[Tensor]:
        """The context of each layer [..., inner] from final-norm states and states at the taps, [..., D] each."""
        sources = [normed, *(norm(state) for norm, state in zip(self.tap_norms, tapped, strict=True))]
        if not self.spec.own_mix:
            return [self.fuse_linear(torch.cat([source.to(sources[-1].dtype) for source in sources], -1))] * len(
                self.layers
            )
        mixed = []
        for weights in self.mixes:
            terms = [weight * source for weight, source in zip(weights, sources, strict=True)]
            mixed.append(self.fuse_linear(torch.stack(terms).sum(0)))
        return mixed

    def keys_values(self, context: Sequence[Tensor], positions: Tensor) -> list[KeysValues]:
        """Keys and values of each layer for contexts [B, S, inner] at positions [S] or [B, S]."""
        turns = rotations(positions, self.spec)
        return [layer.keys_values(own, *turns) for layer, own in zip(self._layers(), context, strict=True)]

    def forward(
        self,
        newest: Tensor,
        before: Tensor,
        anchors: Tensor,
        context: Sequence[KeysValues],
        mask: Tensor | None,
    ) -> Tensor:
        """Features [B, A, places, D] of A blocks of each of B rows.

        `newest` [B, A, D] are the states or embeddings of the newest tokens, `before` [B, A, inner] the contexts of the
        first layer at the position before each anchor, `anchors` [B, A] the positions. `mask` comes from `block_mask`;
        None is for one block per row, which attends to the whole context."""
        places = torch.arange(self.spec.places, device=anchors.device)
        states = self._enter(newest, before)
        turns = rotations(anchors[..., None] + places, self.spec)
        for layer, pair in zip(self._layers(), context, strict=True):
            states = layer(states, pair, *turns, mask)
        if self.spec.inner == self.spec.width:
            return states
        features: Tensor = self.token_norm(newest).unsqueeze(2) + self.up(states)
        return features

    def _enter(self, newest: Tensor, before: Tensor) -> Tensor:
        """The input of the first layer, [B, A, places, inner]."""
        known = self.token_norm(newest)
        if self.spec.seed != "none":
            known = torch.cat((known, self.before_norm(before)), -1)
        first = self.first(known) + self.masks[0]
        later = self.masks[1:].expand(*first.shape[:2], -1, -1)
        if self.spec.seed == "all":
            later = later + self.later(known).unsqueeze(2)
        return torch.cat((first.unsqueeze(2), later.to(first.dtype)), 2)

    def _layers(self) -> list[DrafterLayer]:
        return list(self.layers)  # type: ignore[arg-type]


class DrafterLayer(nn.Module):
    """A pre-norm layer: attention over context and block, then SwiGLU, each with a residual. Context and block have the
    same projections. An untrained layer is the identity."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_size = spec.head_size
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.attention_norm = HeadRMSNorm(spec.inner, spec.norm_eps)
        self.q_proj = nn.Linear(spec.inner, queries, bias=False)
        self.k_proj = nn.Linear(spec.inner, keys, bias=False)
        self.v_proj = nn.Linear(spec.inner, keys, bias=False)
        self.o_proj = nn.Linear(queries, spec.inner, bias=False)
        self.mlp_norm = HeadRMSNorm(spec.inner, spec.norm_eps)
        self.mlp = HeadMLP(spec.inner, spec.ffn, spec.inner)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def keys_values(self, states: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """[B, S, inner] to keys and values [B, Hk, S, size]."""
        normed = self.attention_norm(states)
        return self._keys(normed, cos, sin), self._by_head(self.v_proj(normed))

    def forward(self, states: Tensor, context: KeysValues, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """States of blocks [B, A, places, inner] in and out."""
        normed = self.attention_norm(states).flatten(1, 2)
        cos, sin = (turn.flatten(1, 2) for turn in (cos, sin))
        query = rotate(self._by_head(self.q_proj(normed)), cos, sin)
        own = self._keys(normed, cos, sin), self._by_head(self.v_proj(normed))
        keys, values = (torch.cat((before.to(new.dtype), new), 2) for before, new in zip(context, own, strict=True))
        attended = attend(query, keys, values, mask).transpose(1, 2).flatten(2)
        states = states + self.o_proj(attended).view_as(states)
        refined: Tensor = states + self.mlp(self.mlp_norm(states))
        return refined

    def _keys(self, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self._by_head(self.k_proj(normed)), cos, sin)

    def _by_head(self, tokens: Tensor) -> Tensor:
        """[B, T, H * size] to [B, H, T, size]."""
        return tokens.view(*tokens.shape[:2], -1, self.head_size).transpose(1, 2)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, Hq, Q, size] over [B, Hk, K, size]; `mask` is True where a query reads a key."""
    shared = query.shape[1] // keys.shape[1]
    if mask is not None and shared > 1:  # Torch's fused kernels support a mask or shared heads, not both
        keys, values = (tensor.repeat_interleave(shared, 1) for tensor in (keys, values))
    return F.scaled_dot_product_attention(
        query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask, enable_gqa=mask is None and shared > 1
    )


def block_mask(anchors: Tensor, places: int, length: int) -> Tensor:
    """[B, 1, A * places, length + A * places]: a place attends to the context before its anchor and its own block."""
    num_rows, num_blocks = anchors.shape
    owner = torch.arange(num_blocks * places, device=anchors.device) // places
    before = torch.arange(length, device=anchors.device) < anchors[:, owner].unsqueeze(-1)
    own = (owner[:, None] == owner).expand(num_rows, -1, -1)
    return torch.cat((before, own), -1).unsqueeze(1)


def rotations(positions: Tensor, spec: DrafterSpec) -> tuple[Tensor, Tensor]:
    """cos and sin of positions [...], each [..., size]."""
    steps = torch.arange(0, spec.head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * spec.rope_theta ** (-steps / spec.head_size)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, size] by cos and sin [T, size] or [B, T, size]."""
    cos, sin = (turn.to(states.dtype) if turn.dim() == 2 else turn.to(states.dtype).unsqueeze(1) for turn in (cos, sin))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


@torch.no_grad()
def copy_layers(drafter: BlockDrafter, layers: Sequence[Any]) -> int:
    """Initialise the drafter's layers with the target's last ones where both have weights of one shape; returns how
    many weights were copied. Output projections stay zero."""
    pairs = {
        "attention_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
    }
    copied = 0
    for ours, theirs in zip(reversed(drafter.layers), reversed(layers), strict=False):
        for to, source in pairs.items():
            try:
                weight = theirs.get_submodule(source).weight
            except AttributeError:
                continue
            mine = ours.get_submodule(to).weight
            if isinstance(weight, Tensor) and isinstance(mine, Tensor) and weight.shape == mine.shape:
                mine.copy_(weight)
                copied += 1
    return copied

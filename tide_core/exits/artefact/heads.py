"""Exit heads: small learned modules that turn the state at a checkpoint layer into features of the full-depth state.

One interface for all kinds. A head sees tokens flat, [T, D], whatever rows they belong to. It yields features [T, D]
that take the place of the last layer's output: the model's own final norm and (a shortlist of) its own output
embedding turn them into logits, and a router scores them.

    identity   z = h
    affine     z = M·y
    mlp        z = M·y + SwiGLU(y)
    block      the same, with or without the SwiGLU, then one decoder block with attention of its own

with y = norm(h), or y = [norm(h); norm(g)] + e_j when the head is fed with g, the deep state of the last position of
the row that has run deep, j positions back (e_0: there is none). The deep state is the final-norm state d, or with taps
g = F·[d; norm(t_1); norm(t_2); ...], t_i being the states of that position after some layers on the way: what the model
settles there says more of the tokens to come than the last state, which is all about the next one. F is applied once
to a position, when it has run deep. M starts as "take norm(h)" and F as "take d". Everything else that is learned
starts at zero output, so an untrained head of any kind is a plain guess and never a wild one.

A block may be narrow: it works at an inner width below the model's. M and F then lead to the inner width, the deep
state is as wide as that, and a last step leads back: z = norm'(h) + U·(what the block gave). M and F start as random
projections and U at zero, so an untrained narrow head is the same plain guess. Its cost and its size fall with the
inner width; only M, F and U still see the model's.

The attention of a block is not in here: the caller hands it over as a function. In the engine it writes and reads the
paged pool, in training it is dense. The block has rotary positions of its own, whatever the model uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tide_core.errors import ConfigError
from tide_core.exits.artefact.strict_json import OPTIONAL
from tide_core.kernels import Kernels, reference_kernels

HEAD_KINDS = ("identity", "affine", "mlp", "block")
MAX_TAPS = 16

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, Hq, S], keys and values [T, Hk, S], all with positions applied, to [T, Hq, S]."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Shape of a head; everything its tensors' sizes follow from."""

    kind: str
    width: int
    """Of the model's states."""
    deep: bool = False
    """Whether the head is fed with the last deep state."""
    max_distance: int = 0
    """Farthest deep state the head knows, in positions; what lies farther back counts as this far."""
    hidden: int = 0
    """Width of the SwiGLU; 0 for none."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    """Width of the block's own SwiGLU."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    taps: tuple[int, ...] = ()
    """Layers, counted as layers that have run, whose states go into the deep state beside the last one."""
    inner: int = field(default=0, metadata=OPTIONAL)
    """Width at which a narrow block works; 0, or the model's width, for a block that is not narrow."""

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise ConfigError("head.kind", self.kind, f"one of {', '.join(HEAD_KINDS)}")
        sizes = ("width", "max_distance", "hidden", "num_heads", "num_kv_heads", "head_size", "ffn", "inner")
        for name in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**20:
                raise ConfigError(f"head.{name}", value, "an integer in 0..1048576")
        if not self.width:
            raise ConfigError("head.width", self.width, "at least 1")
        if self.deep != bool(self.max_distance) or (self.deep and self.kind == "identity"):
            expected = "above 0 exactly for heads fed with the deep state, which identity heads never are"
            raise ConfigError("head.max_distance", self.max_distance, expected)
        self._check_taps()
        if bool(self.hidden) != (self.kind == "mlp") and self.kind != "block":
            raise ConfigError("head.hidden", self.hidden, "above 0 for mlp heads, 0 for identity and affine ones")
        shape = (self.num_heads, self.num_kv_heads, self.head_size, self.ffn)
        if self.kind != "block":
            if any(shape):
                raise ConfigError("head.num_heads, num_kv_heads, head_size, ffn", shape, f"0 for {self.kind} heads")
        elif not all(shape) or self.num_heads % self.num_kv_heads or self.head_size % 2:
            expected = "above 0, whole groups of query heads per KV head, an even head size"
            raise ConfigError("head.num_heads, num_kv_heads, head_size, ffn", shape, expected)
        if self.inner > self.width or (self.inner and self.kind != "block"):
            expected = f"at most the model's {self.width}, and 0 for heads without a block"
            raise ConfigError("head.inner", self.inner, expected)
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
                raise ConfigError(f"head.{name}", value, "a number above 0")

    def _check_taps(self) -> None:
        taps = self.taps
        whole = isinstance(taps, tuple) and all(isinstance(t, int) and not isinstance(t, bool) for t in taps)
        if not whole or any(t < 1 for t in taps) or list(taps) != sorted(set(taps)) or len(taps) > MAX_TAPS:
            raise ConfigError("head.taps", taps, f"at most {MAX_TAPS} rising layer counts of at least 1")
        if taps and not self.deep:
            raise ConfigError("head.taps", taps, "none for a head that is not fed with the deep state")

    @property
    def inner_width(self) -> int:
        """Width at which the head works."""
        return self.inner or self.width

    @property
    def narrow(self) -> bool:
        return self.inner_width < self.width

    @property
    def deep_width(self) -> int:
        """Of the deep state that a slot keeps; 0 for a head that is not fed with one."""
        return self.inner_width if self.deep else 0

    @property
    def fuses(self) -> bool:
        """Whether the deep state is computed, and not just the final-norm state."""
        return self.deep and (bool(self.taps) or self.narrow)

    @property
    def input_width(self) -> int:
        return self.width + self.deep_width

    @property
    def attends(self) -> bool:
        """Whether the head keeps K and V of its own."""
        return self.kind == "block"


class ExitHead(nn.Module):
    """A head of any kind. `embed` first, then `refine`, then `widen`; `keys_values` after `embed` where only the KV is
    wanted."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kernels: Kernels = reference_kernels()
        self._rotary_table: tuple[Tensor, Tensor] | None = None
        if spec.kind == "identity":
            return
        self.state_norm = HeadRMSNorm(spec.width, spec.norm_eps)
        self.mix = nn.Linear(spec.input_width, spec.inner_width)
        if spec.deep:
            self.deep_norm = HeadRMSNorm(spec.inner_width, spec.norm_eps)
            self.distance = nn.Embedding(spec.max_distance + 1, spec.input_width)
        if spec.taps:
            self.tap_norms = nn.ModuleList(HeadRMSNorm(spec.width, spec.norm_eps) for _ in spec.taps)
        if spec.fuses:
            self.fuse = nn.Linear((1 + len(spec.taps)) * spec.width, spec.inner_width)
        if spec.hidden:
            self.mlp = HeadMLP(spec.input_width, spec.hidden, spec.inner_width)
        if spec.attends:
            self.block = HeadBlock(spec)
        if spec.narrow:
            self.skip_norm = HeadRMSNorm(spec.width, spec.norm_eps)
            self.up = nn.Linear(spec.inner_width, spec.width, bias=False)
        self._reset()

    def _reset(self) -> None:
        _begin(self.mix, narrow=self.spec.narrow)  # rows of [norm(h); ...]: the first D columns are the identity
        if self.spec.deep:
            nn.init.zeros_(self.distance.weight)
        if self.spec.fuses:
            _begin(self.fuse, narrow=self.spec.narrow)
        if self.spec.hidden:
            nn.init.zeros_(self.mlp.down_proj.weight)
        if self.spec.narrow:
            nn.init.zeros_(self.up.weight)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def num_draft_parameters(self) -> int:
        """Those that a draft reads; the others are for positions that run deep."""
        return self.num_parameters - (sum(p.numel() for p in self.fuse.parameters()) if self.spec.fuses else 0)

    def deep_state(self, last: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """What the head is fed with, [..., d], from the final-norm state and the states at the taps, [..., D] each.

        d is the inner width, which is D unless the head is narrow."""
        if not self.spec.fuses:
            return last
        assert len(tapped) == len(self.spec.taps), "one state for each tap"
        normed = [norm(state) for norm, state in zip(self.tap_norms, tapped, strict=True)] if tapped else []
        fused: Tensor = self.fuse(torch.cat((last.to(self.state_norm.weight.dtype), *normed), -1))
        return fused

    def embed(self, states: Tensor, deep: Tensor | None = None, distances: Tensor | None = None) -> Tensor:
        """States at the checkpoint [T, D], deep states [T, d] and their distances [T] to what enters the block [T, d].

        A distance of 0 says that there is no deep state; the row of `deep` is then ignored."""
        if self.spec.kind == "identity":
            return states
        inputs = self.state_norm(states)
        if self.spec.deep:
            assert deep is not None, "this head is fed with the last deep state"
            assert distances is not None, "and with how far back that is"
            known = (distances > 0).unsqueeze(-1)
            deep = self.deep_norm(deep.masked_fill(~known, 0.0))  # before the norm: gradients must not see it either
            inputs = torch.cat((inputs, deep), -1) + self.distance(distances.clamp(max=self.spec.max_distance))
        mixed: Tensor = self.mix(inputs)
        return mixed + self.mlp(inputs) if self.spec.hidden else mixed

    @property
    def has_addends(self) -> bool:
        """Whether what `embed` gives is a sum of `addends`."""
        return self.spec.deep and not self.spec.hidden

    def addends(self, states: Tensor, deep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `embed` adds up, for whoever wants it at many distances: of states [..., D] and of deep states [..., d],
        both [..., d], and of every distance from 0 on, [max_distance + 1, d]. At distance 0 nothing is added of a deep
        state."""
        of_state, of_deep = self.mix.weight[:, : self.spec.width], self.mix.weight[:, self.spec.width :]
        mixed = nn.functional.linear(self.state_norm(states), of_state, self.mix.bias)
        fed = nn.functional.linear(self.deep_norm(deep), of_deep)
        return mixed, fed, nn.functional.linear(self.distance.weight, self.mix.weight)

    def refine(
        self, embedded: Tensor, positions: Tensor, attend: Attend | None = None, *, rows: Tensor | None = None
    ) -> Tensor:
        """What `embed` gave, [T, d], and positions [T], to what `widen` takes, [T, d]; with `rows` [N] only those."""
        if not self.spec.attends:
            return embedded if rows is None else embedded.index_select(0, rows)
        assert attend is not None, "a block head needs its attention"
        turned = self._rotations(positions, embedded.dtype)
        refined: Tensor = self.block(embedded, *turned, attend, self.kernels, rows)
        return refined

    def widen(self, refined: Tensor, states: Tensor) -> Tensor:
        """What `refine` gave, [T, d], and states at the checkpoint [T, D] to the features [T, D]."""
        if not self.spec.narrow:
            return refined
        widened: Tensor = self.skip_norm(states) + self.up(refined)
        return widened

    def keys_values(self, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [T, Hk, S] of the block for what `embed` gave, and nothing else of it."""
        _, key, value = self.block.project(
            self.block.attention_norm(embedded), *self._rotations(positions, embedded.dtype), self.kernels, query=False
        )
        return key, value

    def prepare(self, max_positions: int) -> None:
        """Keep the rotations of all positions up to there; call it once the head is cast and placed."""
        if self.spec.attends:
            weight = self.block.attention_norm.weight
            self._rotary_table = self._rotate(torch.arange(max_positions, device=weight.device), weight.dtype)

    @property
    def rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions, [P, S] each."""
        assert self._rotary_table is not None, "the head is prepared"
        return self._rotary_table

    def _rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [T, S] each, for halves that are rotated together."""
        if self._rotary_table is None:
            return self._rotate(positions, dtype)
        cos, sin = self._rotary_table
        return cos[positions], sin[positions]

    def _rotate(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.spec.head_size, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.spec.rope_theta ** (-steps / self.spec.head_size)
        angles = positions.float().unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class HeadBlock(nn.Module):
    """One decoder block: attention and SwiGLU, each on the normed state and added to it. Starts as the identity."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.inner_width
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.attention_norm = HeadRMSNorm(width, spec.norm_eps)
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.mlp_norm = HeadRMSNorm(width, spec.norm_eps)
        self.mlp = HeadMLP(width, spec.ffn, width)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(
        self,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        kernels: Kernels,
        rows: Tensor | None = None,
    ) -> Tensor:
        """With `rows` only those are returned, and only they go through what follows the attention."""
        query, key, value = self.project(self.attention_norm(states), cos, sin, kernels)
        assert query is not None
        attended = attend(query, key, value).flatten(-2)
        if rows is not None:
            states, attended = states.index_select(0, rows), attended.index_select(0, rows)
        states = states + self.o_proj(attended)
        refined: Tensor = states + self.mlp(self.mlp_norm(states))
        return refined

    def project(
        self, normed: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels, *, query: bool = True
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries (if asked for), keys and values of normed states [T, d], positions applied."""
        size = self.spec.head_size
        queries = kernels.rotary(self.q_proj(normed).unflatten(-1, (-1, size)), cos, sin) if query else None
        keys = kernels.rotary(self.k_proj(normed).unflatten(-1, (-1, size)), cos, sin)
        return queries, keys, self.v_proj(normed).unflatten(-1, (-1, size))


class HeadRMSNorm(nn.Module):
    """As Llama's; the attribute names are those that kernels are matched by."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.to(self.weight.dtype)  # in training they differ, and Torch's quick kernel wants one dtype
        return nn.functional.rms_norm(wide, self.weight.shape, self.weight, self.variance_epsilon)


class HeadMLP(nn.Module):
    """SwiGLU without biases; the attribute names are those that kernels are matched by."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, hidden, bias=False)
        self.up_proj = nn.Linear(inputs, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, outputs, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, states: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))
        return gated


def _begin(linear: nn.Linear, *, narrow: bool) -> None:
    """First weights of M or F: "take the first of the inputs", or a projection that keeps the size of its inputs."""
    if narrow:
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    else:
        nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)

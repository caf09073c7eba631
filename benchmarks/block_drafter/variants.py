"""Variants of the study, written `kind` followed by options: `block:layers=2:width=0.5:mix`, `head:width=0.25`.

    head     an exit head, which drafts one token at a time; with a width below 1 its block is narrow
    block    a drafter that proposes a block of tokens in one pass

Sizes are shares of the target's, so that a variant can be built for every target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.block_drafter.model import SEEDS, DrafterSpec
from tide_core.calibration.train.candidates import CandidateSpec
from tide_core.errors import ConfigError

KINDS = ("head", "block")
TARGETS = ("distribution", "text")
OPTIMISERS = ("muon", "adamw")
FLAGS = ("mix",)
ROUND = 16


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The sizes of a target that determine the shapes of drafters."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def of(cls, config: Any) -> TargetShape:
        heads = int(config.num_attention_heads)
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            int(config.hidden_size),
            int(config.intermediate_size),
            int(config.num_hidden_layers),
            heads,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
            float(getattr(config, "rms_norm_eps", 1e-5)),
        )

    def as_adapter(self) -> Any:
        """What `head_spec` reads of a model."""
        config = SimpleNamespace(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            rope_parameters={"rope_theta": self.rope_theta},
            rms_norm_eps=self.norm_eps,
        )
        return SimpleNamespace(config=config, num_layers=self.layers)

    def taps(self, num: int) -> tuple[int, ...]:
        """Layers at even distances over the depth; the last one is not among them."""
        return tuple(sorted({round(self.layers * place / (num + 1)) for place in range(1, num + 1)} - {0, self.layers}))


@dataclass(frozen=True, slots=True)
class Variant:
    """One drafter and how it is trained."""

    kind: str
    layers: int = 1
    """Of the drafter."""
    width: float = 1.0
    """Share of the target's width."""
    ffn: float = 1.0
    """Share of the target's feed-forward width, times `width`."""
    places: int = 8
    """Tokens of a block."""
    checkpoint: int = 2
    """Layers that the newest token has run; 0, for blocks only: its embedding."""
    taps: int = 2
    """Number of layers, at even distances, whose states are fused with the final one."""
    mix: bool = False
    """Every layer of the drafter has its own mix of these states."""
    seed: str = "all"
    target: str = "distribution"
    """What a block learns: the target's distribution, or its text."""
    optimiser: str = "muon"
    lr: float | None = None
    """None: the default of the optimiser."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        kind, *options = text.strip().split(":")
        values: dict[str, Any] = {}
        try:
            for option in options:
                key, given, value = option.partition("=")
                if key in values or bool(given) == (key in FLAGS):
                    raise ValueError(option)
                values[key] = _READ[key](value) if given else True
            variant = cls(kind, **values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("variant", text, EXPECTED) from error
        variant._check(text)
        return variant

    def _check(self, text: str) -> None:
        choices = (
            (self.kind, KINDS),
            (self.seed, SEEDS),
            (self.target, TARGETS),
            (self.optimiser, OPTIMISERS),
        )
        sound = all(value in allowed for value, allowed in choices)
        sound = sound and 0 < self.width <= 1 and 0 < self.ffn <= 4 and self.layers > 0 and 0 <= self.taps <= 16
        sound = sound and 2 <= self.places <= 64 and self.checkpoint >= (1 if self.kind == "head" else 0)
        if self.kind == "head":  # options of blocks do not apply
            plain = Variant("head")
            own = ("layers", "places", "mix", "seed", "target", "ffn")
            sound = sound and all(getattr(self, name) == getattr(plain, name) for name in own)
        if not sound:
            raise ConfigError("variant", text, EXPECTED)

    @property
    def name(self) -> str:
        """As `parse` reads it; without options that are not set."""
        parts = [self.kind]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if field.name in FLAGS else f"{field.name}={value}")
        return ":".join(parts)

    def inner(self, shape: TargetShape) -> int:
        return shape.hidden if self.width == 1 else _rounded(shape.hidden * self.width)

    def drafter(self, shape: TargetShape) -> DrafterSpec:
        """The shape of a block drafter in a target."""
        return DrafterSpec(
            width=shape.hidden,
            inner=self.inner(shape),
            layers=self.layers,
            places=self.places,
            checkpoint=self.checkpoint,
            taps=shape.taps(self.taps),
            own_mix=self.mix,
            seed=self.seed,
            rope_theta=shape.rope_theta,
            norm_eps=shape.norm_eps,
            **self._block(shape),
        )

    def candidate(self, shape: TargetShape) -> CandidateSpec:
        """An exit head as a calibration has it."""
        inner = self.inner(shape)
        return CandidateSpec(
            self.checkpoint,
            "block",
            True,
            ffn=_rounded(shape.intermediate * self.width) if self.width < 1 else None,
            lr=self.lr,
            muon=self.optimiser == "muon",
            taps=tuple(tap for tap in shape.taps(self.taps) if tap > self.checkpoint),
            inner=inner if self.width < 1 else None,
        )

    def _block(self, shape: TargetShape) -> dict[str, int]:
        heads = shape.heads if self.width == 1 else max(1, round(shape.heads * self.width))
        group = shape.heads // shape.kv_heads
        return {
            "num_heads": heads,
            "num_kv_heads": heads // group if heads % group == 0 else heads,
            "head_size": shape.head_size,
            "ffn": shape.intermediate
            if self.width * self.ffn == 1
            else _rounded(shape.intermediate * self.width * self.ffn),
        }


def _rounded(size: float) -> int:
    return max(ROUND, round(size / ROUND) * ROUND)


_READ: dict[str, Callable[[str], Any]] = {
    "layers": int,
    "width": float,
    "ffn": float,
    "places": int,
    "checkpoint": int,
    "taps": int,
    "seed": str,
    "target": str,
    "optimiser": str,
    "lr": float,
}
EXPECTED = (
    "block[:layers=N][:width=SHARE][:ffn=SHARE][:places=N][:checkpoint=N][:taps=N][:mix][:seed=none|first|all]"
    "[:target=distribution|text], or head[:width=SHARE][:checkpoint=N][:taps=N]; each with [:optimiser=muon|adamw]"
    "[:lr=X]"
)

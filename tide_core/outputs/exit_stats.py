"""The exit histogram and the counts it is made of. No torch here.

The exit layer of a token is where its value was decided, not what was saved. A draft that is verified has
an early exit layer, and its deep layers ran all the same, in one pass with others. So layers run and deep passes are
counted apart, and `layers_per_token` is of layers that truly ran, drafts that were dropped included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tide_core.errors import ConfigError
from tide_core.request import Audit

FROM_TEXT = 0
"""Exit layer of a token that was drafted from text that stands somewhere already: no layer proposed it."""


class ExitStats:
    """Counts since the beginning; not locked: one thread writes."""

    __slots__ = (
        "accepted",
        "audits",
        "deep_passes",
        "drafts",
        "layers_run",
        "non_finite_scores",
        "num_layers",
        "tokens_per_layer",
    )

    def __init__(self, num_layers: int) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ConfigError("num_layers", num_layers, "an integer of at least 1")
        self.num_layers = num_layers
        self.tokens_per_layer: Counter[int] = Counter()
        """Output tokens by exit layer; those that ran all layers are at `num_layers`."""
        self.audits: Counter[Audit] = Counter()
        """Output tokens by audit."""
        self.layers_run = 0
        self.deep_passes = 0
        """Passes through the last layer that gave a row its tokens, counted for each row."""
        self.drafts = 0
        self.accepted = 0
        """Drafts that became output."""
        self.non_finite_scores = 0

    def record(
        self,
        exits: Iterable[tuple[int, Audit]],
        layers_run: int,
        deep_passes: int = 0,
        drafts: int = 0,
        accepted: int = 0,
        non_finite_scores: int = 0,
    ) -> None:
        """Add what one row did in one step: exit layer and audit of each token it gained, and what ran for it."""
        exits = list(exits)
        ran = layers_run, deep_passes, drafts, accepted, non_finite_scores
        self.add(Counter([layer for layer, _ in exits]), Counter([audit for _, audit in exits]), ran)

    def check(self, layers: Iterable[int]) -> None:
        """Refuse exit layers that cannot be."""
        for layer in layers:
            if not FROM_TEXT <= layer <= self.num_layers:
                raise ConfigError("exit_layer", layer, f"a layer in {FROM_TEXT}..{self.num_layers}")

    def add(
        self, per_layer: Mapping[int, int], audits: Mapping[Audit, int], ran: Sequence[int], times: int = 1
    ) -> None:
        """Add what so many rows did: how many tokens of each exit layer and audit they gained, and what ran for them,
        in the order of `record`."""
        self.check(per_layer)
        for layer, num in per_layer.items():
            self.tokens_per_layer[layer] += num * times
        for audit, num in audits.items():
            self.audits[audit] += num * times
        layers_run, deep_passes, drafts, accepted, non_finite_scores = ran
        self.layers_run += layers_run * times
        self.deep_passes += deep_passes * times
        self.drafts += drafts * times
        self.accepted += accepted * times
        self.non_finite_scores += non_finite_scores * times

    @property
    def total_tokens(self) -> int:
        return self.tokens_per_layer.total()

    @property
    def exits_per_layer(self) -> dict[int, int]:
        """Tokens that left early, by the layer after which they did."""
        return {
            layer: self.tokens_per_layer[layer] for layer in sorted(self.tokens_per_layer) if layer < self.num_layers
        }

    @property
    def total_exited(self) -> int:
        return sum(self.exits_per_layer.values())

    @property
    def remaining_tokens(self) -> int:
        """Tokens decided after all layers."""
        return self.tokens_per_layer[self.num_layers]

    @property
    def exit_rate(self) -> float:
        return _ratio(self.total_exited, self.total_tokens)

    @property
    def layers_per_token(self) -> float:
        return _ratio(self.layers_run, self.total_tokens)

    @property
    def tokens_per_deep_pass(self) -> float:
        return _ratio(self.total_tokens, self.deep_passes)

    @property
    def acceptance(self) -> float | None:
        """Share of drafts that became output; None without drafts."""
        return self.accepted / self.drafts if self.drafts else None

    def summary(self) -> dict[str, Any]:
        """All of it as JSON values; layers are strings, as JSON would have them."""
        return {
            "total_tokens": self.total_tokens,
            "total_exited": self.total_exited,
            "exit_rate": self.exit_rate,
            "exits_per_layer": {str(layer): count for layer, count in self.exits_per_layer.items()},
            "remaining_tokens": self.remaining_tokens,
            "num_layers": self.num_layers,
            "layers_run": self.layers_run,
            "layers_per_token": self.layers_per_token,
            "deep_passes": self.deep_passes,
            "tokens_per_deep_pass": self.tokens_per_deep_pass,
            "drafts": self.drafts,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "audits": {audit.value: self.audits[audit] for audit in Audit},
            "non_finite_scores": self.non_finite_scores,
        }

    def __str__(self) -> str:
        """The histogram for people."""
        lines = [f"Total tokens: {self.total_tokens}, Exited: {self.total_exited} ({self.exit_rate:.1%})"]
        for layer, count in self.exits_per_layer.items():
            lines.append(f"  Layer {layer}: {count} exits ({count / self.total_tokens:.1%})")
        lines.append(f"  Decided after all {self.num_layers} layers: {self.remaining_tokens}")
        ran = f"  Layers run per token: {self.layers_per_token:.1f}"
        if self.deep_passes:
            ran += f", tokens per deep pass: {self.tokens_per_deep_pass:.2f}"
        if self.acceptance is not None:
            ran += f", drafts accepted: {self.acceptance:.1%}"
        return "\n".join([*lines, ran])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

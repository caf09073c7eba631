"""Settings of a calibration, for all its stages: frozen, validated, without unknown keys. No torch here.

Device and dtype are not settings: the caller loads the model. Everything else that may change a byte of the artefact
is, so the digest of the settings identifies a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tide_core.errors import ConfigError, refuse_unknown

HEADS = ("identity", "affine", "mlp", "block")
OPTIMISERS = ("muon", "adamw")
SELF_DATA = "self"
_BUDGET = "no such key: it was removed; mode bounded needs no calibration, a request names its epsilon and margin"
REMOVED = {
    "compare_steps": "no such key: it was removed; `candidates` lists all heads, simple ones too",
    "epsilons": _BUDGET,
    "delta": _BUDGET,
}
"""Settings of earlier versions, and why they are gone."""


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """Defaults are for the demo model on one data-centre GPU."""

    # dataset
    data: str = SELF_DATA
    """`self`, a .txt, .jsonl or .parquet file or a folder of them, or a `datasets` name: name/config:split:column."""
    num_samples: int = 16384
    """Maximum number of prompts or documents, all parts together."""
    seed: int = 0
    """Seed of every random choice: the split, the sampled answers, the order of training."""
    calibration_share: float = 0.14
    """Share of all sequences on which the stated figures are measured; nothing else uses them."""
    test_share: float = 0.06
    """Share of all sequences on which exit, threshold and draft length are chosen."""
    min_calibration: int = 64
    """Minimum number of sequences in the calibration part, if they are at most a third of all."""
    min_test: int = 32
    """Minimum number of sequences in the test part, if they are at most a quarter of all."""
    self_prompt_tokens: int = 96
    """Maximum tokens of a prompt that the model writes."""

    # collect
    max_prompt_tokens: int = 192
    """Maximum tokens of a prompt; a longer one is cut."""
    max_new_tokens: int = 224
    """Maximum tokens of the model's answer to a prompt."""
    text_tokens: int = 512
    """Maximum tokens of a piece of a document."""
    text_share: float = 0.5
    """Share of the train documents used as they are; the model continues the beginnings of the others."""
    greedy_share: float = 0.7
    """Share of the train part that is decoded greedily; the other parts always are."""
    temperature: float = 0.8
    """Of sampled answers."""
    top_p: float = 0.95
    """Of sampled answers."""
    generation_batch: int | None = None
    """Sequences per generation batch and per shard; None: 2048 on cuda, 8 on a CPU."""
    shortlist_size: int | None = 8192
    """Tokens that an exit head can emit; None: as many as `shortlist_coverage` needs."""
    shortlist_coverage: float = 0.97
    """Share of the emitted tokens that the shortlist must contain if no size is set."""

    # train
    checkpoints: tuple[int, ...] = ()
    """Checkpoint layers, counted as layers that have run; none: a 15th of the model's layers, and in a model wider than
    1024 also the first."""
    heads: tuple[str, ...] = ("block",)
    """Head kinds to train at every checkpoint."""
    deep_inputs: bool = True
    """Whether heads take the last deep state as input."""
    taps: tuple[int, ...] | None = None
    """Layers whose states join the last one in the deep state; None: those at one third and two thirds of the depth."""
    head_hidden: int | None = None
    """Width of a head's SwiGLU; None: the model's feed-forward width for mlp heads, and no SwiGLU for others."""
    head_inner: int | None = None
    """Width at which a block works, 0 for the model's; None: the model's, and beyond 1024 also less, chosen by cost."""
    head_ffn: int | None = None
    """Width of the block's own SwiGLU; None: the model's, less in proportion for a narrow block."""
    candidates: tuple[str, ...] = ()
    """Heads one by one, such as 2:block:deep:muon; none: every kind of `heads` at every checkpoint."""
    router_bottleneck: int = 128
    """Width of the router's hidden layer."""
    steps: int = 3200
    """Training steps."""
    minutes: float | None = None
    """Time for the whole calibration, with the model loaded; training ends early if it must. None: no limit."""
    batch_tokens: int = 8192
    """Tokens of one training step, padding included."""
    loss_positions: int = 512
    """Maximum positions of a sequence in the loss of one step."""
    optimiser: str = "muon"
    """muon, or adamw."""
    learning_rate: float | None = None
    """None: the default of the optimiser."""
    warmup_steps: int = 50
    """First steps, in which the learning rate rises."""
    final_learning_rate: float = 0.03
    """Share of the learning rate at the last step of the linear decay."""
    weight_decay: float = 0.0
    """Of the optimiser."""
    max_drafts: int = 5
    """Maximum number of drafts in a row for which heads are trained and measured."""

    # fast
    fast_layers: tuple[int, ...] | None = None
    """Exit layers of mode fast behind the draft head's; None: those at one third and two thirds of the depth."""
    fast_hidden: int | None = None
    """Width of the SwiGLU of these exits' heads; None: the model's feed-forward width, at most 1024."""
    fast_rank: int = 64
    """Rank of the skip maps, which predict the states of skipped layers."""
    fast_steps: int | None = None
    """Training steps of the fast exits, 0 for no fast exits; None: a sixteenth of `steps`. More bring little."""
    fast_epsilons: tuple[float, ...] = (0.05, 0.1)
    """Shares of tokens that may differ from full depth, for each of which a contract is certified if one can be."""
    fast_delta: float = 0.05
    """Probability that any of these certificates is wrong."""
    fast_answers: int = 256
    """Maximum number of answers on which a contract is certified."""
    fast_tokens: int = 128
    """Maximum tokens of these answers: a contract says nothing of longer ones."""

    # measure
    measure_batches: tuple[int, ...] = (1, 8, 32)
    """Batch sizes at which the published exits are timed against full depth; none: no timing."""
    measure_seconds: float = 60.0
    """Maximum time for the timing; a batch size that could not end in time is left out and named in the report."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, str) or not self.data.strip():
            raise ConfigError("data", self.data, "self, a file or folder, or a datasets name")
        for name, limits in _INTEGERS.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _integer(name, getattr(self, name), *limits)
        for name, bounds in _NUMBERS.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _number(name, getattr(self, name), *bounds)
        if self.optimiser not in OPTIMISERS:
            raise ConfigError("optimiser", self.optimiser, f"one of {', '.join(OPTIMISERS)}")
        if self.calibration_share + self.test_share > 0.9:
            raise ConfigError("calibration_share", self.calibration_share, "with test_share at most 0.9")
        if not isinstance(self.deep_inputs, bool):
            raise ConfigError("deep_inputs", self.deep_inputs, "true or false")
        self._check_tuples()

    def _check_tuples(self) -> None:
        layers, heads, batches = self.checkpoints, self.heads, self.measure_batches
        rising = {"taps": self.taps, "fast_layers": self.fast_layers}
        listed = {"checkpoints": layers, **{name: each for name, each in rising.items() if each is not None}}
        for name, counts in listed.items():
            whole = isinstance(counts, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in counts)
            if not whole or any(i < 1 for i in counts) or list(counts) != sorted(set(counts)):
                raise ConfigError(name, counts, "rising layer counts of at least 1, each below the model's")
        if not isinstance(heads, tuple) or not heads or len(set(heads)) < len(heads) or not set(heads) <= set(HEADS):
            raise ConfigError("heads", heads, f"different ones of {', '.join(HEADS)}, at least one")
        if not isinstance(self.candidates, tuple) or any(not isinstance(text, str) for text in self.candidates):
            raise ConfigError("candidates", self.candidates, "texts such as 2:block:deep:muon")
        if not isinstance(batches, tuple) or len(set(batches)) < len(batches):
            raise ConfigError("measure_batches", batches, "different batch sizes, or none")
        for batch in batches:
            _integer("measure_batches", batch, 1, 1024)
        epsilons = self.fast_epsilons
        if not isinstance(epsilons, tuple) or list(epsilons) != sorted(set(epsilons)):
            raise ConfigError("fast_epsilons", epsilons, "rising shares, none twice, or none")
        for epsilon in epsilons:
            _number("fast_epsilons", epsilon, 0.001, 0.5)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CalibrationConfig:
        """Build from JSON values; the error for an unknown key names the nearest known one."""
        for name in REMOVED.keys() & values.keys():
            raise ConfigError(name, values[name], REMOVED[name])
        refuse_unknown("calibration setting", values, [f.name for f in fields(cls)])
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)

    def to_mapping(self) -> dict[str, Any]:
        """JSON values, as `from_mapping` takes them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the settings as canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_mapping(), sort_keys=True).encode()).hexdigest()

    @property
    def num_fast_steps(self) -> int:
        """Training steps of the fast exits."""
        return max(1, self.steps // 16) if self.fast_steps is None else self.fast_steps

    def checkpoints_for(self, num_layers: int) -> tuple[int, ...]:
        """The checkpoint layers in a model of `num_layers` layers."""
        if num_layers < 2:
            raise ConfigError("model layers", num_layers, "at least 2: a checkpoint is never the last layer")
        if not self.checkpoints:
            return (min(max(1, round(num_layers / 15)), num_layers - 1),)
        if self.checkpoints[-1] >= num_layers:
            raise ConfigError("checkpoints", self.checkpoints, f"layers below {num_layers}, the model's last")
        return self.checkpoints


_OPTIONAL = {
    "generation_batch",
    "shortlist_size",
    "head_hidden",
    "head_inner",
    "head_ffn",
    "learning_rate",
    "minutes",
    "fast_hidden",
    "fast_steps",
}
_INTEGERS = {
    "num_samples": (3, 2**24),
    "seed": (0, 2**63 - 1),
    "min_calibration": (1, 2**20),
    "min_test": (1, 2**20),
    "self_prompt_tokens": (4, 4096),
    "max_prompt_tokens": (4, 2**20),
    "max_new_tokens": (1, 2**20),
    "text_tokens": (4, 2**20),
    "generation_batch": (1, 2**16),
    "shortlist_size": (2, 2**20),
    "head_hidden": (0, 2**20),
    "head_inner": (0, 2**20),
    "head_ffn": (1, 2**20),
    "router_bottleneck": (1, 2**16),
    "steps": (1, 2**24),
    "batch_tokens": (1, 2**24),
    "loss_positions": (1, 2**20),
    "warmup_steps": (0, 2**20),
    "max_drafts": (1, 64),
    "fast_hidden": (1, 2**20),
    "fast_rank": (1, 4096),
    "fast_steps": (0, 2**24),
    "fast_answers": (1, 2**20),
    "fast_tokens": (1, 2**20),
}
_NUMBERS = {
    "calibration_share": (0.001, 0.9),
    "test_share": (0.001, 0.9),
    "text_share": (0.0, 1.0),
    "greedy_share": (0.0, 1.0),
    "temperature": (0.01, 10.0),
    "top_p": (0.01, 1.0),
    "shortlist_coverage": (0.01, 1.0),
    "learning_rate": (1e-9, 10.0),
    "final_learning_rate": (0.0, 1.0),
    "weight_decay": (0.0, 10.0),
    "fast_delta": (1e-6, 0.5),
    "measure_seconds": (0.001, 86400.0),
    "minutes": (0.01, 100000.0),
}


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer in {low}..{high}{' or none' if name in _OPTIONAL else ''}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(name, value, f"a number in {low}..{high}")

"""Settings of a calibration, for all its stages: frozen, checked at birth, unknown keys refused. No torch here.

Where to run and in what dtype is not in here: the caller loads the model. Every other thing that may change a byte of
the artefact is, so a run is told from another by the digest of its settings.
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


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """The defaults are for the demo model on one data-centre GPU."""

    # dataset
    data: str = SELF_DATA
    """`self`, a .txt, .jsonl or .parquet file or a folder of them, or a `datasets` name: name/config:split:column."""
    num_samples: int = 16384
    """Most prompts or documents, all parts together."""
    seed: int = 0
    """Of every draw: the split, the sampled answers, the order of training."""
    calibration_share: float = 0.14
    """Of all sequences, to certify thresholds on; nothing else sees them."""
    test_share: float = 0.06
    """Of all sequences, to choose exit, threshold and draft length on."""
    min_calibration: int = 64
    """Sequences of the calibration part, as far as a third of all suffices."""
    min_test: int = 32
    """The same for the test part."""
    self_prompt_tokens: int = 96
    """Longest prompt that the model makes up for itself."""

    # collect
    max_prompt_tokens: int = 192
    """Longest prompt; a longer one is cut."""
    max_new_tokens: int = 224
    """Longest answer of the model to a prompt."""
    text_tokens: int = 512
    """Longest piece of a document."""
    text_share: float = 0.5
    """Share of the train documents taken as they are; the model continues the beginnings of the others."""
    greedy_share: float = 0.7
    """Share of the train part that is decoded greedily; the other parts always are."""
    temperature: float = 0.8
    """Of the answers that are sampled."""
    top_p: float = 0.95
    """Of the answers that are sampled."""
    generation_batch: int | None = None
    """Sequences generated at once, and in one shard; None takes 2048 on cuda and 8 on a CPU."""
    shortlist_size: int | None = 8192
    """Tokens that an exit head can say; None takes as many as `shortlist_coverage` needs."""
    shortlist_coverage: float = 0.97
    """Share of the emitted tokens that the shortlist must hold where its size is not given."""

    # train
    checkpoints: tuple[int, ...] = ()
    """Checkpoint layers, counted as layers that have run; none takes a 15th of the model's."""
    heads: tuple[str, ...] = ("block",)
    """Head kinds to train at every checkpoint."""
    deep_inputs: bool = True
    """Whether heads are fed with the last deep state."""
    taps: tuple[int, ...] | None = None
    """Layers whose states go into the deep state beside the last one; None takes a third and two thirds of the way."""
    head_hidden: int | None = None
    """Width of a head's SwiGLU; None takes the model's own feed-forward width for mlp heads, and none for others."""
    head_ffn: int | None = None
    """Width of the block's own SwiGLU; None takes the model's own."""
    candidates: tuple[str, ...] = ()
    """Heads one by one, such as 2:block:deep:muon; none takes every kind of `heads` at every checkpoint."""
    compare_steps: int = 100
    """Steps of training for plain heads along the depth, which show what the exits are worth; 0 for none."""
    router_bottleneck: int = 128
    """Width of the router's hidden layer."""
    steps: int = 3200
    """Of training."""
    batch_tokens: int = 8192
    """Of one training step, padding included."""
    loss_positions: int = 512
    """Most positions of a sequence that one step puts into the loss."""
    optimiser: str = "muon"
    """muon, or adamw."""
    learning_rate: float | None = None
    """None takes one that suits the optimiser."""
    warmup_steps: int = 50
    """First steps, in which the learning rate rises."""
    final_learning_rate: float = 0.03
    """Share of the learning rate at the last step of the linear decay."""
    weight_decay: float = 0.0
    """Of the optimiser."""
    max_drafts: int = 5
    """Longest draft that heads are trained and measured for."""

    # risk
    epsilons: tuple[float, ...] = (0.01, 0.02, 0.05)
    """Bounds on the disagreement per token to find thresholds for."""
    delta: float = 0.05
    """Each bound holds with confidence 1 - delta."""

    # measure
    measure_batches: tuple[int, ...] = (1, 8, 32)
    """Batch sizes at which the published exits are timed against full depth; none: nothing is timed."""
    measure_seconds: float = 60.0
    """Most time for that; a batch size that could not be done by then is not begun, and the report says so."""

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
        layers, heads, epsilons, batches = self.checkpoints, self.heads, self.epsilons, self.measure_batches
        for name, counts in (("checkpoints", layers), ("taps", () if self.taps is None else self.taps)):
            whole = isinstance(counts, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in counts)
            if not whole or any(i < 1 for i in counts) or list(counts) != sorted(set(counts)):
                raise ConfigError(name, counts, "rising layer counts of at least 1, each below the model's")
        if not isinstance(heads, tuple) or not heads or len(set(heads)) < len(heads) or not set(heads) <= set(HEADS):
            raise ConfigError("heads", heads, f"different ones of {', '.join(HEADS)}, at least one")
        if not isinstance(self.candidates, tuple) or any(not isinstance(text, str) for text in self.candidates):
            raise ConfigError("candidates", self.candidates, "texts such as 2:block:deep:muon")
        if not isinstance(epsilons, tuple) or len(set(epsilons)) < len(epsilons):
            raise ConfigError("epsilons", epsilons, "different numbers above 0 and below 1")
        for epsilon in epsilons:
            _number("epsilons", epsilon, 1e-6, 0.999999)
        if not isinstance(batches, tuple) or len(set(batches)) < len(batches):
            raise ConfigError("measure_batches", batches, "different batch sizes, or none")
        for batch in batches:
            _integer("measure_batches", batch, 1, 1024)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CalibrationConfig:
        """Build from JSON values; an unknown key names itself and the nearest known one."""
        refuse_unknown("calibration setting", values, [f.name for f in fields(cls)])
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)

    def to_mapping(self) -> dict[str, Any]:
        """JSON values; `from_mapping` takes them back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the settings as canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_mapping(), sort_keys=True).encode()).hexdigest()

    def checkpoints_for(self, num_layers: int) -> tuple[int, ...]:
        """The checkpoint layers in a model of that many layers."""
        if num_layers < 2:
            raise ConfigError("model layers", num_layers, "at least 2: a checkpoint is never the last layer")
        if not self.checkpoints:
            return (min(max(1, round(num_layers / 15)), num_layers - 1),)
        if self.checkpoints[-1] >= num_layers:
            raise ConfigError("checkpoints", self.checkpoints, f"layers below {num_layers}, the model's last")
        return self.checkpoints


_OPTIONAL = {"generation_batch", "shortlist_size", "head_hidden", "head_ffn", "learning_rate"}
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
    "head_ffn": (1, 2**20),
    "router_bottleneck": (1, 2**16),
    "steps": (1, 2**24),
    "compare_steps": (0, 2**24),
    "batch_tokens": (1, 2**24),
    "loss_positions": (1, 2**20),
    "warmup_steps": (0, 2**20),
    "max_drafts": (1, 64),
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
    "delta": (1e-9, 0.999999),
    "measure_seconds": (0.001, 86400.0),
}


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer in {low}..{high}{' or none' if name in _OPTIONAL else ''}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(name, value, f"a number in {low}..{high}")

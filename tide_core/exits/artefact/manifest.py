"""What an artefact says of itself: plain records, each checked at birth.

A threshold is a router score, 0..1; one above 1 lets nothing pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tide_core import __version__
from tide_core.errors import ArtefactError
from tide_core.exits.artefact.fast import FastExits
from tide_core.exits.artefact.heads import HeadSpec
from tide_core.exits.artefact.strict_json import OPTIONAL
from tide_core.identity import ModelIdentity

FORMAT = "tide-artefact"
FORMAT_VERSION = 1
NORM = "final norm of the model over head features"
MANIFEST_FILE = "manifest.json"
HEADS_FILE = "heads.safetensors"
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_FILE_BYTES = 4 * 2**30
MAX_DRAFTS = 64
MAX_COUNT = 2**53

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FastPoint:
    """A threshold for mode `fast` with one exit, as artefacts without `FastExits` have it: estimated on teacher-forced
    text, certified by nothing."""

    threshold: float
    disagreement: float
    layers_per_token: float
    num_sequences: int

    def __post_init__(self) -> None:
        _number("threshold", self.threshold, 0, 1e9)
        _number("disagreement", self.disagreement, 0, 1)
        _number("layers_per_token", self.layers_per_token, 0, 1e9)
        _integer("num_sequences", self.num_sequences, 1, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An exit: where it is, what its modules look like, and what was measured of it."""

    layer: int
    """Layers that have run there."""
    head: HeadSpec
    router_bottleneck: int
    acceptance: tuple[float, ...]
    """[j - 1]: how often a draft at distance j is right, where it was drafted and all before it were right."""
    draft_threshold: float
    """Drafting goes on while the router's score is at least this."""
    fast: FastPoint | None = None

    def __post_init__(self) -> None:
        _integer("layer", self.layer, 1, 2**16)
        _integer("router_bottleneck", self.router_bottleneck, 1, 2**16)
        _tuple("acceptance", self.acceptance)
        for distance, value in enumerate(self.acceptance, 1):
            _number(f"acceptance[{distance - 1}]", value, 0, 1)
        _number("draft_threshold", self.draft_threshold, 0, 1e9)


@dataclass(frozen=True, slots=True)
class DataSummary:
    """The text an artefact was calibrated on."""

    kind: str
    digest: str
    num_train_tokens: int
    num_train_sequences: int
    num_calibration_sequences: int
    num_test_sequences: int

    def __post_init__(self) -> None:
        _text("kind", self.kind)
        _sha256("digest", self.digest)
        for name in ("num_train_tokens", "num_train_sequences", "num_calibration_sequences", "num_test_sequences"):
            _integer(name, getattr(self, name), 0, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file beside the manifest."""

    sha256: str
    size: int

    def __post_init__(self) -> None:
        _sha256("sha256", self.sha256)
        _integer("size", self.size, 0, MAX_FILE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of an artefact beside its tensors."""

    format_version: int = FORMAT_VERSION
    tool_version: str = __version__
    model: ModelIdentity
    norm: str = NORM
    """The convention by which features become logits."""
    checkpoints: tuple[Checkpoint, ...]
    """By rising layer."""
    max_drafts: int
    shortlist_size: int
    shortlist_coverage: float
    """Share of the model's own tokens that are in the shortlist."""
    data: DataSummary
    fast: FastExits | None = field(default=None, metadata=OPTIONAL)
    """The exits of mode `fast`; None in artefacts made before there were any."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every file but the manifest; filled in by saving."""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ArtefactError("format_version", self.format_version, f"{FORMAT_VERSION}, the one this version reads")
        _text("tool_version", self.tool_version)
        if self.norm != NORM:
            raise ArtefactError("norm", self.norm, f"{NORM!r}, the one convention this version knows")
        _check_model(self.model)
        _integer("max_drafts", self.max_drafts, 1, MAX_DRAFTS)
        _integer("shortlist_size", self.shortlist_size, 2, self.model.vocab_size)
        _number("shortlist_coverage", self.shortlist_coverage, 0, 1)
        self._check_checkpoints()
        if self.fast is not None:
            self.fast.check(self.checkpoints[-1].layer, self.model.num_layers, self.model.width)
            if len(self.checkpoints) > 1:
                raise ArtefactError("fast", "fast exits", "one checkpoint: the exits of mode fast stand behind it")
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST_FILE:
                raise ArtefactError("files", name, f"plain names of files, other than {MANIFEST_FILE}")

    def _check_checkpoints(self) -> None:
        _tuple("checkpoints", self.checkpoints)
        if not self.checkpoints:
            raise ArtefactError("checkpoints", "none", "at least one")
        before = 0
        for index, checkpoint in enumerate(self.checkpoints):
            where, layer = f"checkpoints[{index}]", checkpoint.layer
            if layer >= self.model.num_layers:
                expected = f"below the model's {self.model.num_layers} layers: the last one is no exit"
                raise ArtefactError(f"{where}.layer", layer, expected)
            if layer <= before:
                raise ArtefactError(f"{where}.layer", layer, f"above {before}: layers rise and none comes twice")
            if checkpoint.head.width != self.model.width:
                raise ArtefactError(f"{where}.head.width", checkpoint.head.width, f"the model's {self.model.width}")
            if len(checkpoint.acceptance) < self.max_drafts:
                expected = f"at least {self.max_drafts} numbers, one for each of max_drafts"
                raise ArtefactError(f"{where}.acceptance", checkpoint.acceptance, expected)
            before = layer
        for index, checkpoint in enumerate(self.checkpoints):
            taps = checkpoint.head.taps
            if any(not before < tap < self.model.num_layers for tap in taps):
                expected = f"above the last checkpoint layer, {before}, and below the model's {self.model.num_layers}"
                raise ArtefactError(f"checkpoints[{index}].head.taps", taps, expected)


def _check_model(model: ModelIdentity) -> None:
    for name in ("name", "architecture"):
        _text(f"model.{name}", getattr(model, name))
    for name in ("num_layers", "width", "vocab_size"):
        _integer(f"model.{name}", getattr(model, name), 1, 2**24)
    for name in ("config_sha256", "tokenizer_sha256"):
        _sha256(f"model.{name}", getattr(model, name))
    if model.weights_sha256 is not None:
        _sha256("model.weights_sha256", model.weights_sha256)
    if model.revision is not None:
        _text("model.revision", model.revision)
    if model.weights_sha256 is None and not model.weights_sample:
        raise ArtefactError("model.weights_sample", "none", "values of the weights, where their digest is not known")
    for name, values in model.weights_sample.items():
        for value in values:
            _number(f"model.weights_sample[{name!r}]", value, -math.inf, math.inf)
    _text("model.dtype", model.dtype)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArtefactError(name, value, f"an integer in {low}..{high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else value
    if not math.isfinite(number) or not low <= number <= high:
        bounds = "" if math.isinf(high) else f" in {low:g}..{high:g}"
        raise ArtefactError(name, value, f"a finite number{bounds}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 500 or not value.isprintable():
        raise ArtefactError(name, value, "a text of 1 to 500 printable characters")


def _sha256(name: str, value: object) -> None:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ArtefactError(name, value, "a SHA-256 in 64 small hexadecimal digits")


def _tuple(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ArtefactError(name, value, "a tuple")

"""Candidates: the exit heads that a calibration trains together, their shapes and their initial weights.

A candidate is written `layer:kind`, followed by its options: `2:block:deep:muon:ffn=1536:taps=10+20`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tide_core.calibration.config import CalibrationConfig
from tide_core.disk import write_whole
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import HEAD_KINDS, ExitHead, HeadSpec
from tide_core.exits.artefact.router import Router
from tide_core.models.adapter import ModelAdapter
from tide_core.models.quantised import weight_of

EXPECTED = "layer:kind[:deep][:muon][:hidden=N][:inner=N][:ffn=N][:lr=X][:taps=N+N or 0], as in 2:block:deep:muon"
WIDE_FROM = 1025
"""Model width from which narrow blocks are considered; a block of a narrower model costs little at its full width."""
WIDTH_STEP = 64
NARROW_HEAD_SIZE = 64
"""Of the attention in a narrow block: one that all kernels are fast with."""
_FLAGS = ("deep", "muon")


def _read_taps(text: str) -> tuple[int, ...]:
    """Layers with plus signs between them; 0 means none."""
    return () if text == "0" else tuple(int(layer) for layer in text.split("+"))


_SIZES: dict[str, Callable[[str], Any]] = {
    "hidden": int,
    "inner": int,
    "ffn": int,
    "lr": float,
    "taps": _read_taps,
}


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """One head at one layer, and how to train it."""

    layer: int
    """Layers that have run."""
    kind: str
    deep: bool = False
    """Takes the last deep state as input."""
    hidden: int | None = None
    """Width of the head's SwiGLU, 0 for none; None takes the model's feed-forward width for an mlp head, else none."""
    ffn: int | None = None
    """Width of the block's own SwiGLU; None takes the model's feed-forward width, or as much of it as the block has of
    the model's width."""
    lr: float | None = None
    """None takes that of the configuration."""
    muon: bool = False
    """Matrices are trained with Muon instead of AdamW."""
    taps: tuple[int, ...] | None = None
    """Layers whose states go into the deep state; None takes `default_taps`."""
    inner: int | None = None
    """Width at which a block works; None and 0 take the model's."""

    @classmethod
    def parse(cls, text: str) -> CandidateSpec:
        layer, _, rest = text.partition(":")
        kind, *extras = rest.split(":")
        values: dict[str, Any] = {}
        try:
            for extra in extras:
                key, given, value = extra.partition("=")
                if key in values or key not in (_SIZES if given else _FLAGS):
                    raise ValueError(extra)
                values[key] = _SIZES[key](value) if given else True
            spec = cls(int(layer), kind, **values)
        except ValueError as error:
            raise ConfigError("candidate", text, EXPECTED) from error
        if kind not in HEAD_KINDS or spec.layer < 1:
            raise ConfigError("candidate", text, EXPECTED)
        return spec

    @property
    def name(self) -> str:
        """As `parse` reads it; without options that are not set."""
        flags = [key for key in _FLAGS if getattr(self, key)]
        sizes = [f"{key}={getattr(self, key)}" for key in _SIZES if key != "taps" and getattr(self, key) is not None]
        taps = [] if self.taps is None else [f"taps={'+'.join(map(str, self.taps)) or 0}"]
        return ":".join([str(self.layer), self.kind, *flags, *sizes, *taps])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A head at a checkpoint layer and its router."""

    layer: int
    kind: str
    head: ExitHead
    router: Router
    name: str


def candidates_of(config: CalibrationConfig, num_layers: int) -> list[CandidateSpec]:
    """The candidates that the configuration lists, or every one of its head kinds at every one of its checkpoints."""
    if config.candidates:
        return [CandidateSpec.parse(text) for text in config.candidates]
    layers = config.checkpoints_for(num_layers)
    return [_spec(config, layer, kind, config.head_inner) for layer in layers for kind in config.heads]


def narrow_candidates(config: CalibrationConfig, num_layers: int, width: int) -> list[CandidateSpec]:
    """Narrow blocks for a model of this width, beside those of `candidates_of`: at a quarter and at half of the width,
    after the first layer or at the checkpoints that are set. None where the model is small or the settings name the
    shapes."""
    if width < WIDE_FROM or config.candidates or config.head_inner is not None or "block" not in config.heads:
        return []
    layers = config.checkpoints_for(num_layers) if config.checkpoints else (1,)
    inners = [-(-width // part // WIDTH_STEP) * WIDTH_STEP for part in (4, 2)]
    return [_spec(config, layer, "block", inner) for layer in layers for inner in inners]


def _spec(config: CalibrationConfig, layer: int, kind: str, inner: int | None) -> CandidateSpec:
    deep, block = config.deep_inputs and kind != "identity", kind == "block"
    return CandidateSpec(
        layer,
        kind,
        deep,
        hidden=config.head_hidden if kind in ("mlp", "block") else None,
        ffn=config.head_ffn if block else None,
        muon=config.optimiser == "muon" and kind != "identity",
        taps=config.taps if deep else None,
        inner=inner if block else None,
    )


def layers_of(candidates: Sequence[Candidate]) -> list[int]:
    """The layers whose states candidates need: checkpoint layers and taps."""
    return sorted({layer for each in candidates for layer in (each.layer, *each.head.spec.taps)})


def default_taps(layer: int, num_layers: int) -> tuple[int, ...]:
    """The layers at one third and two thirds of the depth that are between the checkpoint layer and the last one."""
    thirds = {round(num_layers / 3), round(2 * num_layers / 3)}
    return tuple(sorted(tap for tap in thirds if layer < tap < num_layers))


def head_spec(adapter: ModelAdapter, spec: CandidateSpec, max_distance: int) -> HeadSpec:
    """The shape of a candidate in this model; sizes that are not set follow the model's own decoder blocks."""
    config = adapter.config
    width = int(config.hidden_size)
    feed_forward = feed_forward_width(adapter)
    shape: dict[str, int] = {}
    if spec.kind == "block":
        heads = int(config.num_attention_heads)
        own_size = None if hasattr(config, "kv_lora_rank") else getattr(config, "head_dim", None)
        size = int(own_size or width // heads)
        groups = _first(config, "num_key_value_heads", "num_kv_heads") or heads
        groups = groups if heads % groups == 0 else heads
        if spec.inner and spec.inner < width:
            size = min(NARROW_HEAD_SIZE, size, spec.inner)
            shared = heads // groups  # query heads per KV head: the model's number, or the next that divides ours
            heads = max(1, spec.inner // size)
            groups = heads // max(number for number in range(1, min(shared, heads) + 1) if heads % number == 0)
            feed_forward = -(-feed_forward * spec.inner // width // WIDTH_STEP) * WIDTH_STEP
        shape = {
            "num_heads": heads,
            "num_kv_heads": groups,
            "head_size": size + size % 2,
            "ffn": feed_forward if spec.ffn is None else spec.ffn,
            "inner": spec.inner or 0,
        }
    own_hidden = feed_forward if spec.kind == "mlp" else 0
    taps = default_taps(spec.layer, adapter.num_layers) if spec.taps is None else spec.taps
    if any(not spec.layer < tap < adapter.num_layers for tap in taps):
        expected = f"layers above {spec.layer} and below {adapter.num_layers}"
        raise ConfigError(f"taps of candidate {spec.name}", taps, expected)
    return HeadSpec(
        kind=spec.kind,
        width=width,
        deep=spec.deep,
        max_distance=max_distance if spec.deep else 0,
        hidden=own_hidden if spec.hidden is None else spec.hidden,
        rope_theta=_rope_theta(config),
        norm_eps=float(_first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-5),
        taps=taps if spec.deep else (),
        **shape,
    )


def feed_forward_width(adapter: ModelAdapter) -> int:
    """Of the model's own decoder blocks."""
    named = _first(adapter.config, "intermediate_size", "ffn_dim", "ffn_hidden_size")
    return int(named or -(-int(adapter.config.hidden_size) * 8 // 48) * 16)


def make_candidate(
    adapter: ModelAdapter, spec: CandidateSpec, *, max_distance: int, bottleneck: int, seed: int
) -> Candidate:
    """An untrained candidate in float32 on the model's device; the same every time, whatever others are made."""
    if not 1 <= spec.layer < adapter.num_layers:
        raise ConfigError(f"layer of candidate {spec.name}", spec.layer, f"1..{adapter.num_layers - 1}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed ^ zlib.crc32(spec.name.encode()))
        head = ExitHead(head_spec(adapter, spec, max_distance))
        router = Router(head.spec.width, bottleneck)
    if head.spec.attends:
        copy_block_weights(head, adapter.layers[-1])
    return Candidate(spec.layer, spec.kind, head.to(adapter.device), router.to(adapter.device), spec.name)


@torch.no_grad()
def copy_block_weights(head: ExitHead, layer: nn.Module) -> list[str]:
    """Initialise a block with the weights of one of the model's layers where both have them; returns the copied names.

    The output projections stay zero, so that the block starts as the identity."""
    copied = []
    dtype = next(layer.parameters()).dtype
    for ours, theirs in (
        ("q_proj", "self_attn.q_proj"),
        ("k_proj", "self_attn.k_proj"),
        ("v_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.gate_proj"),
        ("mlp.up_proj", "mlp.up_proj"),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        try:
            module, source = head.block.get_submodule(ours), layer.get_submodule(theirs)
        except AttributeError:
            continue
        norm = ours.endswith("norm")
        to, weight = module.weight, weight_of(source, dtype)
        plain = hasattr(source, "variance_epsilon") if norm else isinstance(source, nn.Linear)
        if not plain or not isinstance(to, Tensor) or not isinstance(weight, Tensor):
            continue
        if to.shape[1:] != weight.shape[1:] or (to.shape != weight.shape and not ours.startswith("mlp.")):
            continue
        rows = min(len(to), len(weight))  # the inner width of the block may differ from the model's
        to[:rows] = weight[:rows].to(to)
        copied.append(ours)
    return copied


def save_candidates(path: Path, candidates: Sequence[Candidate]) -> None:
    """All candidates in one safetensors file, written atomically."""
    tensors, listed = {}, []
    for index, candidate in enumerate(candidates):
        for part in ("head", "router"):
            for name, tensor in getattr(candidate, part).state_dict().items():
                tensors[f"{index}.{part}.{name}"] = tensor.detach().cpu().contiguous()
        plain = {"layer": candidate.layer, "kind": candidate.kind, "name": candidate.name}
        listed.append({**plain, "head": asdict(candidate.head.spec), "bottleneck": candidate.router.out.in_features})
    write_whole(path, save(tensors, {"candidates": json.dumps(listed)}))


def load_candidates(path: Path, device: torch.device | str = "cpu") -> list[Candidate]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            listed = json.loads((file.metadata() or {})["candidates"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return [_restored(index, plain, tensors, device) for index, plain in enumerate(listed)]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"candidates {path}", f"{type(error).__name__}: {error}", "a file of candidates") from error


def _restored(index: int, plain: dict[str, Any], tensors: dict[str, Tensor], device: torch.device | str) -> Candidate:
    head = ExitHead(HeadSpec(**{**plain["head"], "taps": tuple(plain["head"]["taps"])}))
    router = Router(head.spec.width, plain["bottleneck"])
    for part, module in (("head", head), ("router", router)):
        prefix = f"{index}.{part}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        module.load_state_dict(own)
    return Candidate(plain["layer"], plain["kind"], head.to(device), router.to(device), plain["name"])


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _rope_theta(config: Any) -> float:
    """The rotary base of the model's full-attention layers; 10000 if it has no rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)

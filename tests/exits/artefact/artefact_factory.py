"""A random but valid artefact for a tiny model. A test names only what it cares about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.exits.artefact.artefact import Checkpoint, DataSummary, FastPoint, Manifest, save_artefact
from tide_core.exits.artefact.contract import FastContract
from tide_core.exits.artefact.fast import FastExits, FastModules, fast_exit
from tide_core.exits.artefact.heads import ExitHead, HeadSpec
from tide_core.exits.artefact.router import Router
from tide_core.identity import ModelIdentity
from tide_core.models.identity import identify

MAX_DISTANCE = 6


def make_spec(kind: str = "block", width: int = 48, *, deep: bool = True, **sizes: Any) -> HeadSpec:
    """Small sizes of whatever the kind has; an identity head is never fed with the deep state."""
    deep = deep and kind != "identity"
    values = {"max_distance": MAX_DISTANCE if deep else 0, "hidden": 32 if kind in ("mlp", "block") else 0}
    if kind == "block":
        values |= {"num_heads": 4, "num_kv_heads": 2, "head_size": 12, "ffn": 40}
    return HeadSpec(kind, width, deep, **{**values, **sizes})


def make_head(spec: HeadSpec, *, seed: int = 0, scale: float = 0.1) -> ExitHead:
    """A head in which every weight matters: those that start at zero or one are moved a little."""
    head = ExitHead(spec)
    _shake(head, seed, scale)
    return head.requires_grad_(False).eval()


def make_router(width: int = 48, bottleneck: int = 16, *, seed: int = 0) -> Router:
    """Its scores spread over 0..1."""
    router = Router(width, bottleneck)
    _shake(router, seed, 0.3)
    with torch.no_grad():
        router.out.weight.mul_(6.0)
    return router.requires_grad_(False).eval()


def make_manifest(identity: ModelIdentity, specs: Mapping[int, HeadSpec], **settings: Any) -> Manifest:
    """`settings` go to the manifest, or, where they are a checkpoint's, to every checkpoint."""
    values = {"max_drafts": 6, "shortlist_size": 96, "shortlist_coverage": 0.97, **settings}
    point: dict[str, Any] = {
        "router_bottleneck": 16,
        "acceptance": tuple(0.8 - 0.05 * distance for distance in range(MAX_DISTANCE)),
        "draft_threshold": 0.0,
        "fast": FastPoint(0.7, 0.04, 3.1, 200),
    }
    point |= {name: values.pop(name) for name in point if name in values}
    checkpoints = tuple(Checkpoint(layer, spec, **point) for layer, spec in specs.items())
    data = DataSummary("self", "d" * 64, 100_000, 400, 200, 200)
    return Manifest(**{"model": identity, "checkpoints": checkpoints, "data": data, **values})


def make_shortlist(size: int = 96, vocab_size: int = 384) -> torch.Tensor:
    """Evenly spaced ids, the first of them 0: the end of text of the tiny models."""
    return torch.arange(size) * vocab_size // size


def make_artefact(
    folder: Path,
    model: Any = "llama",
    layer: int = 1,
    kind: str = "block",
    *,
    layers: Sequence[int] = (),
    deep: bool = True,
    taps: tuple[int, ...] = (),
    sizes: tuple[tuple[str, int], ...] = (),
    seed: int = 0,
    reports: Mapping[str, bytes] | None = None,
    heads: Sequence[ExitHead] | None = None,
    fast_layers: tuple[int, ...] = (),
    fast_contracts: tuple[FastContract, ...] = (),
    shake: float = 0.1,
    **settings: Any,
) -> Path:
    """Write an artefact for a loaded model or for the tiny model of a family; its folder.

    `layers` for several checkpoints, `sizes` of `make_spec`. With `fast_layers` there are fast exits, whose weights are
    moved from their start by `shake`. `settings` are those of `make_manifest`, such as draft_threshold."""
    model = tiny_model(model) if isinstance(model, str) else model
    identity = identify(model, tiny_tokenizer(), None)
    where = tuple(layers) or (layer,)
    spec = make_spec(kind, identity.width, deep=deep, taps=taps, **dict(sizes))
    heads = heads or [make_head(spec, seed=seed + at) for at in where]
    routers = [make_router(identity.width, settings.get("router_bottleneck", 16), seed=seed + at) for at in where]
    fast, modules = None, None
    if fast_layers:
        fast = make_fast(identity.width, fast_layers, fast_contracts)
        modules = FastModules.untrained(fast, where[0], identity.num_layers, identity.width)
        for at, module in enumerate(modules.named(fast, where[0]).values()):
            _shake(module, seed + at, 0.3 if isinstance(module, Router) else shake)
        settings = {"fast": None, **settings}
    specs = dict(zip(where, (head.spec for head in heads), strict=True))
    manifest = replace(make_manifest(identity, specs, **settings), fast=fast)
    shortlist = make_shortlist(manifest.shortlist_size, identity.vocab_size)
    save_artefact(folder, manifest, heads, routers, shortlist, reports, modules)
    return folder


def make_fast(width: int, layers: Sequence[int], contracts: tuple[FastContract, ...] = ()) -> FastExits:
    """Fast exits at these layers, with skip maps of rank 4."""
    exits = tuple(fast_exit(layer, width, hidden=16, bottleneck=8, eps=1e-5) for layer in layers)
    return FastExits(exits, rank=4, contracts=contracts)


def _shake(module: torch.nn.Module, seed: int, scale: float) -> None:
    """Weights drawn from the seed alone, whatever the module's own start drew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            start = torch.zeros_like(parameter)
            if "norm" in name or name == "gain":
                start += 1.0
            elif name in ("mix.weight", "fuse.weight"):
                torch.nn.init.eye_(start)
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=generator))

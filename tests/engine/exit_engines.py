"""Engines with exits over tiny models, and models on which exits are often right."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import make_config, poison, tiny_tokenizer, watch_released
from tests.tiny_models import tiny_model
from tide_core.engine.assemble import Parts, assemble_loaded
from tide_core.engine.engine import Completion, Engine
from tide_core.execution.graphs.launch_depth import LaunchDepth, LaunchDepths
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.models.identity import identify

EASY = 0.03
DAMPING = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen3": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
}


@functools.cache
def easy_model(family: str = "llama", layer: int = 1, share: float = EASY) -> Any:
    """A tiny model whose layers behind `layer` change little, so that an identity head there is often right."""
    model = copy.deepcopy(tiny_model(family))
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    with torch.no_grad():
        for block in layers[layer:]:
            for name in DAMPING[family]:
                block.get_submodule(name).weight.mul_(share)
    return model


@functools.cache
def _artefact(family: str, easy: bool, share: float, frozen: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tide-test-")) / "artefact"
    model = easy_model(family, share=share) if easy else tiny_model(family)
    return make_artefact(folder, model, **dict(frozen))


def exit_parts(
    family: str = "llama",
    *,
    easy: bool = True,
    share: float = EASY,
    artefact: dict[str, Any] | None = None,
    **settings: Any,
) -> Parts:
    """`artefact` are settings of `make_artefact`; by default an identity head over nearly the whole vocabulary. The
    greater the `share` of what the layers behind the exit do, the harder is an easy model."""
    chosen = {"kind": "identity" if easy else "block", "shortlist_size": 380, **(artefact or {})}
    folder = _artefact(family, easy, share, tuple(sorted(chosen.items())))
    config = make_config(**{"drafts": 4, **settings})
    model = copy.deepcopy(easy_model(family, share=share) if easy else tiny_model(family))
    model = model.to(config.device, getattr(torch, config.dtype))
    loaded = load_artefact(folder, identify(model, tiny_tokenizer(), None))
    return assemble_loaded(config, model, tiny_tokenizer(), name=family, identity=family, artefact=loaded)


def exit_engine(family: str = "llama", **settings: Any) -> Engine:
    return Engine.from_parts(exit_parts(family, **settings))


class FixedDepth(LaunchDepth):
    """So many steps per launch, whoever waits for whom."""

    def restart(self) -> None:
        pass

    def observe(self, steps: int, device_s: float, wait_s: float, period_s: float) -> None:
        pass


def fixed_depths(steps: int) -> LaunchDepths:
    return LaunchDepths(lambda: FixedDepth(steps))


def poisoned(parts: Parts, **settings: Any) -> Engine:
    """Freed blocks are filled with NaN, and so is the whole pool at first."""
    cache, blocks = parts.runner.cache, parts.core.scheduler.blocks
    poison(cache, range(cache.num_blocks))
    watch_released(blocks, functools.partial(poison, cache))
    return Engine.from_parts(parts)


def ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def exit_layers(answer: Completion) -> list[int]:
    return [token.exit_layer for token in answer.tokens]


def all_ids(answers: Sequence[Completion]) -> list[list[int]]:
    return [ids(answer) for answer in answers]


__all__ = ["all_ids", "easy_model", "exit_engine", "exit_layers", "exit_parts", "ids", "poisoned"]

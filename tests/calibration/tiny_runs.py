"""Whole calibrations small enough for a test."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.pipeline import CalibrationResult, calibrate
from tide_core.calibration.progress import Progress
from tide_core.calibration.stages import Timer
from tide_core.models.identity import identify

PROMPTS = [f"Tell me {n} things about the {animal}." for n in (2, 3) for animal in ("cat", "dog", "log", "mat", "home")]


def write_prompts(folder: Path, prompts: list[str] = PROMPTS) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts), encoding="utf-8")
    return path


def tiny_calibration(**settings: Any) -> CalibrationConfig:
    """A few short sequences, a few steps."""
    small = {
        "num_samples": 10,
        "max_prompt_tokens": 40,
        "max_new_tokens": 6,
        "self_prompt_tokens": 8,
        "generation_batch": 2,
        "shortlist_size": 64,
        "heads": ("affine",),
        "checkpoints": (1,),
        "deep_inputs": False,
        "steps": 4,
        "batch_tokens": 128,
        "max_drafts": 2,
        "router_bottleneck": 8,
        "measure_batches": (),
    }
    return CalibrationConfig(**{**small, **settings})


def run_tiny(
    folder: Path,
    *,
    data: Path | str | None = None,
    family: str = "llama",
    progress: Progress | None = None,
    force: bool = False,
    name: str = "artefact",
    timer: Timer | None = None,
    **settings: Any,
) -> CalibrationResult:
    """Calibrate a tiny model in `folder`/run and publish to `folder`/`name`."""
    model, tokenizer = copy.deepcopy(tiny_model(family)), tiny_tokenizer()
    data = write_prompts(folder) if data is None else data
    return calibrate(
        tiny_calibration(data=str(data), **settings),
        model,
        tokenizer,
        identify(model, tokenizer, None),
        run_dir=folder / "run",
        publish_to=folder / name,
        progress=progress,
        force=force,
        timer=timer,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

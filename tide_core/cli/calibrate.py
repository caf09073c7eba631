"""`tide calibrate`: from a model to an artefact with its exit heads, routers and thresholds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_core.calibration.config import HEADS, CalibrationConfig
from tide_core.cli import console
from tide_core.cli.exit_codes import with_exit_code
from tide_core.cli.options import numbers
from tide_core.cli.output import write
from tide_core.config import AUTO, DEVICES, DTYPE_CHOICES
from tide_core.errors import ConfigError

SETTINGS = CalibrationConfig()
LAYERS = "layer counts with commas between them, as in 2,5"


@with_exit_code
def calibrate(
    output: Annotated[Path, typer.Option(help="Folder of the artefact to write.")],
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a Hugging Face id.")] = "demo",
    run_dir: Annotated[
        Path | None, typer.Option(help="State of the run; default: a folder next to the output.")
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="self (the model's own text), a .txt, .jsonl or .parquet file or a folder of them, or a datasets "
            "name/config:split:column."
        ),
    ] = SETTINGS.data,
    samples: Annotated[int, typer.Option(help="Most prompts or documents.")] = SETTINGS.num_samples,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = SETTINGS.max_new_tokens,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="LAYERS", help="Checkpoint layers to try, as in 2,5; default: chosen.")
    ] = None,
    heads: Annotated[str, typer.Option(metavar="KINDS", help=f"Of {', '.join(HEADS)}.")] = ",".join(SETTINGS.heads),
    steps: Annotated[int, typer.Option(help="Training steps.")] = SETTINGS.steps,
    minutes: Annotated[
        float | None,
        typer.Option(help="Time for the whole calibration; training ends early if it must. Default: no limit."),
    ] = SETTINGS.minutes,
    max_drafts: Annotated[int, typer.Option(help="Longest draft.")] = SETTINGS.max_drafts,
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = SETTINGS.seed,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as JSON; overrides its option.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPE_CHOICES)}.")] = AUTO,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = AUTO,
    quantization: Annotated[
        str, typer.Option(help="As the engine that serves with the exits: auto, none or fp8.")
    ] = AUTO,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artefact at the output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Train exit heads for a model, choose their thresholds, write both as an artefact, and time it.

    Prints whether exits pay, and the speed-up measured on this machine. The same command
    resumes an interrupted run.
    """
    console.prepare(verbose=verbose)
    values: dict[str, Any] = {
        "data": data,
        "num_samples": samples,
        "max_new_tokens": max_new_tokens,
        "checkpoints": numbers("--checkpoints", checkpoints, int, LAYERS) if checkpoints else [],
        "heads": [kind.strip() for kind in heads.split(",")],
        "steps": steps,
        "minutes": minutes,
        "max_drafts": max_drafts,
        "seed": seed,
    }
    config = CalibrationConfig.from_mapping(values | extra_settings(settings or []))

    from tide_core.calibration.named_model import calibrate_model, default_run_dir
    from tide_core.calibration.progress import default_progress
    from tide_core.evaluation.speedup import time_exits

    run_dir = run_dir or default_run_dir(output)
    try:
        result = calibrate_model(
            model,
            config,
            publish_to=output,
            run_dir=run_dir,
            dtype=dtype,
            device=device,
            quantization=quantization,
            progress=default_progress(quiet=quiet),
            force=force,
            timer=time_exits,
        )
    except KeyboardInterrupt:
        print(f"tide: interrupted; the same command resumes the run in {run_dir}", file=sys.stderr, flush=True)
        raise
    write("".join(f"{line}\n" for line in result.verdict))
    write(f"artefact: {result.artefact} ({result.digest[:16]})\nreport: {result.report}\n")


def extra_settings(settings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        key, given, value = setting.partition("=")
        if not given or key in values:
            raise ConfigError("--set", setting, "KEY=VALUE, each key once")
        try:
            values[key] = json.loads(value)
        except ValueError:
            raise ConfigError(f"--set {key}", value, "a JSON value") from None
    return values

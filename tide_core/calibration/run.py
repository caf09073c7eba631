"""A calibration of a model by its name: what the command does, for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.ledger import check_output
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.config import DTYPES
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.pipeline import CalibrationResult
    from tide_core.calibration.timing import Timer

AUTO = "auto"


def calibrate_model(
    model: str,
    config: CalibrationConfig,
    *,
    publish_to: Path,
    run_dir: Path | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    progress: Progress | None = None,
    force: bool = False,
    timer: Timer | None = None,
) -> CalibrationResult:
    """Load a model and calibrate it. A dtype of `auto` is bfloat16 on cuda and float32 on a CPU.

    A `timer` measures the speed-up at the end; without one the report holds predictions only."""
    progress = progress or SilentProgress()
    run_dir = run_dir or default_run_dir(publish_to)
    if dtype not in (AUTO, *DTYPES):
        raise ConfigError("dtype", dtype, f"one of {', '.join((AUTO, *DTYPES))}")
    check_output(publish_to, run_dir, force=force)
    # torch comes with these; everything that can be refused without it has been.
    from tide_core.calibration.pipeline import calibrate
    from tide_core.models.identity import identify
    from tide_core.models.loader import load_model, load_tokenizer, torch_device
    from tide_core.models.resolver import resolve

    if dtype == AUTO:
        dtype = "bfloat16" if torch_device(device).type == "cuda" else "float32"
    with progress.stage(f"load {model}", None, "model") as stage:
        resolved = resolve(model)
        loaded, tokenizer = load_model(resolved, dtype=dtype, device=device), load_tokenizer(resolved)
        identity = identify(loaded, tokenizer, resolved)
        stage.update(1, dtype=dtype, device=loaded.device.type)
    return calibrate(
        config,
        loaded,
        tokenizer,
        identity,
        run_dir=run_dir,
        publish_to=publish_to,
        progress=progress,
        force=force,
        model_name=model if resolved.source in ("demo", "hub") else resolved.name,  # no path of this machine
        timer=timer,
    )


def default_run_dir(publish_to: Path) -> Path:
    """Beside the artefact, so that both are on one disk."""
    return publish_to.absolute().with_name(f"{publish_to.absolute().name}.run")

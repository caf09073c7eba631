"""Load a model by its name and calibrate it: the command `tide calibrate` as a function. No torch until it loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.ledger import check_output
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.config import AUTO, DTYPE_CHOICES, QUANTIZATIONS, EngineConfig
from tide_core.errors import ConfigError

if TYPE_CHECKING:
    from tide_core.calibration.pipeline import CalibrationResult
    from tide_core.calibration.stages import Timer
    from tide_core.identity import ModelIdentity


def calibrate_model(
    model: str,
    config: CalibrationConfig,
    *,
    publish_to: Path,
    run_dir: Path | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    quantization: str = AUTO,
    progress: Progress | None = None,
    force: bool = False,
    timer: Timer | None = None,
) -> CalibrationResult:
    """Load a model and calibrate it; `dtype`, `device` and `quantization` as for an engine.

    A `timer` measures the speed-up at the end; without one the report holds predictions only."""
    progress = progress or SilentProgress()
    run_dir = run_dir or default_run_dir(publish_to)
    for name, value, allowed in (
        ("dtype", dtype, DTYPE_CHOICES),
        ("quantization", quantization, QUANTIZATIONS),
    ):
        if value not in allowed:
            raise ConfigError(name, value, f"one of {', '.join(allowed)}")
    check_output(publish_to, run_dir, force=force)
    # This imports torch; every check that does not need torch is done.
    from tide_core.calibration.pipeline import calibrate

    with progress.stage(f"load {model}", None, "model") as stage:
        loaded = load(model, dtype=dtype, device=device, quantization=quantization)
        stage.update(1, dtype=loaded.identity.dtype, device=loaded.model.device.type)
    return calibrate(
        config,
        loaded.model,
        loaded.tokenizer,
        loaded.identity,
        run_dir=run_dir,
        publish_to=publish_to,
        progress=progress,
        force=force,
        model_name=loaded.name,
        timer=timer,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any
    identity: ModelIdentity
    name: str
    """The name for a command that repeats the calibration: no path of this machine."""


def load(
    model: str, *, dtype: str = AUTO, device: str = AUTO, quantization: str = AUTO, threads: int | None = None
) -> Loaded:
    """`threads` is the number for this calling thread."""
    from tide_core.kernels import select_kernels
    from tide_core.models.identity import identify
    from tide_core.models.kernel_modules import use_kernels_for_training
    from tide_core.models.loader import find_model, load_model, load_tokenizer

    if threads is not None:
        use_threads(threads)
    resolved = find_model(EngineConfig(model=model, dtype=dtype, device=device, quantization=quantization))
    loaded = load_model(resolved, dtype=dtype, device=device, quantization=quantization)
    if resolved.gguf is not None:
        use_kernels_for_training(loaded, select_kernels("native", loaded.device))
    tokenizer = load_tokenizer(resolved)
    name = model if resolved.source in ("demo", "hub") else resolved.name
    return Loaded(loaded, tokenizer, identify(loaded, tokenizer, resolved), name)


def use_threads(num: int) -> None:
    """Compute with `num` threads from now on. Torch keeps this number per calling thread, the native module one."""
    import torch

    from tide_core.kernels import set_num_threads

    torch.set_num_threads(num)
    set_num_threads(num)


def default_run_dir(publish_to: Path) -> Path:
    """Next to the artefact, so that both are on one disk."""
    return publish_to.absolute().with_name(f"{publish_to.absolute().name}.run")

"""`calibrate`: from a loaded model, or a name, to an artefact on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.named_model import calibrate_model, default_run_dir
from tide_core.calibration.pipeline import CalibrationResult
from tide_core.calibration.pipeline import calibrate as calibrate_loaded
from tide_core.calibration.progress import Progress, default_progress
from tide_core.config import AUTO
from tide_core.errors import ConfigError
from tide_core.evaluation.speedup import time_exits
from tide_core.models.adapter import ModelAdapter
from tide_core.models.identity import identify
from tide_core.models.resolver import resolve, resolve_configuration
from tide_core.tide.config import TIDEConfig, checked
from tide_core.tide.model_state import SavedModelState, check_usable


def calibrate(
    model: Any,
    tokenizer: Any = None,
    save_path: str | Path = "artefact",
    config: TIDEConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    quantization: str = AUTO,
    force: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Path:
    """Train exits for a model, choose their thresholds, and write both to the folder `save_path`, which is returned.

    `model`: a model loaded by transformers, with its tokenizer; or a name, loaded with `dtype` and `quantization` on
    `device`. `options` are fields of `CalibrationConfig`. The run keeps its state in `run_dir` (default: next to
    `save_path`): the same call resumes an interrupted run. `force` replaces an existing artefact. A loaded model is
    restored before this returns. At the end the exits are timed; `measure_batches=()` skips that."""
    config, target = checked(config), Path(save_path)
    run = default_run_dir(target) if run_dir is None else Path(run_dir)
    progress = default_progress(quiet=quiet)
    if isinstance(model, str):
        if tokenizer is not None:
            raise ConfigError("tokenizer", type(tokenizer).__name__, "none with a model name, which has its own")
        result = calibrate_model(
            model,
            _settings(config, model, options),
            publish_to=target,
            run_dir=run,
            dtype=dtype,
            device=device,
            quantization=quantization,
            progress=progress,
            force=force,
            timer=time_exits,
        )
        return _report(result, progress)
    check_usable(model)
    if tokenizer is None:
        raise ConfigError("tokenizer", None, f"the tokenizer of the loaded {type(model).__name__}")
    for name, value, usual in (
        ("dtype", dtype, AUTO),
        ("device", device, AUTO),
        ("quantization", quantization, AUTO),
    ):
        if value != usual:
            raise ConfigError(name, value, "none with a loaded model, which has its own")
    settings = _settings(config, model, options)
    saved_state = SavedModelState(model)  # eval mode until `restore`
    try:
        identity = identify(model, tokenizer, None)
        result = calibrate_loaded(
            settings,
            model,
            tokenizer,
            identity,
            run_dir=run,
            publish_to=target,
            progress=progress,
            force=force,
            timer=time_exits,  # it rebinds the model's modules; `restore` undoes that
        )
    finally:
        saved_state.restore()
    return _report(result, progress)


def _report(result: CalibrationResult, progress: Progress) -> Path:
    """Print the verdict and the paths; return the artefact."""
    for line in (*result.verdict, f"artefact: {result.artefact}, report: {result.report}"):
        progress.note(line)
    return result.artefact


def _settings(config: TIDEConfig, model: Any, options: dict[str, Any]) -> CalibrationConfig:
    """Settings of the config and the options together; a setting given in both is refused."""
    num_layers = 0 if config.checkpoint_interval is None else _num_layers(model)
    values = config.calibration_settings(num_layers)
    for name in options:
        if name in values:
            raise ConfigError(f"calibrate({name}=...)", options[name], "either this or its setting in TIDEConfig")
    return CalibrationConfig.from_mapping({**values, **options})


def _num_layers(model: Any) -> int:
    if not isinstance(model, str):
        return ModelAdapter(model, paged=False).num_layers
    found = resolve_configuration(model) or resolve(model)
    return int(AutoConfig.from_pretrained(found.path, local_files_only=True).num_hidden_layers)

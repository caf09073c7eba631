"""The settings of a job: `deploy/calibrate.yaml`, validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deploy.object_store import is_url, refuse_credentials
from deploy.strict.schema import validated
from tide_core.calibration.config import CalibrationConfig
from tide_core.config import DEVICES, DTYPE_CHOICES, QUANTIZATIONS
from tide_core.errors import ConfigError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Workers(BaseModel):
    """The pool that makes prompts and shards; one of its workers also runs the other stages."""

    model_config = STRICT

    count: int = Field(default=1, ge=1, le=4096)
    """Number of processes, each with the model."""
    num_cpus: float = Field(default=1.0, ge=0.0, le=4096.0)
    """Ray CPUs of each worker."""
    num_gpus: float = Field(default=0.0, ge=0.0, le=64.0)
    """Ray GPUs of each worker."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of each worker on a CPU; default: num_cpus. Another number may round differently."""
    start_s: float = Field(default=600.0, gt=0.0)
    """Maximum time until a worker is placed and has loaded its model."""
    stall_s: float = Field(default=1800.0, gt=0.0)
    """A worker that sends no event for this long is killed, and another repeats its task. Longer than a shard takes."""
    attempts: int = Field(default=3, ge=1, le=100)
    """How many workers may die on one task before the run ends."""


class JobSettings(BaseModel):
    """One run. `calibration` and the model determine the artefact; all other settings only where and how it is made."""

    model_config = STRICT

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run; a job with the same name resumes it."""
    storage: str = Field(min_length=1)
    """Storage of runs: the absolute path of a folder that all nodes see, or a URL such as s3://bucket/path."""
    output: str | None = None
    """Absolute path of a folder on the driver's machine for a copy of the artefact; default: no copy."""
    force: bool = False
    """Whether `output` may replace an artefact of another run."""
    publish: str | None = Field(default=None, min_length=1)
    """Folder or URL where the artefact is published at the end: a new version, and the pointer moves to it."""
    model: str = Field(default="demo", min_length=1)
    """`demo`, a folder, a .gguf file, a Hugging Face id, or the URL of a folder such as s3://bucket/models/mine."""
    dtype: str = "auto"
    """Of the calibrated model; auto: on a GPU the checkpoint's own, but bfloat16 for float32; on a CPU float32."""
    device: str = "auto"
    """Of the workers; auto: cuda if available."""
    quantization: str = "auto"
    """As that of the engine which serves with the exits: auto, none, or fp8, whose weights are other numbers."""
    measure: bool = True
    """Whether the published exits are timed."""
    calibration: dict[str, Any] = Field(default_factory=dict)
    """Settings by the names of `tide_core.calibration.config.CalibrationConfig`."""
    workers: Workers = Field(default_factory=Workers)
    """The worker processes and their resources."""
    train_workers: int = Field(default=1, ge=1, le=1024)
    """Processes that train together, each with the resources of a worker."""

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, dtype: str) -> str:
        return _one_of(dtype, DTYPE_CHOICES)

    @field_validator("quantization")
    @classmethod
    def _quantization(cls, quantization: str) -> str:
        return _one_of(quantization, QUANTIZATIONS)

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        return _one_of(device, DEVICES)

    @field_validator("storage", "output", "publish")
    @classmethod
    def _whole_path(cls, place: str | None) -> str | None:
        """Refuse relative paths: Ray removes the working directory of a job after its end."""
        if place is None or is_url(place):
            return place
        path = Path(place).expanduser()
        if not path.is_absolute():
            raise ValueError("expected a whole path, or a URL: the folder a job runs in is removed after it")
        return str(path)

    @field_validator("calibration")
    @classmethod
    def _known_and_valid(cls, values: dict[str, Any]) -> dict[str, Any]:
        try:
            return CalibrationConfig.from_mapping(values).to_mapping()
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @property
    def config(self) -> CalibrationConfig:
        return CalibrationConfig.from_mapping(self.calibration)

    @property
    def threads(self) -> int:
        return self.workers.threads or max(1, int(self.workers.num_cpus))

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The environment of a worker. Some libraries of torch read their number of threads from it."""
        return {"env_vars": {"OMP_NUM_THREADS": str(self.threads)}}


def read_settings(values: Mapping[str, Any]) -> JobSettings:
    """Validated settings. Credentials are refused first, because later errors show the refused value."""
    for name in ("storage", "output", "publish", "model"):
        refuse_credentials(name, str(values.get(name) or ""))
    return validated(JobSettings, values, "")


def _one_of(value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"expected one of {', '.join(allowed)}")
    return value

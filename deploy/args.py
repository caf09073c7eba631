"""Arguments of the application: YAML becomes checked settings here and nowhere else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tide_core.config import EngineConfig
from tide_core.errors import ConfigError


class AppArgs(BaseModel):
    """What `args` of the application may hold. All of it needs a restart to change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine, by the names of `tide_core.config.EngineConfig`."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """The name clients use for the model; by default the model's own."""

    @field_validator("engine")
    @classmethod
    def _known_and_valid(cls, engine: dict[str, Any]) -> dict[str, Any]:
        """Refuse what the engine would refuse, before anything is started; fill in the defaults."""
        try:
            return asdict(EngineConfig.from_mapping(engine))
        except ConfigError as error:
            raise ValueError(str(error)) from error

"""Arguments of the application: YAML becomes checked settings here and nowhere else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deploy.limits import Limits
from tide_core.config import EngineConfig
from tide_core.errors import ConfigError


class AppArgs(BaseModel):
    """What `args` of the application may hold. All of it needs a restart to change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine, by the names of `tide_core.config.EngineConfig`."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """The name clients use for the model; by default the model's own."""
    limits: Limits = Field(default_factory=Limits)
    """Most of everything that one request may ask for."""
    api_keys_file: str | None = Field(default=None, min_length=1)
    """File of hashed keys that `tide new-key` writes; without one, whoever reaches the ports may use them."""
    playground: bool | None = None
    """Whether /playground is there, open to all. By default only where there are no keys."""
    target_tokens_in_flight: int = Field(default=8192, ge=1)
    """Tokens that open requests may still make at which autoscaling wants another replica."""

    @field_validator("engine")
    @classmethod
    def _known_and_valid(cls, engine: dict[str, Any]) -> dict[str, Any]:
        """Refuse what the engine would refuse, before anything is started; fill in the defaults."""
        try:
            return asdict(EngineConfig.from_mapping(engine))
        except ConfigError as error:
            raise ValueError(str(error)) from error

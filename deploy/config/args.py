"""Arguments of the application: YAML becomes checked settings here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tide_core.config import EngineConfig
from tide_core.errors import ConfigError, RequestError
from tide_core.request import SamplingParams


class Limits(BaseModel):
    """What `args.limits` of the application may hold."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    max_tokens: int = Field(default=4096, ge=1, le=2**24)
    """Most tokens that one request may ask for."""
    max_timeout_s: float = Field(default=280.0, gt=0.0, le=86400.0)
    """Longest that one request may take; below Serve's `request_timeout_s`, so that its end is told by name."""
    body_bytes: int = Field(default=2_000_000, ge=1, le=2**30)
    """Of an HTTP request."""
    body_timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """Within which the whole body must have come."""
    header_bytes: int = Field(default=2**16, ge=1024, le=2**24)
    """Of all headers of an HTTP request, names and values together."""
    num_headers: int = Field(default=100, ge=1, le=10_000)
    """Most headers of an HTTP request."""
    metadata_bytes: int = Field(default=2**14, ge=1024, le=2**24)
    """Of a gRPC call."""
    json_depth: int = Field(default=64, ge=4, le=900)
    """Deepest nesting of a body."""
    stuck_after_s: float = Field(default=60.0, gt=0.0, le=86400.0)
    """The replica is unhealthy when no engine step has ended for so long."""

    def check(self, params: SamplingParams) -> None:
        if params.max_tokens > self.max_tokens:
            raise RequestError("max_tokens", params.max_tokens, f"at most {self.max_tokens}")

    def timeout_s(self, asked: float | None) -> float:
        if asked is None:
            return self.max_timeout_s
        if not math.isfinite(asked) or asked <= 0:
            raise RequestError("timeout_s", asked, "a finite number above 0")
        return min(asked, self.max_timeout_s)


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

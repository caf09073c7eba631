"""Arguments of the application: the YAML under `args` as checked settings."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deploy.tools.formats import FORMATS
from tide_core.config import EngineConfig
from tide_core.errors import ConfigError, RequestError
from tide_core.request import SamplingParams

MAX_NAMES, MAX_NAME_CHARS = 64, 256


class Limits(BaseModel):
    """Limits of one request (`args.limits`), checked before anything is allocated for it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    max_tokens: int = Field(default=4096, ge=1, le=2**24)
    """Most tokens of one request."""
    max_choices: int = Field(default=256, ge=1, le=2**16)
    """Most choices of one HTTP request: its prompts times `n`."""
    max_timeout_s: float = Field(default=280.0, gt=0.0, le=86400.0)
    """Longest duration of one request; keep it below Serve's `request_timeout_s`, so that the error names the limit."""
    body_bytes: int = Field(default=2_000_000, ge=1, le=2**30)
    """Most bytes of an HTTP body."""
    body_timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """Time within which the whole HTTP body must arrive."""
    slow_bodies: int = Field(default=64, ge=1, le=100_000)
    """Most HTTP bodies that may take longer than a second at the same time; beyond it the oldest ones are refused."""
    header_bytes: int = Field(default=2**16, ge=1024, le=2**24)
    """Most bytes of all headers of an HTTP request, names and values together."""
    num_headers: int = Field(default=100, ge=1, le=10_000)
    """Most headers of an HTTP request."""
    metadata_bytes: int = Field(default=2**14, ge=1024, le=2**24)
    """Most bytes of the metadata of a gRPC call."""
    json_depth: int = Field(default=64, ge=4, le=900)
    """Deepest nesting of a JSON body."""
    stuck_after_s: float = Field(default=60.0, gt=0.0, le=86400.0)
    """The replica is unhealthy if no engine step has ended for this time."""

    def check(self, params: SamplingParams) -> None:
        if params.max_tokens > self.max_tokens:
            raise RequestError("max_tokens", params.max_tokens, f"at most {self.max_tokens}")

    def timeout_s(self, requested: float | None) -> float:
        if requested is None:
            return self.max_timeout_s
        if not math.isfinite(requested) or requested <= 0:
            raise RequestError("timeout_s", requested, "a finite number above 0")
        return min(requested, self.max_timeout_s)


class AppArgs(BaseModel):
    """The `args` of the application. Changes need a restart."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine, by the names of `tide_core.config.EngineConfig`."""
    served_model_name: str | list[str] | None = None
    """The name that clients use for the model, or a list of names: requests may use any of them, answers have the
    first. Default: the model's own."""
    limits: Limits = Field(default_factory=Limits)
    """Limits of one request."""
    api_keys_file: str | None = Field(default=None, min_length=1)
    """File of hashed keys that `tide new-key` writes; without one, anyone who reaches the ports may use them."""
    strict: bool = False
    """Refuse fields of HTTP bodies that are not known here. By default they are ignored, named in the header
    X-Tide-Ignored and counted by `tide_ignored_fields`."""
    cors_origins: list[str] = Field(default_factory=list)
    """Origins of web pages that may call the HTTP API from a browser, such as `https://chat.example`; `*`: any."""
    docs_url: str | None = None
    """Where your documentation is, such as the site that `make docs` builds; the start page links it."""
    tool_parser: str | None = None
    """The format in which the model writes calls of tools: `hermes` (Qwen too), `llama3_json` or `mistral`. Default:
    the one that its chat template shows; where it shows none of these, requests with tools are refused."""
    metrics: bool = False
    """Whether `/metrics` on the API port has the metrics of the replica that answers, without a key. Ray publishes
    those of all replicas on a port of its own."""
    playground: bool | None = None
    """Whether /playground is served, without a key. Default: only if there are no keys."""
    target_wait_s: float = Field(default=2.0, gt=0.0, le=3600.0)
    """Time that a request may wait for its first token; above it, autoscaling adds a replica. It also adds one where
    rows or KV memory run short."""

    follow_s: float = Field(default=30.0, gt=0.0, le=86400.0)
    """How often a replica looks at the pointer to its published artefact, where `artefact` names one."""

    @field_validator("docs_url")
    @classmethod
    def _web_address(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^\s<>\"']+", url):
            raise ValueError("Input should be an address that begins with http:// or https://")
        return url

    @property
    def model_names(self) -> list[str]:
        """The names of the model; none for its own."""
        names = self.served_model_name
        return [names] if isinstance(names, str) else names or []

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        names = [value] if isinstance(value, str) else value
        if names is not None and not (
            isinstance(names, list)
            and 1 <= len(names) <= MAX_NAMES
            and all(isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS for name in names)
            and len(set(names)) == len(names)
        ):
            expected = f"a name of 1..{MAX_NAME_CHARS} characters, or a list of 1..{MAX_NAMES} such names that differ"
            raise ValueError(expected)
        return value

    @field_validator("tool_parser")
    @classmethod
    def _known_format(cls, name: str | None) -> str | None:
        if name is not None and name not in FORMATS:
            raise ValueError(f"Input should be one of {', '.join(FORMATS)}")
        return name

    @field_validator("engine")
    @classmethod
    def _known_and_valid(cls, engine: dict[str, Any]) -> dict[str, Any]:
        """Refuse what the engine would refuse, before anything starts; fill in the defaults."""
        try:
            return asdict(EngineConfig.from_mapping(engine))
        except ConfigError as error:
            raise ValueError(str(error)) from error

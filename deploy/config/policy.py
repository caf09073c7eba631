"""The live exit policy: what `user_config` may hold. A change takes effect without a restart, for requests that come
after it; those that run keep what they began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.failures import ForbiddenError
from deploy.keys import Caller
from tide_core.errors import ConfigError, RequestError, refuse_unknown
from tide_core.request import MODES, SamplingParams


class LivePolicy(BaseModel):
    """Defaults for requests that leave something open, and limits for all."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    mode: str | None = None
    """Mode of a request that names none. None: verified with an artefact, full without."""
    epsilon: float | None = None
    """Bound of such a request, if `mode` is bounded."""
    threshold: float | None = None
    """Least score at which its tokens leave; None: as calibrated."""
    min_layers: int = Field(default=0, ge=0, le=2**16)
    """No token of any request leaves before this many layers."""
    modes: list[str] = Field(default=list(MODES), min_length=1)
    """Modes that requests may name."""
    min_threshold: float = Field(default=0.0, ge=0.0, le=2.0)
    """Least threshold that requests may name."""
    artefact: str | None = Field(default=None, min_length=1)
    """Folder of the exits in use from now on; None: the one of the engine's settings. Taken without a restart."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LivePolicy:
        """A checked policy; what is wrong is named as everywhere else. What only an engine can tell, such as whether
        its artefact has this bound, is not known here."""
        refuse_unknown("user_config", values, list(cls.model_fields))
        try:
            policy = cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"user_config.{name}", first["input"], first["msg"]) from error
        for mode in policy.modes:
            if mode not in MODES:
                raise ConfigError("user_config.modes", mode, f"some of {', '.join(MODES)}")
        try:
            params = policy.params({}, Caller(), natural_mode="verified")
        except (RequestError, ForbiddenError) as error:
            raise ConfigError(f"user_config.{error.field}", error.value, error.expected) from error
        if policy.mode not in (None, params.mode):
            raise ConfigError("user_config.mode", policy.mode, f"one of modes: {', '.join(policy.modes)}")
        return policy

    def params(self, given: Mapping[str, Any], caller: Caller, natural_mode: str = "full") -> SamplingParams:
        """Parameters of a request: what it gives, and this policy where it is silent. `natural_mode` is the mode where
        the policy is silent too. What a request names and may not have is forbidden; what it leaves open is chosen
        among what it may have."""
        values = {name: value for name, value in given.items() if value is not None}
        allowed = [mode for mode in self.modes if mode in caller.modes]
        if "mode" not in values:
            values = {**self._contract(allowed, natural_mode, caller, named_bound="epsilon" in values), **values}
        params = SamplingParams(**values)
        if params.mode not in allowed:
            raise ForbiddenError("mode", params.mode, f"one of {', '.join(allowed) or 'none'}: others are not allowed")
        least = max(self.min_threshold, caller.min_threshold)
        if params.threshold is not None and params.threshold < least:
            raise ForbiddenError("threshold", params.threshold, f"at least {least:g}: less is not allowed")
        return replace(params, min_layers=self.min_layers) if params.min_layers < self.min_layers else params

    def _contract(self, allowed: Sequence[str], natural: str, caller: Caller, *, named_bound: bool) -> dict[str, Any]:
        """Mode, bound and threshold of a request that names no mode."""
        if self.mode is None and named_bound:
            return {}  # refused as it stands: a bound needs its mode beside it
        mode = self.mode or _first(self.modes, natural)
        if mode not in allowed:  # to this caller; bound and threshold are of the other mode
            return {"mode": _first(allowed, natural)}
        threshold = None if self.threshold is None else max(self.threshold, caller.min_threshold)
        return {"mode": mode, "epsilon": self.epsilon, "threshold": threshold}


def _first(allowed: Sequence[str], natural: str) -> str:
    return natural if natural in allowed or not allowed else allowed[0]

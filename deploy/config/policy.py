"""The live exit policy (`user_config`). A change takes effect without a restart, for new requests; running requests
keep the policy they started with."""

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
    """Defaults for values that a request does not give, and limits for all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    mode: str | None = None
    """Mode of a request that gives none. None: verified with an artefact or suffix drafts, else full."""
    epsilon: float | None = None
    """Share of tokens of such a request that may differ from full depth's choice, if `mode` is bounded."""
    margin: float | None = None
    """Nats by which such a token may be less likely than that choice."""
    threshold: float | None = None
    """Least score at which its tokens exit; None: as calibrated."""
    min_layers: int = Field(default=0, ge=0, le=2**16)
    """No token of any request exits before this many layers."""
    modes: list[str] = Field(default=list(MODES), min_length=1)
    """Modes that requests may use."""
    min_threshold: float = Field(default=0.0, ge=0.0, le=2.0)
    """Least threshold that requests may give."""
    artefact: str | None = Field(default=None, min_length=1)
    """The calibrated exits: a folder, a URL, or a pointer to a published artefact; None: those in the settings of the
    engine. Changes without a restart."""
    audit_epoch: int = Field(default=0, ge=0, le=2**31 - 1)
    """Any change of this number makes replicas forget what audits of mode fast have found, so that tenants served as
    verified after an alarm get fast again. Another artefact does so, too."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LivePolicy:
        """A checked policy; a ConfigError names a bad field. Checks that need an engine, such as whether it has this
        mode, are left to `Service.apply`."""
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
        """Parameters of a request: its own values, and this policy's for the others. `natural_mode` is the mode if the
        policy gives none either. A given value that is not allowed is refused; defaults are chosen among allowed
        values."""
        values = {name: value for name, value in given.items() if value is not None}
        allowed = [mode for mode in self.modes if mode in caller.modes]
        if "mode" not in values:
            values = {
                **self._contract(
                    allowed, natural_mode, caller, named_budget=bool({"epsilon", "margin"} & values.keys())
                ),
                **values,
            }
        params = SamplingParams(**values)
        if params.mode not in allowed:
            raise ForbiddenError("mode", params.mode, f"one of {', '.join(allowed) or 'none'}: others are not allowed")
        least = max(self.min_threshold, caller.min_threshold)
        if params.threshold is not None and params.threshold < least:
            raise ForbiddenError("threshold", params.threshold, f"at least {least:g}: less is not allowed")
        return replace(params, min_layers=self.min_layers) if params.min_layers < self.min_layers else params

    def _contract(self, allowed: Sequence[str], natural: str, caller: Caller, *, named_budget: bool) -> dict[str, Any]:
        """Mode, budget and threshold of a request that gives no mode."""
        if self.mode is None and named_budget:
            return {}  # `SamplingParams` refuses a budget without its mode
        mode = self.mode or _first(self.modes, natural)
        if mode not in allowed:  # not for this caller; budget and threshold belong to the other mode
            return {"mode": _first(allowed, natural)}
        threshold = None if self.threshold is None else max(self.threshold, caller.min_threshold)
        return {"mode": mode, "epsilon": self.epsilon, "margin": self.margin, "threshold": threshold}


def _first(allowed: Sequence[str], natural: str) -> str:
    return natural if natural in allowed or not allowed else allowed[0]

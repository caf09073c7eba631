"""`TIDEConfig`: the settings of TIDE. A setting that TIDE does not support is refused, with its replacement.

    calibrate(model, tokenizer, save_path="exits", config=TIDEConfig(calibration_samples=4000))
    TIDE(model, "exits", config=TIDEConfig(mode="fast", exit_threshold=0.9))

One object may serve both calls: `calibrate` reads the calibration settings and `TIDE` the decoding settings.
Calibration chooses exit settings that are not given; the others have the engine's defaults. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tide_core.errors import ConfigError, RequestError, refuse_unknown
from tide_core.request import MAX_THRESHOLD, SamplingParams

EXIT_STRATEGIES = ("identity", "affine", "mlp", "block")

REFUSED = {
    "convergence_threshold": "none: exits are trained on agreement with the full-depth token, not on the cosine of "
    "states; to bound disagreement, use mode='bounded' with an epsilon and a margin",
    "compaction_threshold": "none: a pass runs only the tokens that still need its layers, however few have exited; "
    "max_pending of the engine bounds how long a token waits for its deep pass",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TIDEConfig:
    """Frozen; checked when constructed."""

    mode: str | None = None
    """The contract: full, verified, bounded or fast. None: verified with an artefact or suffix drafts, else full."""
    epsilon: float | None = None
    """For mode bounded: most tokens of an answer that full depth would not have chosen, as a share; None: 0.05."""
    margin: float | None = None
    """For mode bounded: how many nats less likely such a token may be than full depth's choice; None: 0.2."""
    exit_threshold: float | None = None
    """Least router score of a draft (verified, bounded) or of an exit (fast); at 1 no token exits. None: calibrated."""
    min_layers: int = 0
    """No exit before this many layers have run."""
    kv_cache_strategy: str | None = None
    """K and V of skipped layers: `exact` (all modes but fast) or `propagate` (mode fast). The mode decides."""

    checkpoint_interval: int | None = None
    """Calibration: try a checkpoint after every N layers, except the last. None: one shallow checkpoint."""
    calibration_samples: int | None = None
    """Calibration: most prompts or documents."""
    calibration_dataset: str | None = None
    """Calibration: `self` (the default), a file or folder, or a `datasets` name. One that fails to load is an error."""
    exit_strategy: str | None = None
    """Calibration: the kind of exit head: identity, affine, mlp or block (the default)."""
    router_bottleneck_dim: int | None = None
    """Calibration: width of the routers."""

    convergence_threshold: None = None
    """Refused."""
    compaction_threshold: None = None
    """Refused."""
    profile: bool = False
    """Refused if true."""

    def __post_init__(self) -> None:
        for name, instead in REFUSED.items():
            if getattr(self, name) is not None:
                raise ConfigError(name, getattr(self, name), instead)
        if self.profile is not False:
            expected = "false: every call writes its counts to last_stats; tide generate --show-exits measures speed"
            raise ConfigError("profile", self.profile, expected)
        threshold = self.exit_threshold
        plain = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if threshold is not None and not (plain and 0 <= threshold <= 1):
            raise ConfigError("exit_threshold", threshold, "a score from 0 up to 1")
        if self.exit_strategy is not None and self.exit_strategy not in EXIT_STRATEGIES:
            raise ConfigError("exit_strategy", self.exit_strategy, f"one of {', '.join(EXIT_STRATEGIES)}")
        for name in ("checkpoint_interval", "calibration_samples", "router_bottleneck_dim"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(name, value, "an integer of at least 1")
        data = self.calibration_dataset
        if data is not None and (not isinstance(data, str) or not data.strip()):
            raise ConfigError("calibration_dataset", data, "self, a file or folder, or a datasets name")
        try:
            SamplingParams(**self.request_settings())
        except RequestError as error:
            field = "exit_threshold" if error.field == "threshold" else error.field
            raise ConfigError(field, error.value, error.expected) from error
        self._check_kv()

    def _check_kv(self) -> None:
        strategy, fast = self.kv_cache_strategy, self.mode == "fast"
        if strategy is None or (strategy == "propagate" and fast) or (strategy == "exact" and not fast):
            return
        if strategy == "zero_pad":
            expected = "exact or propagate: with zeros for K and V later tokens would attend to wrong context"
        elif strategy in ("exact", "propagate"):
            expected = f"{'propagate' if fast else 'exact'} in mode {self.mode or 'verified'}, or none"
            expected += "" if fast else "; propagate needs mode fast"
        else:
            expected = "exact or propagate"
        raise ConfigError("kv_cache_strategy", strategy, expected)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TIDEConfig:
        """From YAML or JSON values; an unknown key names itself and the nearest known one."""
        refuse_unknown("TIDEConfig", values, [f.name for f in fields(cls)])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write YAML with the settings that differ from the defaults."""
        import yaml

        blank = TIDEConfig()
        given = {key: value for key, value in asdict(self).items() if value != getattr(blank, key)}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(given, sort_keys=False) if given else "", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TIDEConfig:
        """Read YAML that `save` or a person wrote."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError("TIDEConfig", path, f"a readable YAML file: {error}") from error
        if not isinstance(values or {}, Mapping):
            raise ConfigError("TIDEConfig", path, "a YAML file of keys and values")
        return cls.from_mapping(values or {})

    def request_settings(self) -> dict[str, Any]:
        """These settings as fields of `SamplingParams`."""
        threshold = self.exit_threshold
        if threshold is not None and threshold >= 1:
            threshold = MAX_THRESHOLD  # a score may round to 1 and must not pass
        return {
            "mode": self.mode,
            "epsilon": self.epsilon,
            "margin": self.margin,
            "threshold": threshold,
            "min_layers": self.min_layers,
        }

    def calibration_settings(self, num_layers: int) -> dict[str, Any]:
        """These settings as fields of `CalibrationConfig`, for a model with `num_layers` layers."""
        values: dict[str, Any] = {
            "num_samples": self.calibration_samples,
            "data": self.calibration_dataset,
            "router_bottleneck": self.router_bottleneck_dim,
            "heads": None if self.exit_strategy is None else (self.exit_strategy,),
        }
        if (interval := self.checkpoint_interval) is not None:
            if interval >= num_layers:
                raise ConfigError("checkpoint_interval", interval, f"below the model's {num_layers} layers")
            values["checkpoints"] = tuple(range(interval, num_layers, interval))
        return {key: value for key, value in values.items() if value is not None}


def checked(config: TIDEConfig | None) -> TIDEConfig:
    """The config, or all defaults for None."""
    if config is not None and not isinstance(config, TIDEConfig):
        raise ConfigError("config", type(config).__name__, "a TIDEConfig")
    return config or TIDEConfig()

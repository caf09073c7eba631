"""Every setting of `TIDEConfig` works or is refused with its replacement."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tide_core.calibration.config import HEADS, CalibrationConfig
from tide_core.errors import ConfigError
from tide_core.request import SamplingParams
from tide_core.tide.config import EXIT_STRATEGIES, REFUSED, TIDEConfig

pytestmark = pytest.mark.unit

FIRST_TIDE = {
    "checkpoint_interval": 4,
    "exit_threshold": 0.85,
    "min_layers": 8,
    "compaction_threshold": 0.25,
    "exit_strategy": "identity",
    "calibration_samples": 2000,
    "calibration_dataset": "wikitext",
    "router_bottleneck_dim": 128,
    "convergence_threshold": 0.98,
    "kv_cache_strategy": "zero_pad",
    "profile": True,
}
"""The settings users may come with, at values they had."""
DOES = ("checkpoint_interval", "exit_threshold", "min_layers", "exit_strategy", "calibration_samples")
DOES += ("calibration_dataset", "router_bottleneck_dim")


@pytest.mark.parametrize("name", FIRST_TIDE)
def test_every_setting_is_known_and_has_an_effect_or_is_refused_by_name(name: str) -> None:
    values = {name: FIRST_TIDE[name]}
    if name in DOES:
        config, blank = TIDEConfig(**values), TIDEConfig()
        meant = config.request_settings() | config.calibration_settings(12)
        assert meant != blank.request_settings() | blank.calibration_settings(12)
        return
    with pytest.raises(ConfigError) as refusal:
        TIDEConfig(**values)
    assert refusal.value.field == name
    assert repr(FIRST_TIDE[name]) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("convergence_threshold", 0.98, "mode='bounded' with an epsilon"),
        ("compaction_threshold", 0.25, "none: "),
        ("kv_cache_strategy", "zero_pad", "exact or propagate"),
        ("profile", True, "last_stats"),
    ],
)
def test_a_refusal_says_what_to_use_instead(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        TIDEConfig(**{name: value})


def test_settings_of_decoding_become_parameters_of_requests() -> None:
    config = TIDEConfig(mode="fast", exit_threshold=0.9, min_layers=3)
    params = SamplingParams(**config.request_settings())
    assert (params.mode, params.threshold, params.min_layers, params.epsilon) == ("fast", 0.9, 3, None)
    assert SamplingParams(**TIDEConfig().request_settings()) == SamplingParams()
    asked = TIDEConfig(mode="bounded", epsilon=0.05, margin=0.5).request_settings()
    assert (asked["epsilon"], asked["margin"]) == (0.05, 0.5)


def test_an_exit_threshold_of_one_lets_no_score_pass() -> None:
    assert TIDEConfig(exit_threshold=1.0).request_settings()["threshold"] > 1
    assert TIDEConfig(exit_threshold=0.99).request_settings()["threshold"] == 0.99


def test_settings_of_calibration_become_its_own() -> None:
    config = TIDEConfig(
        checkpoint_interval=4,
        calibration_samples=100,
        calibration_dataset="texts.jsonl",
        exit_strategy="affine",
        router_bottleneck_dim=32,
    )
    got = CalibrationConfig.from_mapping(config.calibration_settings(12))
    assert (got.checkpoints, got.num_samples, got.data) == ((4, 8), 100, "texts.jsonl")
    assert (got.heads, got.router_bottleneck) == (("affine",), 32)
    assert CalibrationConfig.from_mapping(TIDEConfig().calibration_settings(12)) == CalibrationConfig()


def test_a_checkpoint_interval_as_long_as_the_model_is_refused() -> None:
    assert TIDEConfig(checkpoint_interval=3).calibration_settings(4)["checkpoints"] == (3,)
    with pytest.raises(ConfigError, match="below the model's 4 layers"):
        TIDEConfig(checkpoint_interval=4).calibration_settings(4)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"exit_threshold": 1.5}, "exit_threshold"),
        ({"exit_threshold": math.nan}, "exit_threshold"),
        ({"exit_threshold": True}, "exit_threshold"),
        ({"exit_threshold": 0.5, "mode": "full"}, "exit_threshold"),
        ({"margin": 0.2}, "margin"),
        ({"margin": 0.0, "mode": "bounded"}, "margin"),
        ({"epsilon": 0.02}, "epsilon"),
        ({"epsilon": 2.0, "mode": "bounded"}, "epsilon"),
        ({"mode": "quick"}, "mode"),
        ({"min_layers": -1}, "min_layers"),
        ({"min_layers": None}, "min_layers"),
        ({"exit_strategy": "best"}, "exit_strategy"),
        ({"checkpoint_interval": 0}, "checkpoint_interval"),
        ({"calibration_samples": "many"}, "calibration_samples"),
        ({"calibration_dataset": " "}, "calibration_dataset"),
        ({"router_bottleneck_dim": 1.5}, "router_bottleneck_dim"),
        ({"kv_cache_strategy": "propagate"}, "kv_cache_strategy"),
        ({"kv_cache_strategy": "exact", "mode": "fast"}, "kv_cache_strategy"),
        ({"kv_cache_strategy": "none"}, "kv_cache_strategy"),
    ],
    ids=str,
)
def test_bad_values_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        TIDEConfig(**values)
    assert refusal.value.field == field


def test_how_skipped_layers_get_their_kv_goes_with_the_mode() -> None:
    assert TIDEConfig(mode="fast", kv_cache_strategy="propagate").mode == "fast"
    for mode in (None, "full", "verified", "bounded"):
        assert TIDEConfig(mode=mode, kv_cache_strategy="exact").mode == mode


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean exit_threshold\?"):
        TIDEConfig.from_mapping({"exit_treshold": 0.5})
    with pytest.raises(TypeError):
        TIDEConfig(exit_treshold=0.5)  # type: ignore[call-arg]


def test_yaml_brings_back_what_was_saved(tmp_path: Path) -> None:
    for config in (TIDEConfig(), TIDEConfig(mode="bounded", epsilon=0.05, min_layers=2, calibration_dataset="self")):
        path = tmp_path / "deep" / "config.yaml"
        config.save(path)
        assert TIDEConfig.load(path) == config


@pytest.mark.parametrize("text", ["- 1\n", "min_layers: [1\n", "\tx", None], ids=str)
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        TIDEConfig.load(path)


def test_the_lists_here_and_elsewhere_are_one() -> None:
    assert EXIT_STRATEGIES == HEADS
    assert set(REFUSED) <= {f.name for f in fields(TIDEConfig)}

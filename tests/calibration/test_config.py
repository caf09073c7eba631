from __future__ import annotations

from typing import Any

import pytest

from tide_core.calibration.config import CalibrationConfig
from tide_core.errors import ConfigError


def test_settings_survive_json_and_keep_their_digest() -> None:
    config = CalibrationConfig(checkpoints=(2, 5), heads=("block", "affine"), max_drafts=3, shortlist_size=None)

    again = CalibrationConfig.from_mapping(config.to_mapping())

    assert again == config
    assert again.digest == config.digest != CalibrationConfig().digest


def test_an_unknown_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean learning_rate"):
        CalibrationConfig.from_mapping({"learning_rat": 1e-3})


def test_compare_steps_are_refused_with_what_replaces_them() -> None:
    with pytest.raises(ConfigError, match=r"compare_steps: got 0, .*removed; `candidates` lists all heads"):
        CalibrationConfig.from_mapping({"compare_steps": 0})


@pytest.mark.parametrize(
    "bad",
    [
        {"data": " "},
        {"num_samples": 2},
        {"num_samples": 10.0},
        {"seed": -1},
        {"seed": True},
        {"greedy_share": 1.5},
        {"temperature": 0.0},
        {"calibration_share": 0.5, "test_share": 0.5},
        {"checkpoints": (5, 2)},
        {"checkpoints": (0,)},
        {"checkpoints": [2]},
        {"heads": ()},
        {"heads": ("block", "block")},
        {"heads": ("tall",)},
        {"deep_inputs": 1},
        {"generation_batch": 0},
        {"max_drafts": 65},
        {"measure_batches": [1]},
        {"measure_batches": (0,)},
        {"measure_batches": (2, 2)},
        {"measure_seconds": 0},
    ],
)
def test_values_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        CalibrationConfig(**bad)


@pytest.mark.parametrize(("num_layers", "expected"), [(30, (2,)), (32, (2,)), (4, (1,)), (2, (1,)), (80, (5,))])
def test_checkpoints_follow_the_depth_of_the_model(num_layers: int, expected: tuple[int, ...]) -> None:
    assert CalibrationConfig().checkpoints_for(num_layers) == expected


def test_a_checkpoint_is_never_the_last_layer() -> None:
    assert CalibrationConfig(checkpoints=(1, 3)).checkpoints_for(4) == (1, 3)
    with pytest.raises(ConfigError, match="layers below 4"):
        CalibrationConfig(checkpoints=(1, 4)).checkpoints_for(4)
    with pytest.raises(ConfigError, match="at least 2"):
        CalibrationConfig().checkpoints_for(1)


@pytest.mark.parametrize("name", ["epsilons", "delta"])
def test_settings_of_the_former_bound_are_refused_with_what_took_their_place(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*mode bounded needs no calibration"):
        CalibrationConfig.from_mapping({name: 0.05})

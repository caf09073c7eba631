from __future__ import annotations

import math
from typing import Any

import pytest

from tide_core.config import EngineConfig, ResolvedConfig
from tide_core.errors import ConfigError
from tide_core.execution.depth_loop import plan_segments

pytestmark = pytest.mark.unit


def short(value: Any) -> str:
    return "huge" if isinstance(value, int) and abs(value) > 10**30 else repr(value)[:24]


BAD_VALUES: list[tuple[str, Any]] = [
    *(("model", v) for v in ("", None, 3)),
    *(("dtype", v) for v in ("int8", "fp32", None)),
    *(("device", v) for v in ("tpu", 0)),
    *(("kernels", v) for v in ("fast", True)),
    *(("max_model_len", v) for v in (0, 1, -5, 1.5, True, 2**30)),
    *(("kv_memory_gib", v) for v in (0, -1, math.nan, math.inf, 10**400, "1", "all", True)),
    *(("gpu_memory_utilization", v) for v in (0, 1.01, math.nan, "0.9", True)),
    *(("artefact_swap", v) for v in (1, "yes", None)),
    *(("block_size", v) for v in (0, 1025, 2.0)),
    *(("max_rows", v) for v in (0, 10**6, "8", True)),
    *(("max_batch_tokens", v) for v in (0, 2**30, "many")),
    *(("num_threads", v) for v in (0, 4096, 1.0)),
    *(("max_queued", v) for v in (0, -1)),
    *(("audit_share", v) for v in (-0.1, 1.1, math.nan, True, "all")),
    *(("audit_delta", v) for v in (0, 1, math.nan, True, "none")),
    *(("prefix_caching", v) for v in (1, "yes", None)),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=short)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**{field: value})
    assert refusal.value.field == field


def test_fewer_tokens_in_a_step_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens: got 63, expected at least max_rows \(64\)"):
        EngineConfig(max_rows=64, max_batch_tokens=63)
    EngineConfig(max_batch_tokens=63)


@pytest.mark.parametrize("name", ["dtype", "device", "kv_memory_gib", "max_rows", "max_batch_tokens"])
def test_settings_in_force_hold_no_auto(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got 'auto', expected a value"):
        ResolvedConfig(**{name: "auto"})


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_token.*did you mean max_batch_tokens"):
        EngineConfig.from_mapping({"max_batch_token": 3})


def test_an_unknown_key_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(ConfigError, match="kv_memory_gib"):
        EngineConfig.from_mapping({"zzz": 3})


def test_checkpoint_layers_are_refused_because_the_artefact_decides() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_layers: got \[2, 8\], .*removed, because the artefact decides"):
        EngineConfig.from_mapping({"checkpoint_layers": [2, 8]})


def test_segments_cover_every_layer_once() -> None:
    assert [list(s) for s in plan_segments(6, (1, 4))] == [[0], [1, 2, 3], [4, 5]]
    assert [list(s) for s in plan_segments(3, ())] == [[0, 1, 2]]


def test_the_last_layer_is_no_checkpoint() -> None:
    with pytest.raises(ConfigError, match="checkpoint_layers"):
        plan_segments(4, (2, 4))

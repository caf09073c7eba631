"""What `auto` means on a device: the KV pool, rows and tokens of a step, and what fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tide_core.config import GIB, EngineConfig, ResolvedConfig
from tide_core.errors import ConfigError
from tide_core.kv.memory import available_memory, device_memory
from tide_core.kv.sizing import (
    GRAPHS_AND_CONTEXT,
    DeviceMemory,
    ModelSize,
    cpu_pool_bytes,
    described,
    fit,
    gpu_pool_bytes,
    reserve_bytes,
    resolve_config,
)

pytestmark = pytest.mark.unit

TOKEN = 2**17
"""Bytes that a token of Llama 3.1 8B takes."""
LLAMA_8B = ModelSize(hidden=4096, vocab=128256, itemsize=2, block_bytes=16 * TOKEN, max_model_len=131072)
SMALL = ModelSize(hidden=576, vocab=49152, itemsize=4, block_bytes=16 * 2**14, max_model_len=8192)
CPU = DeviceMemory("cpu", free=8 * GIB)


def auto(**settings: object) -> EngineConfig:
    return EngineConfig.from_mapping({"kv_memory_gib": "auto", **settings})


def given(**settings: object) -> EngineConfig:
    return auto(max_rows=64, max_batch_tokens=512, **settings)


def gpu(total: int, own: int = 0, free: int | None = None) -> DeviceMemory:
    """A GPU that is not here, in GiB."""
    return DeviceMemory("cuda", total * GIB, None if free is None else free * GIB, own * GIB)


def resolved(config: EngineConfig, memory: DeviceMemory, size: ModelSize = LLAMA_8B) -> ResolvedConfig:
    return resolve_config(config, memory, size, dtype="bfloat16")


def test_the_pool_is_the_share_of_the_gpu_less_weights_and_reserve() -> None:
    assert gpu_pool_bytes(gpu(80, own=16, free=63), 0.9, 4 * GIB, 1) == (72 - 16 - 4) * GIB


def test_two_pools_fit_where_the_artefact_may_change() -> None:
    assert gpu_pool_bytes(gpu(80, own=16, free=63), 0.9, 4 * GIB, 2) == (72 - 16 - 4) * GIB // 2


def test_a_share_is_of_this_process_and_what_others_have_is_taken() -> None:
    """Two replicas on one GPU with 0.45 each; then one that finds less than its share."""
    assert gpu_pool_bytes(gpu(80, own=4, free=40), 0.45, GIB, 1) == (36 - 4 - 1) * GIB
    assert gpu_pool_bytes(gpu(80, own=4, free=10), 0.45, GIB, 1) == 9 * GIB


def test_a_gpu_that_the_weights_fill_has_nothing_left() -> None:
    assert gpu_pool_bytes(gpu(80, own=76, free=2), 0.9, 2 * GIB, 1) == 0


def test_the_reserve_grows_with_rows_drafts_vocabulary_and_chunk() -> None:
    usual = reserve_bytes(given(), LLAMA_8B)
    assert usual > GRAPHS_AND_CONTEXT
    assert reserve_bytes(auto(max_rows=128, max_batch_tokens=512), LLAMA_8B) > usual
    assert reserve_bytes(given(max_pending=16), LLAMA_8B) > usual
    assert reserve_bytes(auto(max_rows=64, max_batch_tokens=2048), LLAMA_8B) > usual
    assert reserve_bytes(given(), ModelSize(4096, 32000, 2, 16 * TOKEN, 131072)) < usual
    assert reserve_bytes(auto(max_rows=128, max_batch_tokens=2048), LLAMA_8B) < 6 * GIB


@pytest.mark.parametrize("swap", [True, False])
def test_on_a_gpu_the_pool_is_measured_by_its_driver(monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (124 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    config = given(artefact_swap=swap, gpu_memory_utilization=0.8)
    left = 112 * GIB - 15 * GIB - reserve_bytes(config, LLAMA_8B)
    in_force = resolved(config, device_memory(torch.device("cuda")))
    assert in_force.kv_memory_bytes == left // (1 + swap)


def test_spare_blocks_come_out_of_what_was_measured() -> None:
    with_spare = ModelSize(4096, 128256, 2, 16 * TOKEN, 131072, spare_blocks=100)
    whole, less = (resolved(given(), gpu(140, own=15), size) for size in (LLAMA_8B, with_spare))
    assert whole.kv_memory_gib - less.kv_memory_gib == 100 * 16 * TOKEN / GIB


def test_a_size_that_is_given_is_taken_on_any_device() -> None:
    for memory in (gpu(140, own=15), CPU):
        assert resolved(EngineConfig(kv_memory_gib=2), memory).kv_memory_gib == 2


@pytest.mark.parametrize(
    ("available", "expected"), [(None, GIB), (64 * GIB, GIB), (GIB // 2, int(0.9 * GIB / 2)), (0, 0)], ids=str
)
def test_on_a_cpu_it_is_the_usual_size_unless_memory_is_short(available: int | None, expected: int) -> None:
    assert cpu_pool_bytes(available) == expected


def test_on_a_cpu_the_share_of_a_gpu_means_nothing() -> None:
    for share in (0.1, 0.9):
        config = auto(gpu_memory_utilization=share)
        assert resolved(config, DeviceMemory("cpu", free=GIB // 2), SMALL).kv_memory_bytes == int(0.9 * GIB / 2)


def test_a_row_that_does_not_fit_is_refused_with_what_there_is_what_is_taken_and_what_is_missing() -> None:
    with pytest.raises(ConfigError) as refusal:
        resolved(given(), gpu(24, own=15, free=8))
    text = str(refusal.value)
    assert text.startswith(
        "kv_memory_gib: got 'auto', expected memory for one row of max_model_len (131072 tokens), 16.00 GiB; "
    )
    share, reserve = int(0.9 * 24 * GIB), reserve_bytes(given(), LLAMA_8B)
    pool = (share - 15 * GIB - reserve) // 2
    assert f"the pool gets {pool / GIB:.2f} GiB, so {(16 * GIB - pool) / GIB:.2f} GiB are missing" in text
    assert "the GPU has 24.00 GiB (8.00 GiB of them free), of which gpu_memory_utilization (0.9) allows 21.60" in text
    assert f"weights take 15.00 GiB, steps {reserve / GIB:.2f} GiB" in text
    assert "artefact_swap" in text


def test_a_row_that_does_not_fit_on_a_cpu_is_refused_with_what_is_available() -> None:
    with pytest.raises(ConfigError, match=r"16\.00 GiB; the pool gets 0\.90 GiB.*: 1\.00 GiB of memory are available"):
        resolved(auto(), DeviceMemory("cpu", free=GIB))


def test_a_given_pool_may_hold_less_than_a_row_of_full_length() -> None:
    assert resolved(EngineConfig(kv_memory_gib=1), gpu(24, own=15)).kv_memory_gib == 1


def test_on_a_cpu_rows_and_tokens_are_as_ever() -> None:
    config = resolved(auto(), CPU, SMALL)
    assert (config.max_rows, config.max_batch_tokens) == (64, 512)


@pytest.mark.parametrize(("total", "tokens"), [(24, 2048), (48, 2048), (79, 8192), (139, 8192)])
def test_a_large_gpu_takes_more_tokens_in_a_step(total: int, tokens: int) -> None:
    assert resolved(auto(max_model_len=2048), gpu(total, own=2), SMALL).max_batch_tokens == tokens


@pytest.mark.parametrize(
    ("total", "size", "rows"), [(139, SMALL, 256), (139, LLAMA_8B, 128), (79, LLAMA_8B, 64), (60, LLAMA_8B, 64)]
)
def test_on_a_gpu_rows_are_as_many_as_the_pool_holds_of_a_typical_context(
    total: int, size: ModelSize, rows: int
) -> None:
    config = resolved(auto(), gpu(total, own=15), size)
    assert config.max_rows == rows
    fits = [more for more in (128, 256) if fit(config, size).num_blocks * 16 >= more * 2048]
    assert config.max_rows == max(fits, default=64)


def test_a_given_pool_decides_the_rows_as_well() -> None:
    few, many = (resolved(EngineConfig(kv_memory_gib=size), gpu(139), SMALL) for size in (1, 16))
    assert (few.max_rows, many.max_rows) == (64, 256)


def test_rows_never_exceed_the_tokens_of_a_step_that_are_given() -> None:
    assert resolved(auto(max_batch_tokens=48), CPU, SMALL).max_rows == 48
    assert resolved(auto(max_batch_tokens=200), gpu(139), SMALL).max_rows == 128


def test_tokens_are_enough_for_the_rows_that_are_given() -> None:
    assert resolved(auto(max_rows=1000), CPU, SMALL).max_batch_tokens == 1000
    assert resolved(auto(max_rows=8), CPU, SMALL).max_batch_tokens == 512


def test_free_memory_that_differs_a_little_changes_no_rows() -> None:
    """The cost table of an earlier start is then found again."""
    rows = {
        resolved(auto(), DeviceMemory("cuda", 139 * GIB, free, 15 * GIB)).max_rows for free in (123 * GIB, 122 * GIB)
    }
    assert rows == {128}


def test_settings_in_force_resolve_to_themselves_whatever_is_left() -> None:
    first = resolved(auto(), gpu(139, own=15))
    assert resolved(first, gpu(139, own=120, free=2)) == first


def test_the_line_of_the_start_says_what_was_chosen_and_what_fits() -> None:
    config, of_8b = EngineConfig(kv_memory_gib=32), replace(LLAMA_8B, weight_bytes=15 * GIB)
    in_force = resolved(config, gpu(139, own=15), ModelSize(4096, 128256, 2, 2**21, 8192))
    assert described(config, in_force, of_8b, "cuda:0") == (
        "weights 15.00 GiB, bfloat16 (auto) on cuda:0 (auto), KV pool 32.00 GiB in 16384 blocks, max_rows 128 (auto), "
        "max_batch_tokens 8192 (auto): fits 128 rows of 2048 tokens, or 2 of full length (131072)"
    )
    small, size = given(dtype="bfloat16", device="cpu", max_model_len=1024), ModelSize(576, 49152, 2, 2**14, 1024)
    assert described(small, resolved(small, CPU, size), size, "cpu") == (
        "weights 0.00 GiB, bfloat16 on cpu, KV pool 0.06 GiB (auto) in 4096 blocks, max_rows 64, max_batch_tokens 512: "
        "fits 64 rows of 1024 tokens"
    )


def test_available_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1025024\n")
    assert available_memory(meminfo, tmp_path) == 1024000

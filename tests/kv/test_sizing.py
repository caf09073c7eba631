"""The size of an `auto` KV pool: what a device has, less what is taken and what steps need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tide_core.config import GIB, EngineConfig
from tide_core.errors import ConfigError
from tide_core.kv.sizing import (
    GRAPHS_AND_CONTEXT,
    GpuMemory,
    ModelSize,
    available_memory,
    check_one_row,
    cpu_pool_bytes,
    described,
    gpu_pool_bytes,
    pool_bytes,
    reserve_bytes,
)

pytestmark = pytest.mark.unit

LLAMA_8B = ModelSize(hidden=4096, vocab=128256, itemsize=2)
CUDA = torch.device("cuda")


def auto(**settings: object) -> EngineConfig:
    return EngineConfig.from_mapping({"kv_memory_gib": "auto", **settings})


def test_the_pool_is_the_share_of_the_gpu_less_weights_and_reserve() -> None:
    memory = GpuMemory(total=80 * GIB, free=63 * GIB, own=16 * GIB)
    assert gpu_pool_bytes(memory, 0.9, 4 * GIB, 1) == (72 - 16 - 4) * GIB


def test_two_pools_fit_where_the_artefact_may_change() -> None:
    memory = GpuMemory(total=80 * GIB, free=63 * GIB, own=16 * GIB)
    assert gpu_pool_bytes(memory, 0.9, 4 * GIB, 2) == (72 - 16 - 4) * GIB // 2


def test_a_share_is_of_this_process_and_what_others_have_is_taken() -> None:
    """Two replicas on one GPU with 0.45 each; then one that finds less than its share."""
    second = GpuMemory(total=80 * GIB, free=40 * GIB, own=4 * GIB)
    assert gpu_pool_bytes(second, 0.45, GIB, 1) == (36 - 4 - 1) * GIB
    crowded = GpuMemory(total=80 * GIB, free=10 * GIB, own=4 * GIB)
    assert gpu_pool_bytes(crowded, 0.45, GIB, 1) == 9 * GIB


def test_a_gpu_that_the_weights_fill_has_nothing_left() -> None:
    assert gpu_pool_bytes(GpuMemory(80 * GIB, 2 * GIB, 76 * GIB), 0.9, 2 * GIB, 1) == 0


def test_the_reserve_grows_with_rows_drafts_vocabulary_and_chunk() -> None:
    usual = reserve_bytes(auto(), LLAMA_8B)
    assert usual > GRAPHS_AND_CONTEXT
    assert reserve_bytes(auto(max_rows=128), LLAMA_8B) > usual
    assert reserve_bytes(auto(max_pending=16), LLAMA_8B) > usual
    assert reserve_bytes(auto(max_batch_tokens=2048), LLAMA_8B) > usual
    assert reserve_bytes(auto(), ModelSize(4096, 32000, 2)) < usual
    assert reserve_bytes(auto(max_rows=128, max_batch_tokens=2048), LLAMA_8B) < 6 * GIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU that is not here."""

    def use(free: int, total: int, own: int) -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own)

    return use


@pytest.mark.parametrize("swap", [True, False])
def test_on_a_gpu_the_pool_is_measured_by_its_driver(gpu: Callable[..., None], swap: bool) -> None:
    gpu(free=124 * GIB, total=140 * GIB, own=15 * GIB)
    config = auto(artefact_swap=swap, gpu_memory_utilization=0.8)
    left = 112 * GIB - 15 * GIB - reserve_bytes(config, LLAMA_8B)
    assert pool_bytes(config, CUDA, LLAMA_8B) == left // (1 + swap)


def test_a_size_that_is_given_is_taken_on_any_device() -> None:
    assert pool_bytes(EngineConfig(kv_memory_gib=2), CUDA, LLAMA_8B) == 2 * GIB


@pytest.mark.parametrize(
    ("available", "expected"), [(None, GIB), (64 * GIB, GIB), (GIB // 2, GIB // 4), (0, 0)], ids=str
)
def test_on_a_cpu_it_is_the_usual_size_unless_memory_is_short(available: int | None, expected: int) -> None:
    assert cpu_pool_bytes(available, 0.5) == expected


def test_a_row_that_does_not_fit_is_refused_with_what_is_needed_and_what_is_available() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_one_row(auto(), CUDA, 3 * GIB, 4 * GIB, 32768)
    text = str(refusal.value)
    assert text.startswith("kv_memory_gib: got 'auto', expected 4.00 GiB for one row of max_model_len (32768 tokens)")
    assert "available are 3.00 GiB: 0.9 of a GPU (gpu_memory_utilization)" in text
    assert "artefact_swap" in text
    check_one_row(auto(), CUDA, 4 * GIB, 4 * GIB, 32768)
    check_one_row(EngineConfig(kv_memory_gib=1), CUDA, GIB, 4 * GIB, 32768)


def test_the_line_of_the_start_says_how_many_rows_of_which_context_fit() -> None:
    assert described(32 * GIB, 16384, 16, 128, 8192) == (
        "32.00 GiB, 16384 blocks of 16 tokens: 32 rows of 8192 tokens, or 128 (max_rows) of 2048"
    )
    assert described(GIB, 512, 16, 8, 1024) == "1.00 GiB, 512 blocks of 16 tokens: 8 rows of 1024 tokens"


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

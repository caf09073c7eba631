"""From settings to parts: what is read on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.factories import make_config, make_parts, tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.engine.assemble import assemble, assemble_loaded, cost_facts
from tide_core.engine.engine import Engine
from tide_core.errors import ConfigError
from tide_core.kv import memory
from tide_core.models import model_cache


@pytest.mark.parametrize("exits", [True, False])
def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: bool) -> None:
    hashed: list[str] = []
    sha256 = model_cache.sha256

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    artefact: Any = save_artefact_for_it(tmp_path / "artefact") if exits else "none"
    model = save_model(tmp_path / "model")
    monkeypatch.setattr(model_cache, "sha256", counted)

    assemble(make_config(model=str(model), artefact=str(artefact), drafts=2))

    assert hashed.count("model.safetensors") == 1


def test_an_auto_pool_takes_the_budget_that_was_chosen_and_one_line_says_what_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    with caplog.at_level("INFO", logger="tide"):
        parts = make_parts(kv_memory_gib="auto", max_model_len=64)
    assert parts.config.kv_memory_bytes == int(0.9 * 2**20)
    blocks = parts.core.scheduler.blocks
    [line] = [each for each in caplog.messages if each.startswith("settings: ")]
    assert line.startswith("settings: weights 0.00 GiB, float32 on cpu, KV pool 0.00 GiB (auto) in ")
    assert f"{blocks.num_blocks} blocks, max_rows 8, max_batch_tokens 64: fits 8 rows of 64 tokens" in line


def test_an_auto_pool_that_holds_no_whole_row_is_refused_with_what_is_needed_and_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**16)
    with pytest.raises(ConfigError, match=r"one row of max_model_len \(256 tokens\), 0\.00 GiB; the pool gets 0\.00"):
        make_parts(kv_memory_gib="auto", max_model_len=256)


def test_a_pool_of_a_given_size_asks_no_cpu_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: pytest.fail("measured"))
    assert make_parts(kv_memory_gib=0.01).config.kv_memory_gib == pytest.approx(0.01, abs=1e-8)


def test_all_that_depends_on_dtype_rows_and_tokens_sees_what_auto_became(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    settings = {"model": str(model), "dtype": "auto", "device": "auto", "max_rows": "auto", "max_batch_tokens": "auto"}
    parts = assemble(make_config(**settings, artefact="none", max_model_len=64))
    config, scheduler = parts.config, parts.core.scheduler
    assert (config.dtype, config.device, config.max_rows, config.max_batch_tokens) == ("float32", "cpu", 64, 512)
    assert (scheduler.max_rows, scheduler.max_batch_tokens) == (64, 512)
    facts = cost_facts(config, parts.runner, "identity", "none", 0)
    assert (facts["dtype"], facts["max_rows"]) == ("float32", 64)
    with Engine.from_parts(parts) as engine:
        assert engine.describe().dtype == "float32"
        assert engine.config is config


def test_settings_in_force_have_the_dtype_of_the_model_that_was_handed_in() -> None:
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    config = make_config(dtype="auto")
    parts = assemble_loaded(config, model, tiny_tokenizer(), name="llama", identity="llama")
    assert parts.config.dtype == "bfloat16"

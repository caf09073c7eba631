"""From settings to parts: what is read on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.factories import make_config, make_parts
from tide_core.engine import assemble as assembling
from tide_core.engine.assemble import assemble
from tide_core.errors import ConfigError
from tide_core.kv import sizing
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


def test_an_auto_pool_takes_the_budget_that_was_chosen_and_the_log_says_what_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 2**20)
    with caplog.at_level("INFO", logger="tide"):
        parts = make_parts(kv_memory_gib="auto", max_model_len=64, gpu_memory_utilization=0.5)
    assert parts.kv_memory_gib == 2**19 / 2**30
    blocks = parts.core.scheduler.blocks
    [line] = [each for each in caplog.messages if each.startswith("KV pool: ")]
    assert line.startswith("KV pool: chosen (auto): ")
    assert f"{blocks.num_blocks} blocks of 16 tokens: {blocks.num_blocks // 4} rows of 64 tokens" in line


def test_an_auto_pool_that_holds_no_whole_row_is_refused_with_what_is_needed_and_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 2**16)
    with pytest.raises(
        ConfigError, match=r"0\.00 GiB for one row of max_model_len \(256 tokens\); available are 0\.00"
    ):
        make_parts(kv_memory_gib="auto", max_model_len=256)


def test_a_pool_of_a_given_size_asks_no_device_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: pytest.fail("measured"))
    assert make_parts(kv_memory_gib=0.01).kv_memory_gib == pytest.approx(0.01, abs=1e-8)
    assert assembling.pool_bytes(make_config(kv_memory_gib=2.0), torch.device("cuda"), SIZE) == 2**31


SIZE = sizing.ModelSize(hidden=4096, vocab=128256, itemsize=2)

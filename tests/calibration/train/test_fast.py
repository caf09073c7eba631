"""Training of the exits of mode fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.calibration.tiny_runs import tiny_calibration
from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.train.candidates import CandidateSpec, make_candidate
from tide_core.calibration.train.fast import TrainedFast, answers_of, fast_layers, fit_fast, load_fast, save_fast
from tide_core.errors import ConfigError
from tide_core.exits.artefact.fast import FastExits, FastModules, fast_exit, refine

FEW = {"max_drafts": 3, "batch_tokens": 512, "fast_rank": 8, "fast_hidden": 32, "fast_layers": (2, 3)}


def fit(shards: TokenShards, steps: int, **settings: Any) -> TrainedFast:
    adapter = tiny_adapter()
    spec = CandidateSpec.parse("1:block:deep:taps=2+3")
    draft = make_candidate(adapter, spec, max_distance=3, bottleneck=8, seed=0)
    config = tiny_calibration(**{**FEW, "fast_steps": steps, **settings})
    return fit_fast(config, adapter, shards, SHORTLIST, draft, progress=SilentProgress())


def test_exits_come_to_agree_with_full_depth_and_skip_maps_to_predict_states(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    few, many = fit(shards, 1), fit(shards, 40)
    for layer in (2, 3):
        assert many.losses[f"agreement_{layer}"] > few.losses[f"agreement_{layer}"]
    for layer in (1, 2):
        assert many.losses[f"map_{layer}"] < 0.95 * few.losses[f"map_{layer}"]
    assert 0.0 < many.losses["left"] < 1.0
    assert 0.0 < many.losses["kept"] <= 1.0
    assert [each.layer for each in many.record.exits] == [2, 3]
    assert not any(p.requires_grad for skip_map in many.modules.maps for p in skip_map.parameters())


def test_neither_prompts_nor_padding_are_taken_for_answers() -> None:
    batch = SequenceBatch(torch.zeros(2, 6, dtype=torch.long), *map(torch.tensor, ([6, 3], [4, 1], [0, 1])))
    assert answers_of(batch).int().tolist() == [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]


def test_an_untrained_exit_says_what_the_one_before_it_says() -> None:
    record = FastExits((fast_exit(2, 16, 8, 4, 1e-5),), rank=2)
    [head] = FastModules.untrained(record, 1, 4, 16).heads
    states, before = torch.randn(3, 16), torch.randn(3, 16)
    passed = refine(head, states, before)
    assert torch.allclose(passed, torch.nn.functional.rms_norm(before, (16,)), atol=1e-4)


def test_the_same_run_gives_the_same_exits_and_a_file_gives_them_back(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    one, other = fit(shards, 3), fit(shards, 3)
    width = one.record.exits[0].head.width
    save_fast(tmp_path / "fast.safetensors", one, 1)
    loaded = load_fast(tmp_path / "fast.safetensors", 1, 4, width)
    assert (loaded.record, loaded.losses) == (one.record, one.losses)
    for again in (other, loaded):
        for name, module in again.modules.named(again.record, 1).items():
            mine = one.modules.named(one.record, 1)[name].state_dict()
            assert all(torch.equal(value, mine[key]) for key, value in module.state_dict().items()), name


def test_a_damaged_file_of_fast_exits_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "fast.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"fast\.safetensors"):
        load_fast(path, 1, 4, 48)


def test_exit_layers_are_thirds_of_the_depth_unless_set_and_lie_behind_the_draft_head() -> None:
    assert fast_layers(tiny_calibration(), 2, 30) == (10, 20)
    assert fast_layers(tiny_calibration(), 1, 2) == ()
    assert fast_layers(tiny_calibration(fast_layers=(5,)), 2, 30) == (5,)
    for layers in ((2, 9), (9, 30)):
        with pytest.raises(ConfigError, match="fast_layers"):
            fast_layers(tiny_calibration(fast_layers=layers), 2, 30)

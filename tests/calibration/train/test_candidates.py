"""Candidates are written in one line, fit every family, start from the model, and survive the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tests.tiny_models import FAMILIES
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.risk.trace import trace_candidates
from tide_core.calibration.train.candidates import (
    CandidateSpec,
    candidates_of,
    copy_block_weights,
    default_taps,
    head_spec,
    load_candidates,
    make_candidate,
    narrow_candidates,
    save_candidates,
)
from tide_core.calibration.train.train import fit
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import ExitHead


@pytest.mark.parametrize(
    "text",
    [
        "2:block:deep:muon:hidden=0:ffn=1536:lr=0.002",
        "1:block:deep:muon:inner=1152:ffn=3072",
        "1:identity",
        "28:affine:deep",
        "3:mlp:hidden=64",
    ],
)
def test_a_candidate_is_read_as_it_is_written(text: str) -> None:
    assert CandidateSpec.parse(text).name == text


NO_CANDIDATES = """2
block
2:blok
x:block
0:block
2:block:hidden
2:block:deep=1
2:block:hidden=x
2:mlp:
2:block:deep:deep
2:block:width=3"""


@pytest.mark.parametrize("text", ["", *NO_CANDIDATES.split()])
def test_what_is_no_candidate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layer:kind"):
        CandidateSpec.parse(text)


def test_a_checkpoint_after_the_last_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.\.3"):
        make_candidate(tiny_adapter(), CandidateSpec(4, "affine"), max_distance=2, bottleneck=8, seed=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_trained_and_traced_in_every_family(tmp_path: Path, family: str) -> None:
    adapter = tiny_adapter(family)
    shards = write_sequences(tmp_path, num=4)
    small = {"steps": 2, "batch_tokens": 64, "max_drafts": 2, "router_bottleneck": 8}
    candidates = fit(CalibrationConfig(candidates=("2:block:deep",), **small), adapter, shards, SHORTLIST).candidates
    [traces] = trace_candidates(adapter, candidates, shards, SHORTLIST, 2)
    assert len(traces.sequences) == 4


def test_shapes_follow_the_model_where_the_candidate_leaves_them_open() -> None:
    adapter = tiny_adapter("qwen3")
    spec = head_spec(adapter, CandidateSpec.parse("2:block:deep"), 6)
    assert (spec.width, spec.num_heads, spec.num_kv_heads, spec.head_size) == (48, 4, 2, 16)
    assert (spec.ffn, spec.hidden, spec.max_distance, spec.taps) == (96, 0, 6, (3,))
    assert spec.rope_theta == adapter.config.rope_parameters["rope_theta"]
    spec = head_spec(adapter, CandidateSpec.parse("2:block:hidden=0:ffn=40"), 6)
    assert (spec.ffn, spec.hidden, spec.max_distance) == (40, 0, 0)


def test_a_narrow_block_has_the_models_proportions_at_its_own_width() -> None:
    adapter = tiny_adapter("qwen3")
    spec = head_spec(adapter, CandidateSpec.parse("2:block:deep:inner=32"), 6)
    assert (spec.width, spec.inner, spec.deep_width, spec.ffn) == (48, 32, 32, 64)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (2, 1, 16)
    assert not head_spec(adapter, CandidateSpec.parse("2:block:deep:inner=48"), 6).narrow
    with pytest.raises(ConfigError, match=r"head\.inner: got 49, expected at most the model's 48"):
        head_spec(adapter, CandidateSpec.parse("2:block:deep:inner=49"), 6)


def test_wide_models_have_narrow_blocks_to_choose_from_and_small_ones_keep_the_usual_head() -> None:
    names = [spec.name for spec in narrow_candidates(CalibrationConfig(), 30, 4608)]
    assert names == ["1:block:deep:muon:inner=1152", "1:block:deep:muon:inner=2304"]
    assert narrow_candidates(CalibrationConfig(), 30, 1024) == []
    for named in ({"candidates": ("2:block",)}, {"head_inner": 0}, {"head_inner": 640}, {"heads": ("affine",)}):
        assert narrow_candidates(CalibrationConfig(**named), 30, 4608) == [], named
    assert {spec.layer for spec in narrow_candidates(CalibrationConfig(checkpoints=(3,)), 30, 4608)} == {3}
    [spec] = candidates_of(CalibrationConfig(head_inner=640), 30)
    assert spec.inner == 640


def test_rotary_base_is_that_of_full_attention_where_layers_differ() -> None:
    adapter = tiny_adapter("gemma3")
    assert head_spec(adapter, CandidateSpec(2, "block"), 2).rope_theta == 1_000_000.0
    assert head_spec(tiny_adapter("gpt2"), CandidateSpec(2, "block"), 2).rope_theta == 10000.0


def test_a_block_starts_with_the_weights_of_the_models_last_layer_and_adds_nothing_yet() -> None:
    adapter = tiny_adapter()
    head = make_candidate(adapter, CandidateSpec.parse("2:block"), max_distance=2, bottleneck=8, seed=0).head
    last = adapter.layers[-1]
    assert torch.equal(head.block.q_proj.weight, last.self_attn.q_proj.weight)
    assert torch.equal(head.block.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(head.block.mlp_norm.weight, last.post_attention_layernorm.weight)
    assert not head.block.o_proj.weight.any()
    assert not head.block.mlp.down_proj.weight.any()


@pytest.mark.parametrize("ffn", [40, 200])
def test_a_block_of_another_width_takes_what_fits(ffn: int) -> None:
    adapter = tiny_adapter()
    head = ExitHead(head_spec(adapter, CandidateSpec(2, "block", ffn=ffn), 2))
    assert "mlp.gate_proj" in copy_block_weights(head, adapter.layers[-1])
    rows = min(ffn, 96)
    assert torch.equal(head.block.mlp.gate_proj.weight[:rows], adapter.layers[-1].mlp.gate_proj.weight[:rows])
    assert head.block.mlp.gate_proj.weight[rows:].abs().sum() > 0 or ffn < 96


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "falcon_alibi"])
def test_norms_of_another_kind_are_not_taken(family: str) -> None:
    adapter = tiny_adapter(family)
    head = ExitHead(head_spec(adapter, CandidateSpec(2, "block"), 2))
    taken = copy_block_weights(head, adapter.layers[-1])
    assert not {"attention_norm", "mlp_norm"} & set(taken)


def test_every_kind_of_the_configuration_stands_at_every_checkpoint() -> None:
    config = CalibrationConfig(checkpoints=(2, 5), heads=("identity", "block"), head_ffn=64)
    names = [spec.name for spec in candidates_of(config, 30)]
    assert names == ["2:identity", "2:block:deep:muon:ffn=64", "5:identity", "5:block:deep:muon:ffn=64"]


def test_candidates_read_back_are_the_ones_written(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    specs = [CandidateSpec.parse(text) for text in ("2:block:deep", "1:identity", "3:affine", "2:block:deep:inner=20")]
    written = [make_candidate(adapter, spec, max_distance=3, bottleneck=8, seed=1) for spec in specs]
    save_candidates(tmp_path / "candidates", written)
    read = load_candidates(tmp_path / "candidates")
    for got, expected in zip(read, written, strict=True):
        assert (got.layer, got.kind, got.name, got.head.spec) == (
            expected.layer,
            expected.kind,
            expected.name,
            expected.head.spec,
        )
        for part in ("head", "router"):
            theirs = getattr(expected, part).state_dict()
            ours = getattr(got, part).state_dict()
            assert list(ours) == list(theirs)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_damaged_file_of_candidates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "candidates").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="a file of candidates"):
        load_candidates(tmp_path / "candidates")


@pytest.mark.parametrize(
    ("layer", "num_layers", "taps"), [(2, 30, (10, 20)), (1, 3, (2,)), (12, 30, (20,)), (1, 2, ())]
)
def test_the_default_taps_are_thirds_of_the_depth_after_the_checkpoint(
    layer: int, num_layers: int, taps: tuple[int, ...]
) -> None:
    assert default_taps(layer, num_layers) == taps


@pytest.mark.parametrize("name", ["2:block:deep:taps=2", "2:block:deep:taps=9", "2:block:deep:taps=0+3"])
def test_taps_outside_the_layers_after_the_checkpoint_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="taps"):
        make_candidate(tiny_adapter(), CandidateSpec.parse(name), max_distance=2, bottleneck=4, seed=0)


@pytest.mark.parametrize("taps", [None, (), (3,), (10, 20)])
def test_taps_come_back_from_the_name(taps: tuple[int, ...] | None) -> None:
    spec = CandidateSpec(2, "block", deep=True, taps=taps)
    assert CandidateSpec.parse(spec.name) == spec

"""`TIDE` for users of transformers: ids in, ids out, and the model restored afterwards."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.calibration.tiny_runs import tiny_calibration, write_prompts
from tests.engine.exit_engines import easy_model
from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import random_prompts, tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core import TIDE, TIDEConfig, calibrate
from tide_core.errors import ArtefactError, ConfigError, EngineDeadError, ModelError, RequestError
from tide_core.tide.rows import IdsOnly

SMALL: dict[str, Any] = {"kv_memory_gib": 0.01, "max_rows": 8, "max_batch_tokens": 64, "drafts": 4}
IDS = torch.tensor(random_prompts(3, 7))
PAD = 0


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits") / "artefact"
    return make_artefact(folder, easy_model(), kind="identity", shortlist_size=380)


def fresh(family: str = "llama") -> Any:
    return copy.deepcopy(easy_model() if family == "llama" else tiny_model(family)).eval()


def tide_of(model: Any, artefact: Path | str, config: TIDEConfig | None = None, **settings: Any) -> TIDE:
    return TIDE(model, artefact, config, **{**SMALL, **settings})


def library(model: Any, ids: torch.Tensor, num_new: int = 16, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=num_new, do_sample=False, **options)


def test_output_is_that_of_the_librarys_generate(artefact: Path) -> None:
    model = fresh()
    expected = library(model, IDS)
    with tide_of(model, artefact, tokenizer=tiny_tokenizer()) as tide:
        got = tide.generate(IDS, max_new_tokens=16)
        assert tide.last_stats is not None
        assert tide.last_stats.exit_rate > 0.2
    assert (got.dtype, got.shape) == (torch.int64, (3, 7 + 16))
    assert torch.equal(got, expected)


def test_rows_that_end_early_are_padded_like_the_librarys(artefact: Path) -> None:
    model = fresh()
    model.generation_config.eos_token_id = [int(library(model, IDS)[0, 10]), 1]
    expected = library(model, IDS)
    assert (expected[:, 7:] == PAD).any(), "no row ended early"
    with tide_of(model, artefact) as tide:
        assert torch.equal(tide.generate(IDS, max_new_tokens=16), expected)
        filled = tide.generate(IDS, max_new_tokens=16, pad_token_id=9)
    assert torch.equal(filled, torch.where((expected == PAD) & (torch.arange(23) > 6), 9, expected))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_reach_the_model(artefact: Path, side: str) -> None:
    width, rows = 9, [row.tolist()[:length] for row, length in zip(IDS, (7, 3, 5), strict=True)]
    padded = [[PAD] * (width - len(r)) + r if side == "left" else r + [PAD] * (width - len(r)) for r in rows]
    ones = [[1] * len(row) for row in rows]
    mask = [[0] * (width - len(r)) + r if side == "left" else r + [0] * (width - len(r)) for r in ones]
    with tide_of(fresh(), artefact) as tide:
        got = tide.generate(torch.tensor(padded), torch.tensor(mask), max_new_tokens=8)
        alone = [tide.generate(torch.tensor([row]), max_new_tokens=8)[0, len(row) :] for row in rows]
    assert torch.equal(got[:, :width], torch.tensor(padded))
    assert torch.equal(got[:, width:], torch.stack(alone))


def test_lists_of_ids_are_padded_on_the_left(artefact: Path) -> None:
    rows = [IDS[0].tolist(), IDS[1].tolist()[:4]]
    with tide_of(fresh(), artefact) as tide:
        got = tide.generate(rows, max_new_tokens=5)
        alone = tide.generate(torch.tensor([rows[1]]), max_new_tokens=5)
    assert got[0, :7].tolist() == rows[0]
    assert got[1].tolist() == [PAD] * 3 + alone[0].tolist()


@pytest.mark.parametrize(
    ("ids", "mask", "field"),
    [
        (IDS[0], None, "input_ids"),
        (IDS.float(), None, "input_ids"),
        (IDS[:0], None, "input_ids"),
        (IDS[:, :0], None, "input_ids"),
        (IDS, torch.ones(3, 6), "attention_mask"),
        (IDS, torch.zeros(3, 7), "attention_mask"),
        (IDS, [[1] * 7] * 3, "attention_mask"),
        ([[1, 2]], torch.ones(1, 2), "attention_mask"),
        ([], None, "input_ids"),
        ([1, 2], None, "input_ids"),
        ([[]], None, "input_ids"),
        ("text", None, "input_ids"),
        ([[2, 9999]], None, "prompt"),
        (torch.tensor([[-1]]), None, "prompt"),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_what_is_no_batch_of_ids_is_refused_by_name(artefact: Path, ids: Any, mask: Any, field: str) -> None:
    with tide_of(fresh(), artefact) as tide, pytest.raises(RequestError, match=field):
        tide.generate(ids, mask)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"do_sample": True}, "temperature"),
        ({"max_length": 9}, "max_new_tokens"),
        ({"num_beams": 4}, "one of min_tokens"),
        ({"stop": "cat"}, "tokenizer"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"mode": "bounded", "epsilon": 1.0}, "below 1"),
    ],
    ids=str,
)
def test_options_it_does_not_have_are_refused_with_those_it_has(
    artefact: Path, options: dict[str, Any], hint: str
) -> None:
    with tide_of(fresh(), artefact) as tide, pytest.raises(RequestError, match=hint):
        tide.generate(IDS, **options)


def test_without_a_tokenizer_ids_come_and_go_and_stop_ids_still_end_a_row(artefact: Path) -> None:
    model = fresh()
    whole = library(model, IDS[:1])[0].tolist()
    with tide_of(model, artefact) as tide:
        assert tide.tokenizer is None
        got = tide.generate(IDS[:1], max_new_tokens=16, stop_ids=[whole[12]])[0].tolist()
        with pytest.raises(RequestError, match="no tokenizer"):
            tide.engine.generate("text")
        with pytest.raises(RequestError, match="messages"):
            tide.engine.generate([{"role": "user", "content": "text"}])
    assert got == whole[: whole.index(whole[12], 7) + 1]
    assert IdsOnly().decode([1, 2], skip_special_tokens=True) == ""


def test_stop_strings_work_with_a_tokenizer(artefact: Path) -> None:
    with tide_of(fresh(), artefact, tokenizer=tiny_tokenizer()) as tide:
        whole = tide.generate(IDS[:1], max_new_tokens=16)[0, 7:]
        stop = tiny_tokenizer().decode(whole[4:6])
        cut = tide.generate(IDS[:1], max_new_tokens=16, stop=stop)[0, 7:]
    assert 0 < len(cut) < len(whole)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "falcon_alibi", "deepseek_v2", "mixtral"])
def test_a_closed_tide_gives_the_model_back_as_it_was(tmp_path: Path, family: str) -> None:
    model = fresh(family).train()
    model.model.layers[0].eval() if family == "llama" else None
    kinds = [(type(module), module.training) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        before = copy.deepcopy(model).eval()(IDS).logits
    made = make_artefact(tmp_path / "artefact", model, kind="affine")
    with tide_of(model, made) as tide:
        tide.generate(IDS, max_new_tokens=4)
    assert [(type(module), module.training) for module in model.modules()] == kinds
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model.eval()(IDS).logits, before)


def test_a_model_is_lent_to_one_tide_at_a_time(artefact: Path) -> None:
    model = fresh()
    with tide_of(model, artefact):
        with pytest.raises(ConfigError, match="close that one first"):
            tide_of(model, artefact)
        with pytest.raises(ConfigError, match="close that one first"):
            calibrate(model, tiny_tokenizer())
    tide = tide_of(model, artefact)
    tide.close()
    tide.close()
    with pytest.raises(EngineDeadError):
        tide.generate(IDS)


def test_a_tide_that_cannot_start_gives_the_model_back_too(tmp_path: Path) -> None:
    model = fresh()
    kinds = [type(module) for module in model.modules()]
    other = make_artefact(tmp_path / "artefact", tiny_model("llama"))
    with pytest.raises(ArtefactError, match="weights_sample"):
        tide_of(model, other)
    with pytest.raises(RequestError, match="no artefact"):
        tide_of(model, "none", TIDEConfig(mode="verified"))
    assert [type(module) for module in model.modules()] == kinds
    tide_of(model, "none").close()


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ("object", {}, "loaded by transformers"),
        ("fresh", {"artefact": "auto"}, "auto needs a model name"),
        ("fresh", {"dtype": "float16"}, "has its own"),
        ("fresh", {"quantization": "none"}, "has its own"),
        ("fresh", {"max_row": 3}, "did you mean max_rows"),
        ("fresh", {"config": {"mode": "fast"}}, "a TIDEConfig"),
        ("meta", {}, "memory of one device"),
    ],
    ids=str,
)
def test_what_cannot_be_wrapped_is_refused(artefact: Path, model: str, settings: dict[str, Any], expected: str) -> None:
    made: Any = {"fresh": fresh, "meta": lambda: fresh().to("meta"), "object": object}[model]()
    with pytest.raises((ConfigError, ModelError), match=expected):
        TIDE(made, **{"artefact": artefact, **settings})


def test_the_tokenizer_is_compared_where_there_is_one(artefact: Path) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|start|>")
    with pytest.raises(ArtefactError, match="tokenizer_sha256"):
        tide_of(fresh(), artefact, tokenizer=other)


def test_the_config_sets_the_contract_and_a_call_may_name_another(artefact: Path) -> None:
    model = fresh()
    full = library(model, IDS)
    with tide_of(model, artefact, TIDEConfig(mode="fast", exit_threshold=0.0), audit_share=0.0) as tide:
        tide.generate(IDS, max_new_tokens=16)
        assert tide.last_stats is not None
        assert tide.last_stats.audits["unaudited"] > 0
        assert tide.last_stats.layers_per_token < 3
        assert torch.equal(tide.generate(IDS, max_new_tokens=16, mode="full"), full)
        assert tide.last_stats.exits_per_layer == {}
        assert torch.equal(tide.generate(IDS, max_new_tokens=16, mode="verified"), full)
        assert tide.last_stats.summary()["audits"]["verified"] == 48
        tide.generate(IDS, max_new_tokens=16, threshold=2.0)
        assert tide.last_stats.exit_rate == 0


def test_an_exit_threshold_of_one_means_no_exit(artefact: Path) -> None:
    with tide_of(fresh(), artefact, TIDEConfig(exit_threshold=1.0)) as tide:
        tide.generate(IDS, max_new_tokens=8)
        assert tide.last_stats is not None
        assert (tide.last_stats.exit_rate, tide.last_stats.total_tokens) == (0, 24)


def test_min_layers_behind_every_exit_is_kept_and_said(artefact: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tide"), tide_of(fresh(), artefact, TIDEConfig(min_layers=2)) as tide:
        tide.generate(IDS, max_new_tokens=8)
        assert tide.last_stats is not None
        assert tide.last_stats.exit_rate == 0
    assert "min_layers 2: the exits are after layer 1" in caplog.text


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"router_bottleneck_dim": 64}, "router_bottleneck_dim"),
        ({"exit_strategy": "block"}, "exit_strategy"),
        ({"checkpoint_interval": 2}, "checkpoint_interval"),
    ],
    ids=str,
)
def test_calibration_settings_that_the_artefact_was_not_made_with_are_refused(
    artefact: Path, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        tide_of(fresh(), artefact, TIDEConfig(**values))
    tide_of(
        fresh(), artefact, TIDEConfig(router_bottleneck_dim=16, exit_strategy="identity", checkpoint_interval=1)
    ).close()


def test_rows_of_one_prompt_draw_differently_and_a_seed_draws_them_again(artefact: Path) -> None:
    same = IDS[:1].expand(3, -1)
    with tide_of(fresh(), artefact) as tide:
        first = tide.generate(same, max_new_tokens=12, temperature=1.0, seed=3)
        assert torch.equal(tide.generate(same, max_new_tokens=12, temperature=1.0, seed=3), first)
        assert torch.equal(tide.generate(same[:1], max_new_tokens=12, temperature=1.0, seed=4), first[1:2, :19])
    assert len({tuple(row) for row in first.tolist()}) == 3


def test_stats_are_those_of_the_last_call(artefact: Path) -> None:
    with tide_of(fresh(), artefact) as tide:
        assert tide.last_stats is None
        for num_rows in (3, 1):
            tide.generate(IDS[:num_rows], max_new_tokens=8, ignore_eos=True)
            stats = tide.last_stats
            assert stats is not None
            assert stats.total_tokens == stats.summary()["total_tokens"] == 8 * num_rows
            assert sum(stats.exits_per_layer.values()) + stats.remaining_tokens == 8 * num_rows
            assert stats.accepted <= stats.drafts
            assert "Layer 1:" in str(stats)


def test_a_name_brings_its_own_model_and_tokenizer(tmp_path: Path, artefact: Path) -> None:
    model = fresh()
    model.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    expected = library(model, IDS)
    with TIDE(str(tmp_path / "tiny"), artefact, device="cpu", **SMALL) as tide:
        assert tide.tokenizer.decode(IDS[0]) == tiny_tokenizer().decode(IDS[0])
        assert torch.equal(tide.generate(IDS, max_new_tokens=16), expected)


@pytest.mark.parametrize("training", [False, True])
def test_calibrate_times_its_exits_on_a_loaded_model_and_gives_it_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    model = fresh().train(training)
    expected, classes = library(model, IDS), [type(module) for module in model.modules()]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    small = tiny_calibration(data=str(write_prompts(tmp_path)), measure_batches=(1,)).to_mapping()

    path = calibrate(model, tiny_tokenizer(), tmp_path / "exits", quiet=True, **small)

    assert "measured here: x" in (path / "report.md").read_text()
    assert model.training == training
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(library(model, IDS), expected)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_calibrate_writes_what_tide_takes(tmp_path: Path) -> None:
    model = fresh().train()
    small = tiny_calibration(data=str(write_prompts(tmp_path))).to_mapping()
    for name in ("num_samples", "router_bottleneck", "heads", "checkpoints", "data"):
        del small[name]
    config = TIDEConfig(
        calibration_samples=10,
        router_bottleneck_dim=8,
        exit_strategy="affine",
        checkpoint_interval=2,
        calibration_dataset=str(tmp_path / "prompts.jsonl"),
    )
    path = calibrate(model, tiny_tokenizer(), tmp_path / "exits", config, quiet=True, **small)
    assert path == tmp_path / "exits"
    assert model.training
    expected = library(copy.deepcopy(model).eval(), IDS)
    with tide_of(model, path, config, tokenizer=tiny_tokenizer(), drafts=2) as tide:
        assert torch.equal(tide.generate(IDS, max_new_tokens=16), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tokenizer": None}, "the tokenizer of the loaded LlamaForCausalLM"),
        ({"num_sample": 3}, "did you mean num_samples"),
        ({"config": TIDEConfig(calibration_samples=5), "num_samples": 5}, "either this or its setting"),
        ({"config": TIDEConfig(checkpoint_interval=4)}, "below the model's 4 layers"),
        ({"dtype": "float16"}, "has its own"),
        ({"quantization": "fp8"}, "has its own"),
        ({"model": "demo"}, "none with a model name"),
        ({"model": 3}, "loaded by transformers"),
    ],
    ids=str,
)
def test_calibrate_refuses_what_it_cannot_do_before_any_work(
    tmp_path: Path, arguments: dict[str, Any], expected: str
) -> None:
    given = {"model": fresh(), "tokenizer": tiny_tokenizer(), "save_path": tmp_path / "exits", **arguments}
    with pytest.raises(ConfigError, match=expected):
        calibrate(**given)
    assert list(tmp_path.iterdir()) == []


def test_settings_are_imported_without_torch() -> None:
    code = "import sys, tide_core; tide_core.TIDEConfig(); tide_core.ExitStats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

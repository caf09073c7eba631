"""Models whose matrices stay as a GGUF file has them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.models.gguf_factory import HEAD_DIM, HIDDEN, TinyGGUF, make_family_gguf, make_gguf
from tests.models.test_gguf_architectures import GEMMA, ROPE, gemma
from tide_core.cli.runs import open_engine
from tide_core.config import EngineConfig
from tide_core.engine.engine import Engine
from tide_core.errors import ModelError
from tide_core.kernels import select, select_kernels
from tide_core.models.gguf.file import GGUFFile
from tide_core.models.identity import identify
from tide_core.models.kernel_modules import use_kernels
from tide_core.models.loader import fingerprint, load_model, load_tokenizer
from tide_core.models.quantised import QuantisedEmbedding, QuantisedLinear
from tide_core.models.resolver import resolve, resolve_configuration
from tide_core.request import SamplingParams

pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
MOST_OFF = 0.15
"""Of the spread of logits: what activations in 8 bits cost in two layers of large random weights. A wrong order of rows
costs all of it."""


def load(tiny: TinyGGUF, cache: Path) -> Any:
    return load_model(resolve(str(tiny.path), cache_dir=cache, quantised=True), dtype="float32", device="cpu")


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize(
    ("architecture", "metadata", "config"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"tie_word_embeddings": False}),
        ("qwen2", {}, {"rope_parameters": ROPE}),
        ("qwen3", {}, {"rope_parameters": ROPE, "head_dim": HEAD_DIM, "tie_word_embeddings": True}),
        ("gemma3", {**GEMMA, "attention.sliding_window_pattern": 2}, gemma()),
        ("phi3", {}, {"rope_parameters": ROPE}),
    ],
)
def test_a_model_gives_nearly_the_logits_of_the_same_weights_widened(
    architecture: str, metadata: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    if architecture == "llama":
        tiny = make_gguf(path, kind=Q4_1, metadata=metadata, **config)
    else:
        tiny = make_family_gguf(path, architecture, kind=Q4_1, metadata=metadata, **config)
    model = load(tiny, tmp_path / "cache")
    kinds = {type(module) for module in model.modules()}
    assert {QuantisedLinear, QuantisedEmbedding} <= kinds
    assert not kinds & {torch.nn.Linear, torch.nn.Embedding}
    ids = torch.randint(3, 200, (1, 48))
    expected = logits_of(tiny.model, ids)
    plain = logits_of(model, ids)
    assert (plain - expected).std() < MOST_OFF * expected.std()
    use_kernels(model, select_kernels("native", torch.device("cpu")))
    torch.testing.assert_close(logits_of(model, ids), plain, atol=2e-2 * float(expected.std()), rtol=0)


def test_a_matrix_of_another_format_is_widened(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((HIDDEN, 96)).astype(np.float16)
    tiny = make_gguf(tmp_path / "tiny.gguf", kind=Q8_0, tensors={"blk.0.ffn_down.weight": values})
    model = load(tiny, tmp_path / "cache")
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, torch.from_numpy(values.astype(np.float32)))
    assert isinstance(model.model.layers[1].mlp.down_proj, QuantisedLinear)


def test_the_cache_holds_no_weights_and_both_forms_lie_beside_each_other(tmp_path: Path) -> None:
    tiny, cache = make_gguf(tmp_path / "tiny.gguf", kind=Q4_1), tmp_path / "cache"
    quantised, widened = (resolve(str(tiny.path), cache_dir=cache, quantised=kept) for kept in (True, False))
    assert not (quantised.path / "model.safetensors").exists()
    assert (widened.path / "model.safetensors").exists()
    assert resolve(str(tiny.path), cache_dir=cache, quantised=True) == quantised
    assert fingerprint(quantised) != fingerprint(widened)


def test_an_artefact_of_the_widened_weights_fits_for_they_are_the_same_numbers(tmp_path: Path) -> None:
    tiny, cache = make_gguf(tmp_path / "tiny.gguf", kind=Q4_1), tmp_path / "cache"
    found = []
    for kept in (True, False):
        resolved = resolve(str(tiny.path), cache_dir=cache, quantised=kept)
        found.append(identify(load_model(resolved, dtype="float32", device="cpu"), load_tokenizer(resolved), resolved))
    quantised, widened = found
    assert quantised.weights_sample == widened.weights_sample
    assert quantised.weights_sha256 is None
    assert (quantised.config_sha256, quantised.tokenizer_sha256) == (widened.config_sha256, widened.tokenizer_sha256)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path, value: float) -> None:
    path = tmp_path / "tiny.gguf"
    tiny = make_gguf(path, kind=Q8_0)
    raw = bytearray(path.read_bytes())
    at = GGUFFile.open(path).tensors["blk.0.ffn_down.weight"].offset
    raw[at : at + 2] = np.array([value], "<f2").tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"blk.0.ffn_down.weight: got .*NaN or infinity.*finite weights"):
        load(tiny, tmp_path / "cache")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "bfloat16"}, "states in float32, not in bfloat16"),
        ({"dtype": "float16"}, "states in float32, not in float16"),
        ({"kernels": "reference"}, "kernels are reference, as configured"),
        ({}, "the native module cannot be imported"),
    ],
    ids=str,
)
def test_where_no_kernel_reads_them_auto_widens_the_weights_and_says_why_in_one_line(
    settings: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    if not settings:
        monkeypatch.setattr(select, "_import_error", lambda module="": "it is not built")
    tiny = make_gguf(tmp_path / "tiny.gguf", kind=Q4_1)
    with caplog.at_level(logging.INFO, "tide"), Engine(str(tiny.path), device="cpu", **settings) as engine:
        assert not any(isinstance(module, QuantisedLinear) for module in model_of(engine).modules())
        [answer] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.tokens) == 4
    [line] = [record.message for record in caplog.records if "weights are widened" in record.message]
    assert line.startswith("tiny: ")
    assert reason in line


def test_with_no_settings_an_engine_on_a_cpu_keeps_the_matrices_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    tiny = make_gguf(tmp_path / "tiny.gguf", kind=Q4_1)
    with caplog.at_level(logging.INFO, "tide"), Engine(str(tiny.path), device="cpu") as engine:
        assert any(isinstance(module, QuantisedLinear) for module in model_of(engine).modules())
    assert "widened" not in caplog.text


@pytest.mark.parametrize(("dtype", "stay"), [("auto", True), ("float32", True), ("bfloat16", False)])
def test_a_command_which_looks_for_the_file_before_torch_is_there_ends_with_the_same_form(
    dtype: str, stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    tiny = make_gguf(tmp_path / "tiny.gguf", kind=Q4_1)
    for in_cache in (False, True):
        if in_cache:  # then what it finds first is used, if that is the right form
            assert all(resolve(str(tiny.path), quantised=kept) for kept in (True, False))
        with open_engine(EngineConfig(model=str(tiny.path), dtype=dtype)) as engine:
            assert any(isinstance(module, QuantisedLinear) for module in model_of(engine).modules()) == stay


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.F32], ids=lambda kind: kind.name)
def test_a_file_without_matrices_for_the_kernels_is_widened_as_ever(
    kind: GGMLQuantizationType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, cache = make_gguf(tmp_path / "tiny.gguf", kind=kind), tmp_path / "cache"
    with caplog.at_level(logging.INFO, "tide"):
        for attempt in range(2):
            found = resolve(str(tiny.path), cache_dir=cache, quantised=True)
            assert found == resolve(str(tiny.path), cache_dir=cache)
            assert found.gguf is None
            lines = [record.message for record in caplog.records if "weights are widened" in record.message]
            assert len(lines) == attempt + 1
    assert "none of its matrices is in a format that the native kernels read" in lines[0]
    assert resolve_configuration(str(tiny.path), cache_dir=cache) is not None


def model_of(engine: Engine) -> Any:
    return engine._parts.runner.adapter.model


@pytest.mark.demo
def test_verified_gives_the_tokens_of_full_with_the_demo_as_it_is_in_its_file() -> None:
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    with Engine("demo", quantization="auto", device="cpu", drafts=3, max_model_len=256) as engine:
        answers = {
            mode: engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, mode=mode))
            for mode in ("full", "verified")
        }
    assert "Paris" in answers["full"][0].text
    tokens = {
        mode: [[token.token_id for token in each.tokens] for each in of_mode] for mode, of_mode in answers.items()
    }
    assert tokens["verified"] == tokens["full"]
    assert any(token.exit_layer < 30 for each in answers["verified"] for token in each.tokens)

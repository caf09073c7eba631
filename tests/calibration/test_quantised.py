"""Calibration of a model whose matrices stay as a GGUF file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.calibration.tiny_runs import contents, tiny_calibration, write_prompts
from tests.models.gguf_factory import make_gguf
from tide_core.calibration.named_model import Loaded, calibrate_model, load
from tide_core.errors import ArtefactError
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.kernels.panels import Panels
from tide_core.models.quantised import QuantisedLinear

pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    return make(tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)


def make(path: Path, kind: GGMLQuantizationType) -> Path:
    return make_gguf(path, kind=kind, metadata={"llama.block_count": 4}, num_hidden_layers=4).path


def run(file: Path, folder: Path, **options: Any) -> Path:
    """Calibrate it by name into `folder`; with exits of mode fast, whose training goes through the model's layers."""
    folder.mkdir()
    few = {"fast_layers": (2, 3), "fast_rank": 8, "fast_hidden": 32, "fast_epsilons": ()}
    config = tiny_calibration(data=str(write_prompts(folder)), shortlist_size=32, **few)
    calibrate_model(str(file), config, publish_to=folder / "artefact", device="cpu", **options)
    return folder / "artefact"


def quantised_linears(loaded: Loaded) -> list[str]:
    return [name for name, module in loaded.model.named_modules() if isinstance(module, QuantisedLinear)]


def test_by_default_exits_are_trained_on_the_matrices_of_the_file_with_the_same_bytes_each_time(
    file: Path, tmp_path: Path
) -> None:
    assert quantised_linears(load(str(file), device="cpu"))
    first, again, widened = (
        run(file, tmp_path / name, **options)
        for name, options in (("first", {}), ("again", {}), ("widened", {"quantization": "none"}))
    )
    assert contents(first) == contents(again)
    assert load_artefact(first, None).fast is not None
    assert contents(first)["heads.safetensors"] != contents(widened)["heads.safetensors"]


def test_the_artefact_of_one_form_loads_for_the_other_and_not_for_another_model(file: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.gguf", GGMLQuantizationType.Q8_0)
    for form in ("auto", "none"):
        artefact = run(file, tmp_path / form, quantization=form)
        for used in ("auto", "none"):
            load_artefact(artefact, load(str(file), device="cpu", quantization=used).identity)
            with pytest.raises(ArtefactError, match=r"weights_sha256|weights_sample"):
                load_artefact(artefact, load(str(other), device="cpu", quantization=used).identity)


def test_gradients_pass_a_matrix_in_blocks_as_they_pass_the_numbers_it_stands_for(file: Path) -> None:
    model = load(str(file), device="cpu").model
    linear = model.model.layers[0].mlp.down_proj
    panels: Panels = linear.panels
    states = torch.randn(3, panels.in_features, requires_grad=True)
    ahead = torch.randn(3, panels.out_features)
    (linear(states) * ahead).sum().backward()
    torch.testing.assert_close(states.grad, ahead @ panels.whole())

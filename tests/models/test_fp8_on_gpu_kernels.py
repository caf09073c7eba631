"""Layers with FP8 weights on CUDA kernels, for which plain ops stand in on the CPU: what each kernel is handed."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import random_prompts
from tests.kernels.twin import twin_kernels
from tests.models.fp8_factory import make_fp8
from tide_core.engine import assemble
from tide_core.engine.engine import Engine
from tide_core.kernels import CudaKernels
from tide_core.kernels.fp8 import Fp8Weight
from tide_core.models.adapter import ModelAdapter
from tide_core.models.fused_layers import FusedLayer, fuse_layers
from tide_core.models.kernel_modules import use_kernels
from tide_core.models.loader import load_model
from tide_core.models.quantised import Fp8Linear
from tide_core.models.resolver import resolve
from tide_core.request import SamplingParams


class Kernels:
    """The twin, which multiplies with the matrix that it is handed in 8 bits, and remembers its shape."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: list[Fp8Weight] = []
        self.refused: torch.Tensor | None = None
        self.seen: set[tuple[int, ...]] = set()
        module = types.ModuleType("tide_core.kernels.cuda.fp8")
        module.packed = self._packed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def _packed(self, weight: Fp8Weight) -> Fp8Weight:
        if weight.values is self.refused:
            raise ValueError("refused")
        self.packed.append(weight)
        return dataclasses.replace(weight)

    def cuda(self) -> CudaKernels:
        twin = twin_kernels()

        def numbers(weight: Any, dtype: torch.dtype) -> torch.Tensor:
            if not isinstance(weight, Fp8Weight):
                found: torch.Tensor = weight
                return found
            self.seen.add(tuple(weight.shape))
            return weight.dequantised(dtype)

        def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
            return twin.linear(x, numbers(weight, x.dtype), bias)

        def fused(x: torch.Tensor, weight: Any, *rest: Any, **more: Any) -> torch.Tensor:
            return twin.fused_linear(x, numbers(weight, x.dtype), *rest, **more)

        return dataclasses.replace(twin, linear=linear, fused_linear=fused)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def load(path: Path, quantization: str = "fp8") -> Any:
    return load_model(resolve(str(path)), dtype="float32", device="cpu", quantization=quantization)


USUAL = ("lm_head", "embed_tokens", "norm", ".bias")


@pytest.mark.parametrize(
    ("form", "settings", "fused"),
    [
        ("fp8 block", {}, 3),
        ("fp8 tensor", {}, 3),
        ("compressed channel", {"attention_bias": True}, 3),
        ("fp8 block", {"plain": (*USUAL, "down_proj")}, 3),
        ("fp8 block", {"plain": (*USUAL, "1.self_attn.q_proj")}, 2),
        ("fp8 block", {"intermediate_size": 320}, 0),  # the last block of the gate is cut
        ("compressed channel", {"intermediate_size": 320}, 3),
    ],
)
def test_layers_are_fused_where_their_matrices_can_be_joined(
    form: str, settings: dict[str, Any], fused: int, tmp_path: Path, kernels: Kernels
) -> None:
    tiny = make_fp8(tmp_path, form, **settings)
    model = load(tmp_path)
    use_kernels(model, kernels.cuda())
    count = sum(isinstance(module, Fp8Linear) for module in model.modules())
    assert len(kernels.packed) == count
    adapter = ModelAdapter(model)
    assert fuse_layers(adapter.layers, kernels.cuda()) == fused
    first: Any = adapter.layers[0]
    if fused:
        shared = first.self_attn.q_proj.fp8.values.untyped_storage().data_ptr()
        assert first._qkv.values.untyped_storage().data_ptr() == shared, "linears are views of what is joined"
        assert first.self_attn.v_proj.fp8.values.untyped_storage().data_ptr() == shared
        before = first._qkv.values.data_ptr()
        assert fuse_layers(adapter.layers, kernels.cuda()) == fused
        assert first._qkv.values.data_ptr() == before, "graphs may have been captured with it"
    assert isinstance(first, FusedLayer) == bool(fused)
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            assert torch.equal(module.fp8.dequantised(torch.float32), tiny.model.get_submodule(name).weight)


def test_a_matrix_that_no_kernel_reads_stays_with_its_layer_in_plain_torch(
    tmp_path: Path, kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make_fp8(tmp_path)
    model = load(tmp_path)
    kernels.refused = model.model.layers[1].mlp.down_proj.fp8.values
    use_kernels(model, kernels.cuda())
    assert "model.layers.1.mlp.down_proj runs in plain Torch: refused" in caplog.text
    assert fuse_layers(ModelAdapter(model, paged=False).layers, kernels.cuda()) == 2
    x = torch.randn(3, 384)
    expected = tiny.model.model.layers[1].mlp.down_proj(x)
    assert torch.equal(model.model.layers[1].mlp.down_proj(x), expected)


@pytest.mark.parametrize("form", ["fp8 block", "compressed channel"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_mode_gives_the_tokens_of_the_widened_weights(
    family: str, form: str, tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: kernels.cuda())
    tiny = make_fp8(tmp_path / "model", form, family)
    artefact = make_artefact(tmp_path / "artefact", tiny.model, kind="identity", shortlist_size=380)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory_gib": 0.01, "drafts": 3}
    settings.update(model=str(tmp_path / "model"), artefact=str(artefact))
    answers: dict[tuple[str, str], Any] = {}
    for quantization in ("none", "fp8"):
        with Engine(quantization=quantization, **settings) as engine:
            for mode in ("full", "verified", "fast"):
                threshold = 0.5 if mode == "fast" else None
                params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, mode=mode, threshold=threshold)
                found = engine.generate(random_prompts(3, 6), params)
                answers[quantization, mode] = [[token.token_id for token in each.tokens] for each in found]
                if mode == "fast":
                    assert any(token.exit_layer < 3 for each in found for token in each.tokens)
    assert answers["fp8", "verified"] == answers["fp8", "full"]
    for mode in ("full", "verified", "fast"):
        assert answers["fp8", mode] == answers["none", mode]
    keys_and_values = 2 * 2 * 64, 192
    assert {(256 + keys_and_values[0], 192), (2 * 384, 192), (192, 256), (192, 384), keys_and_values} <= kernels.seen

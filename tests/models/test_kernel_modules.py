"""Which modules of the library run on kernels, and that the library itself stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama import modeling_llama

from tests.factories import make_parts, random_prompts
from tests.forward import Forward, library_logits
from tests.tiny_models import tiny_model
from tide_core.kernels import select_kernels
from tide_core.models.adapter import ModelAdapter
from tide_core.models.kernel_modules import use_kernels

pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")


def test_every_linear_norm_mlp_and_attention_of_a_llama_runs_on_kernels() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layers = 4
    assert use_kernels(model, select_kernels("native", "cpu")) == layers * (7 + 2 + 1 + 1) + 2


def test_the_reference_kernels_change_no_module() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = [type(module) for module in model.modules()]
    assert use_kernels(model, select_kernels("reference", "cpu")) == 0
    assert [type(module) for module in model.modules()] == before


def test_norms_and_gates_of_other_arithmetic_stay_the_librarys() -> None:
    model = make_parts("gemma2").runner.adapter.model
    kinds = {type(module).__name__ for module in model.modules()}
    assert {"Gemma2RMSNorm", "Gemma2MLP"} <= kinds


def test_norms_that_round_otherwise_than_llamas_stay_the_librarys_in_half_precision() -> None:
    for family in ("olmo2", "gpt_oss"):
        norms = [ModelAdapter(copy.deepcopy(tiny_model(family)).to(kind)) for kind in (torch.float32, torch.bfloat16)]
        assert [adapter.plain_norm is not None for adapter in norms] == [True, False]
    for family in ("llama", "granite", "smollm3", "glm4", "qwen3_moe"):
        adapter = ModelAdapter(copy.deepcopy(tiny_model(family)).to(torch.bfloat16))
        assert adapter.plain_norm is not None


@pytest.mark.parametrize("family", ["olmo2", "granite", "cohere2", "glm4"])
def test_a_bfloat16_model_is_near_the_librarys(family: str) -> None:
    """OLMo 2 turns in float32, which the kernel does not; Cohere 2 and GLM-4 turn neighbours."""
    [row] = random_prompts(1, 21, seed=3)
    [got] = Forward(family, dtype="bfloat16", kernels="native")([row], 5)
    assert (got - library_logits(family, row, dtype="bfloat16")).abs().max() <= 0.1


def test_the_library_itself_is_not_touched() -> None:
    rotary, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    make_parts("llama")
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert modeling_llama.LlamaAttention.forward is forward
    model = tiny_model("llama")
    assert type(model.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    assert torch.isfinite(model(torch.tensor([[2, 3]])).logits).all()

"""A widened model computes the function of the small one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.production import widen as widen_module
from benchmarks.production.widen import wide_config, widen, write_copies
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.config import EngineConfig
from tide_core.engine.assemble import assemble_loaded
from tide_core.engine.engine import Engine
from tide_core.errors import ConfigError, ModelError
from tide_core.request import SamplingParams

TOLERANCE = 2e-5
"""Of the largest logit, in float32: only the order of sums differs."""
IDS = torch.tensor([[3, 141, 59, 265, 35, 89, 79, 323, 84, 62, 6, 43], [1, 380, 2, 7, 7, 7, 90, 91, 92, 200, 201, 9]])


def wide_of(small: Any, factor: int, dtype: torch.dtype = torch.float32) -> Any:
    return widen(small, factor, device="cpu", dtype=dtype)


@torch.no_grad()
def distance(small: Any, wide: Any) -> float:
    """Largest difference of logits over the largest logit."""
    expected, found = small(IDS).logits, wide(IDS).logits
    assert expected.shape == found.shape
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "deepseek_r1_distill_llama", "qwen2", "qwen3", "mistral"])
def test_a_wide_model_gives_the_logits_of_the_small_one(family: str, factor: int) -> None:
    small = tiny_model(family)
    wide = wide_of(small, factor)
    assert distance(small, wide) < TOLERANCE
    assert wide.config.hidden_size == factor * small.config.hidden_size
    assert not wide.training
    assert not any(weight.requires_grad for weight in wide.parameters())


def test_every_weight_matters_to_the_comparison() -> None:
    """One that is not widened as it must be is noticed."""
    small = tiny_model("llama_tied")
    wide = wide_of(small, 2)
    for name, weight in wide.named_parameters():
        if "layers." in name and "layers.1." not in name:  # all layers are alike
            continue
        kept = weight.clone()
        with torch.no_grad():
            weight[: len(weight) // 2] *= 1.5
        assert distance(small, wide) > 10 * TOLERANCE, name
        with torch.no_grad():
            weight.copy_(kept)


def test_a_layer_has_the_square_of_the_factor_as_many_weights() -> None:
    small, wide = tiny_model("llama"), wide_of(tiny_model("llama"), 4)
    matrices = [sum(w.numel() for w in m.model.layers[0].parameters() if w.dim() == 2) for m in (small, wide)]
    assert matrices[1] == 16 * matrices[0]
    layers = wide.model.layers[0].self_attn
    assert layers.q_proj.weight.shape[0] // layers.head_dim == 4 * small.config.num_attention_heads


def test_the_lm_head_has_its_own_weights_even_if_the_small_one_shares_them() -> None:
    small = tiny_model("llama_tied")
    assert small.lm_head.weight is small.model.embed_tokens.weight
    wide = wide_of(small, 2)
    assert wide.lm_head.weight.data_ptr() != wide.model.embed_tokens.weight.data_ptr()
    assert torch.equal(2 * wide.lm_head.weight, wide.model.embed_tokens.weight)


def test_the_small_model_and_its_settings_stay_as_they_are() -> None:
    small = copy.deepcopy(tiny_model("llama_tied"))
    weights, config = {name: w.clone() for name, w in small.named_parameters()}, small.config.to_dict()
    wide = wide_of(small, 2)
    assert small.config.to_dict() == config
    assert all(torch.equal(weights[name], w) for name, w in small.named_parameters())
    assert wide.generation_config is not small.generation_config
    assert wide.generation_config.eos_token_id == small.generation_config.eos_token_id


def test_a_power_of_two_rounds_each_weight_as_the_small_model_does() -> None:
    small = tiny_model("llama")
    wide = wide_of(small, 4, torch.bfloat16)
    source = small.model.layers[0].mlp.down_proj.weight.bfloat16()
    block = wide.model.layers[0].mlp.down_proj.weight[: source.shape[0], -source.shape[1] :]
    assert torch.equal(4 * block, source)


def test_the_engine_writes_the_same_tokens_with_both() -> None:
    config = EngineConfig(device="cpu", kv_memory_gib=0.05, max_rows=4, max_batch_tokens=64, artefact="none")
    answers = []
    for model in (copy.deepcopy(tiny_model("llama")), wide_of(tiny_model("llama"), 2)):
        parts = assemble_loaded(config, model, tiny_tokenizer(), name="m", identity=f"width {model.config.hidden_size}")
        with Engine.from_parts(parts) as engine:
            found = engine.generate(IDS.tolist(), SamplingParams(max_tokens=24))
        answers.append([[token.token_id for token in answer.tokens] for answer in found])
    assert answers[0] == answers[1]


def test_copies_are_written_along_the_dimensions_that_grew() -> None:
    target = torch.zeros(4, 3)
    write_copies(target, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert target.tolist() == [[1, 2, 3], [4, 5, 6]] * 2


def test_sizes_of_the_demo_model_eight_times_as_wide_are_those_of_a_production_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    demo = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        wide = LlamaForCausalLM(wide_config(demo, 8))
    assert sum(weight.numel() for weight in wide.parameters()) / 1e9 == pytest.approx(7.25, abs=0.005)
    assert wide.model.layers[0].self_attn.head_dim == 64


def test_other_architectures_and_factors_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        wide_of(tiny_model("gpt2"), 2)
    for factor in (0, widen_module.MAX_FACTOR + 1):
        with pytest.raises(ConfigError, match="factor"):
            wide_of(tiny_model("llama"), factor)

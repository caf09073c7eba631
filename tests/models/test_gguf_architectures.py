"""GGUF files of architectures other than llama: the logits of the same weights in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.gguf_factory import HEAD_DIM, HIDDEN, TinyGGUF, make_family_gguf
from tide_core.errors import ModelError
from tide_core.models.gguf.convert import convert

ROPE = {"rope_theta": 5000.0, "rope_type": "default"}
YARN = {"rope_theta": 5000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
WIDE_HEADS = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
GEMMA = {"attention.sliding_window": 8, "rope.freq_base": 20000.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LONG, SHORT = np.linspace(1.5, 4.0, HEAD_DIM // 2), np.linspace(1.0, 1.2, HEAD_DIM // 2)
FACTORS = {"rope_factors_long.weight": LONG.astype(np.float32), "rope_factors_short.weight": SHORT.astype(np.float32)}


def gemma(**config: Any) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    plain = {"rope_parameters": GEMMA_ROPE, "sliding_window": 8, "layer_types": kinds, "head_dim": HEAD_DIM}
    return {**plain, "query_pre_attn_scalar": HEAD_DIM, "eos_token_id": 2, **config}


def refused(tiny: TinyGGUF, tmp_path: Path) -> ModelError:
    (tmp_path / "refused").mkdir()
    with pytest.raises(ModelError) as caught:
        convert(tiny.path, tmp_path / "refused")
    assert not list((tmp_path / "refused").iterdir())
    return caught.value


@pytest.mark.parametrize(
    ("architecture", "metadata", "config"),
    [
        ("qwen2", {}, {"rope_parameters": ROPE}),
        ("qwen2", {}, {"rope_parameters": ROPE, "tie_word_embeddings": True}),
        ("qwen2", YARN_KEYS, {"rope_parameters": YARN}),
        ("qwen3", {}, {"rope_parameters": ROPE, "head_dim": HEAD_DIM}),
        ("qwen3", WIDE_HEADS, {"rope_parameters": ROPE, "head_dim": 32, "tie_word_embeddings": True}),
        ("gemma3", {**GEMMA, "attention.sliding_window_pattern": 2}, gemma()),
        ("gemma3", {**GEMMA, "attention.sliding_window_pattern": [True, False]}, gemma()),
        ("gemma3", GEMMA, gemma(layer_types=["sliding_attention"] * 2)),
        ("phi3", {}, {"rope_parameters": ROPE}),
        ("phi3", {"attention.sliding_window": 6}, {"rope_parameters": ROPE, "sliding_window": 6}),
        ("phi3", {"rope.dimension_count": 8}, {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    ],
)
def test_a_converted_model_gives_the_logits_of_the_same_weights_in_transformers(
    architecture: str, metadata: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    tiny = make_family_gguf(tmp_path / "tiny.gguf", architecture, metadata=metadata, **config)
    assert_same_logits(tiny, tmp_path)


def test_factors_for_long_and_short_contexts_of_phi3_are_kept(tmp_path: Path) -> None:
    rope = {**ROPE, "rope_type": "longrope", "long_factor": LONG.tolist(), "short_factor": SHORT.tolist()}
    config = {"rope_parameters": {**rope, "original_max_position_embeddings": 32}}
    metadata = {"rope.scaling.original_context_length": 32}
    tiny = make_family_gguf(
        tmp_path / "tiny.gguf",
        "phi3",
        metadata=metadata,
        tensors=FACTORS,
        original_max_position_embeddings=32,
        **config,
    )
    assert_same_logits(tiny, tmp_path)


def assert_same_logits(tiny: TinyGGUF, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(tiny.path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    assert type(model) is type(tiny.model)
    ids = torch.arange(3, 83).reshape(2, 40)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, tiny.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_largest_gemma_scales_attention_by_width_over_heads(tmp_path: Path) -> None:
    tiny = make_family_gguf(
        tmp_path / "tiny.gguf",
        "gemma3",
        metadata={**GEMMA, "block_count": 62, "attention.head_count": 2, "attention.key_length": HEAD_DIM},
        **gemma(num_hidden_layers=62, num_attention_heads=2, layer_types=None, query_pre_attn_scalar=HIDDEN // 2),
    )
    (tmp_path / "converted").mkdir()
    convert(tiny.path, tmp_path / "converted")
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == HIDDEN // 2
    assert [number for number, kind in enumerate(config["layer_types"], 1) if kind == "full_attention"] == [
        *range(6, 62, 6)
    ]


@pytest.mark.parametrize(
    ("architecture", "metadata", "named"),
    [
        ("qwen2", WIDE_HEADS, "key_length"),
        ("qwen2", {"expert_count": 8}, "expert_count"),
        ("qwen2", {"attention.sliding_window": 64}, "sliding_window"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ("gemma3", {"attention.sliding_window": 8, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {}, "sliding_window"),
        ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "rope"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_by_name(
    architecture: str, metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny = make_family_gguf(tmp_path / "tiny.gguf", architecture, metadata=metadata)
    assert named in refused(tiny, tmp_path).field


def test_an_attention_factor_of_another_rule_is_refused(tmp_path: Path) -> None:
    metadata = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 3.0}
    tiny = make_family_gguf(tmp_path / "tiny.gguf", "phi3", metadata=metadata, tensors=FACTORS)
    assert "attn_factor" in refused(tiny, tmp_path).field


def test_a_matrix_that_is_not_fused_is_refused_where_it_should_be(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": np.ones((HIDDEN, HIDDEN), dtype=np.float32)}
    tiny = make_family_gguf(tmp_path / "tiny.gguf", "phi3", tensors=tensors)
    assert "attn_q" in refused(tiny, tmp_path).field

"""Experts on a CPU: a token's logits are bitwise the same alone and in any batch, and the library stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.factories import make_parts, random_prompts
from tests.forward import Forward
from tests.kernels.twin import twin_kernels
from tests.tiny_models import FAMILIES, tiny_model
from tide_core.execution.graphs.base import unsupported_reason
from tide_core.models.adapter import ModelAdapter
from tide_core.models.experts import use_kernels_for_experts

ROUTED = ("mixtral", "qwen3_moe", "granite_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granite_moe", "gpt_oss"])
def test_logits_are_bitwise_the_same_alone_and_in_a_batch(family: str, chunk: int) -> None:
    pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
    rows = [random_prompts(1, length, seed=length)[0] for length in (9, 1, 13, 5)]
    forward = Forward(family, kernels="native")
    for row, among_others in zip(rows, forward(rows, chunk), strict=True):
        [alone] = forward([row], chunk)
        assert torch.equal(alone, among_others)


def test_families_with_experts_are_known_and_run_without_graphs() -> None:
    found = {family for family in FAMILIES if ModelAdapter(tiny_model(family), paged=False).has_experts}
    assert found == set(ROUTED)
    for family, reason in (
        ("qwen3_moe", "experts are chosen on the host"),
        ("gpt_oss", "no kernel has attention sinks"),
    ):
        runner = make_parts(family).runner
        assert unsupported_reason(runner.adapter, runner.cache, twin_kernels()) == reason


def test_transposed_experts_keep_their_values_and_the_library_its_code() -> None:
    model: Any = copy.deepcopy(tiny_model("gpt_oss"))
    forwards = modeling_gpt_oss.GptOssExperts.forward, modeling_gpt_oss.GptOssTopKRouter.forward
    assert use_kernels_for_experts(model, twin_kernels()) == 4 * 2
    assert (modeling_gpt_oss.GptOssExperts.forward, modeling_gpt_oss.GptOssTopKRouter.forward) == forwards
    for (name, weight), expected in zip(model.named_parameters(), tiny_model("gpt_oss").parameters(), strict=True):
        assert torch.equal(weight, expected), name
    assert all(layer.mlp.experts.down_proj[0].T.is_contiguous() for layer in model.model.layers)

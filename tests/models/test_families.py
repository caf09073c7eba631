"""For every family: the engine at full depth equals the library's forward, however the work is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

from tests.factories import make_engine, random_prompts
from tests.forward import Forward, library_logits
from tests.tiny_models import FAMILIES, tiny_model
from tide_core.errors import ModelError
from tide_core.models.adapter import ModelAdapter
from tide_core.models.families import FAMILIES as KNOWN
from tide_core.request import SamplingParams

MAX_DIFFERENCE = 1e-4
LENGTH = 21
CUTS = {
    "whole": ((), LENGTH),
    "segment_by_segment": ((1, 3), LENGTH),
    "prefill_in_chunks": ((), 5),
    "decode_one_by_one": ((2,), 1),
}
"""Checkpoint layers, and tokens of one pass."""
CASES = [("reference", cut) for cut in CUTS] + [("auto", "prefill_in_chunks"), ("auto", "decode_one_by_one")]
"""Where the work is cut is the adapter's, so the reference kernels show it; the others see many tokens or one."""


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kernels", "cut"), CASES, ids=["-".join(case) for case in CASES])
def test_logits_equal_the_library(family: str, kernels: str, cut: str) -> None:
    [row] = random_prompts(1, LENGTH, seed=3)
    checkpoint_layers, chunk = CUTS[cut]
    [got] = Forward(family, checkpoint_layers, kernels=kernels)([row], chunk)
    assert_equal(got, library_logits(family, row))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_batch_do_not_see_each_other(family: str) -> None:
    rows = [random_prompts(1, length, seed=length)[0] for length in (21, 1, 13, 8)]
    for got, row in zip(Forward(family)(rows, 4), rows, strict=True):
        assert_equal(got, library_logits(family, row))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    prompts = [random_prompts(1, length, seed=length)[0] for length in (11, 4, 17)]
    with make_engine(family, max_batch_tokens=16, block_size=4) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = tiny_model(family).generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert [token.token_id for token in answer.tokens] == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["BloomForCausalLM", "OlmoForCausalLM", "CohereForCausalLM", "Copied"])
def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(name: str) -> None:
    """Also one that is the copy of a known one by another name."""

    class Copied(type(tiny_model("llama"))):  # type: ignore[misc]
        pass

    tiny = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 0}
    kind = Copied if name == "Copied" else getattr(hf, name)
    with pytest.raises(ModelError, match=name) as refusal:
        ModelAdapter(kind(kind.config_class(**tiny)))
    assert all(known in str(refusal.value) for known in KNOWN)


@pytest.mark.parametrize(
    ("family", "setting"), [("gemma3", "use_bidirectional_attention"), ("gpt2", "add_cross_attention")]
)
def test_a_variant_nobody_proved_is_refused_by_its_setting(family: str, setting: str) -> None:
    model: Any = copy.deepcopy(tiny_model(family))
    setattr(model.config, setting, True)
    with pytest.raises(ModelError, match=setting):
        ModelAdapter(model)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2"])
def test_a_head_that_scales_its_logits_is_more_than_a_linear(family: str) -> None:
    adapter, ids = ModelAdapter(tiny_model(family), paged=False), torch.tensor([5, 300, 7])
    narrow, states = adapter.narrow_head(ids), torch.randn(3, 48)
    assert narrow.plain_linear is None
    torch.testing.assert_close(narrow(states), adapter.head(states)[:, ids])


def test_windows_that_only_the_mask_of_the_library_has_are_refused() -> None:
    model: Any = copy.deepcopy(tiny_model("smollm3"))
    model.config.use_sliding_window = False
    with pytest.raises(ModelError, match="layer_types"):
        ModelAdapter(model)


def test_long_rope_models_are_limited_to_their_original_length() -> None:
    assert ModelAdapter(copy.deepcopy(tiny_model("phi3_longrope"))).max_positions == 128

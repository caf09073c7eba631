"""The teacher's states and tokens are the library's, in every family, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from tests.calibration.train.heads import SHORTLIST, tiny_adapter
from tests.tiny_models import FAMILIES
from tide_core.calibration.train.teacher import FusedRMSNorm, MixedProduct, Teacher, fused_norms


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_targets_are_those_of_the_library_for_each_sequence_alone(family: str) -> None:
    adapter = tiny_adapter(family)
    teacher = Teacher(adapter, SHORTLIST)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 384, (2, 12), generator=generator)
    tokens[1, 7:] = 0
    states = teacher.run(tokens, [1, 3])
    targets = teacher.targets(states, torch.arange(12, 19))
    out = adapter.model(tokens[1:, :7], output_hidden_states=True, use_cache=False)
    for layer in (1, 3):
        torch.testing.assert_close(states.at[layer][1:, :7], out.hidden_states[layer], rtol=1e-4, atol=1e-4)
    probabilities = out.logits[0].softmax(-1)
    assert torch.equal(targets.top, probabilities.argmax(-1))
    short = probabilities[:, SHORTLIST]
    torch.testing.assert_close(targets.mass, short.sum(-1), rtol=1e-4, atol=1e-5)
    expected = short / short.sum(-1, keepdim=True)
    torch.testing.assert_close(targets.distribution, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(adapter.head(states.normed)[1, :7], out.logits[0], rtol=1e-4, atol=1e-4)
    got = teacher.exit_logits(states.last[1, :7])
    torch.testing.assert_close(got, out.logits[0][:, SHORTLIST], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "opt_projected", "gemma2"])
def test_logits_of_a_bfloat16_model_are_float32_and_near_its_own(family: str) -> None:
    adapter = tiny_adapter(family, torch.bfloat16)
    teacher = Teacher(adapter, SHORTLIST)
    states = teacher.run(torch.arange(2, 12)[None], [1])
    logits = teacher.exit_logits(states.last[0])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, adapter.head(states.normed)[0][:, SHORTLIST].float(), rtol=0.05, atol=0.1)


def test_fused_norms_compute_the_same_and_leave_the_model_unchanged() -> None:
    adapter = tiny_adapter()
    tokens = torch.arange(12).view(2, 6)
    teacher = Teacher(adapter, SHORTLIST)
    kinds = [type(module) for module in adapter.model.modules()]
    plain = teacher.run(tokens, [1])

    with fused_norms(adapter.model):
        assert FusedRMSNorm in {type(module) for module in adapter.model.modules()}
        fused = teacher.run(tokens, [1])

    assert [type(module) for module in adapter.model.modules()] == kinds
    torch.testing.assert_close(fused.last, plain.last, rtol=1e-4, atol=1e-5)
    with fused_norms(adapter.model, enabled=False):
        assert [type(module) for module in adapter.model.modules()] == kinds


def test_a_mixed_product_and_its_gradient_round_only_the_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((3, 8), (5, 8), (3, 5)))
    weight = weight.bfloat16()
    inputs.requires_grad_()
    logits = MixedProduct.apply(inputs, weight)
    logits.backward(gradient)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, inputs.detach().bfloat16().float() @ weight.float().mT)
    torch.testing.assert_close(inputs.grad, gradient.bfloat16().float() @ weight.float())

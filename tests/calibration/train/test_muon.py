"""Steps of Muon are orthogonal matrices of AdamW's size."""

from __future__ import annotations

import pytest
import torch

from tide_core.calibration.train.learner import Muon, orthogonal


@pytest.mark.parametrize("shape", [(12, 12), (6, 30), (30, 6)])
def test_all_directions_of_a_step_are_about_equally_long(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator) @ torch.diag(torch.logspace(0, -1, shape[1]))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.cosine_similarity(orthogonal(matrix).flatten(), (left @ right).flatten(), 0) > 0.97


def test_matrices_of_one_shape_turned_or_not_take_the_same_steps_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 30), (30, 6), (6, 30), (12, 12), (6, 12)]
    values, gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    together, alone = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    for parameters, groups in ((together, [together]), (alone, [[each] for each in alone])):
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient.clone()
        for group in groups:
            Muon(group, lr=0.1).step()
    for one, other, before in zip(together, alone, values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not torch.equal(one, before)


def test_a_matrix_without_gradient_or_with_a_zero_one_stays_as_it_is() -> None:
    idle, still = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    still.grad = torch.zeros(3, 4)
    Muon([idle, still], lr=0.1).step()
    assert torch.equal(idle, torch.ones(3, 4))
    assert torch.equal(still, torch.ones(3, 4))


def test_a_regression_is_solved() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, truth = torch.randn(64, 8, generator=generator), torch.randn(8, 5, generator=generator)
    guess = torch.nn.Parameter(torch.zeros(8, 5))
    optimiser = Muon([guess], lr=0.1)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        optimiser.zero_grad()
        (inputs @ (guess - truth)).square().mean().backward()
        optimiser.step()
    assert (guess - truth).abs().max() < 0.05

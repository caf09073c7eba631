"""The pass in which some tokens have left: who leaves, and that skip maps learn from it."""

from __future__ import annotations

import torch

from tests.calibration.train.heads import tiny_adapter
from tide_core.calibration.train.skipping import SkippingPass, leaving
from tide_core.calibration.train.teacher import Teacher
from tide_core.exits.artefact.fast import SkipMap


def test_tokens_leave_at_the_first_exit_that_is_sure_and_never_too_many_in_a_row() -> None:
    scores = torch.tensor([[[0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9]], [[0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9]]])
    may = torch.tensor([[False, True, True, True, True, True, True]])
    left = leaving(scores, 0.5, may, max_run=2, offset=0)
    assert left.exits.tolist() == [[-1, 0, 1, -1, 0, 0, -1]]
    assert left.distances.tolist() == [[0, 1, 2, 3, 1, 2, 3]]
    assert leaving(scores, 0.95, may, max_run=2, offset=0).exits.tolist() == [[-1] * 7]


def test_where_nobody_leaves_the_pass_is_that_of_full_depth() -> None:
    adapter = tiny_adapter()
    tokens = torch.randint(2, 384, (2, 9), generator=torch.Generator().manual_seed(0))
    maps = [SkipMap(48, 1, 4, 4)]
    features = [torch.zeros(18, 48)]
    stay = torch.full_like(tokens, -1)
    full = Teacher(adapter, torch.arange(384)).run(tokens, [1]).last.flatten(0, 1)
    with torch.no_grad():
        assert torch.equal(SkippingPass(adapter, [1], maps).run(tokens, stay, features), full)


def test_gradients_reach_the_skip_map_from_tokens_that_stay_and_none_from_before() -> None:
    adapter = tiny_adapter()
    adapter.model.requires_grad_(False)
    tokens = torch.randint(2, 384, (1, 9), generator=torch.Generator().manual_seed(0))
    exits = torch.full_like(tokens, -1)
    exits[0, 4] = 0
    for row, reached in ((3, False), (6, True)):
        skip_map = SkipMap(48, 1, 4, 4)
        last = SkippingPass(adapter, [1], [skip_map]).run(tokens, exits, [torch.randn(9, 48)])
        last[row].square().sum().backward()
        gradient = skip_map.up.weight.grad
        assert (gradient is not None and bool(gradient.any())) is reached

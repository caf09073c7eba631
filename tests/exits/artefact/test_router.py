"""Routers: scores in 0..1 from features and confidence, per token."""

from __future__ import annotations

import pytest
import torch

from tests.exits.artefact.artefact_factory import make_router
from tide_core.exits.artefact.router import Router, confidence_of


def given(num: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 48, generator=generator), confidence_of(torch.randn(num, 96, generator=generator) * 3)


def test_confidence_is_the_best_log_probability_and_its_lead() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0], [2.0, 2.0, -5.0]])
    logprobs = logits.log_softmax(-1)
    expected = torch.tensor([[logprobs[0, 1], 2.0], [logprobs[1, 0], 0.0]])
    assert torch.allclose(confidence_of(logits), expected)
    assert confidence_of(logits.half()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_are_float32_in_0_to_1_and_spread(dtype: torch.dtype) -> None:
    features, confidence = given()
    scores = make_router().to(dtype).score(features.to(dtype), confidence)
    assert (scores.shape, scores.dtype) == ((64,), torch.float32)
    assert bool(((scores >= 0) & (scores <= 1)).all())
    assert scores.std() > 0.1


def test_a_score_belongs_to_its_token_alone() -> None:
    router, (features, confidence) = make_router(), given()
    alone = torch.cat([router.score(features[t : t + 1], confidence[t : t + 1]) for t in range(64)])
    assert torch.allclose(router.score(features, confidence), alone, atol=1e-6)


def test_features_and_both_confidences_matter() -> None:
    router, (features, confidence) = make_router(), given()
    score = router.score(features, confidence)
    for part in range(2):
        moved = confidence.clone()
        moved[:, part] += 1.0
        assert not torch.allclose(router.score(features, moved), score)
    assert not torch.allclose(router.score(features.flip(-1), confidence), score)


def test_features_that_are_not_finite_never_score() -> None:
    router, (features, confidence) = Router(48, 16), given(2)
    features[0, 3] = torch.nan
    scores = router.score(features, confidence)
    assert bool(scores[0].isnan())
    assert bool(scores[1].isfinite())
    assert not bool(scores[0] >= 0.0)

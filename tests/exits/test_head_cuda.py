"""An exit head in few launches says what the head says in many."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.twin import twin_kernels
from tide_core.exits.artefact.heads import ExitHead, HeadSpec
from tide_core.exits.head_cuda import FusedHead

WIDTH, SLOTS = 24, 9


def random_head(**changes: object) -> ExitHead:
    sizes = {"num_heads": 3, "num_kv_heads": 1, "head_size": 8, "ffn": 40}
    spec = HeadSpec(**{"kind": "block", "width": WIDTH, "deep": True, "max_distance": 4, **sizes, **changes})
    head = ExitHead(spec)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.3)
    return head.requires_grad_(False)


@pytest.mark.parametrize("inner", [0, 16])
@pytest.mark.parametrize("taps", [(), (2,), (2, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_fused_deep_state_is_the_heads_own(
    inner: int, taps: tuple[int, ...], num_tokens: int, in_place: bool
) -> None:
    head = random_head(taps=taps, inner=inner)
    fused = FusedHead(head, twin_kernels())
    for _ in range(2):  # the second time with what the first has made
        last, *tapped = torch.randn(1 + len(taps), num_tokens, WIDTH)
        buffer, given = fused.gather_buffer(last), last
        if buffer is not None:
            fused.gather(tapped, buffer)
            given = buffer[:, :WIDTH].copy_(last) if in_place else last
        torch.testing.assert_close(fused.deep_state(given, buffer), head.deep_state(last, tapped), rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", [0, 16])
@pytest.mark.parametrize("hidden", [0, 32])
def test_a_fused_embedding_is_the_heads_own(hidden: int, inner: int) -> None:
    head = random_head(hidden=hidden, inner=inner)
    fused = FusedHead(head, twin_kernels())
    states, pool = torch.randn(4, WIDTH), torch.randn(SLOTS, inner or WIDTH)
    slots, distances = torch.tensor([3, 0, 8, 3]), torch.tensor([1, 0, 4, 2])
    found = fused.embed(states, pool, slots, distances)
    torch.testing.assert_close(found, head.embed(states, pool[slots], distances), rtol=0, atol=1e-5)


@pytest.mark.parametrize("inner", [0, 16])
def test_fused_features_are_as_wide_as_the_model_and_the_heads_own(inner: int) -> None:
    head = random_head(inner=inner)
    states, refined = torch.randn(4, WIDTH), torch.randn(4, inner or WIDTH)
    found = FusedHead(head, twin_kernels()).widen(refined, states)
    assert found.shape == (4, WIDTH)
    torch.testing.assert_close(found, head.widen(refined, states), rtol=0, atol=1e-5)

"""The wrappers of the draws, without a GPU: what they refuse and how they name it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.draw_cases import cycle_of, params_of
from tide_core.kernels.cuda import draw as cuda_draw
from tide_core.kernels.reference.draw import MOST_VOCABULARY, NUM_SETTINGS

SHORTLIST = torch.arange(0, 50, 5)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The wrappers take CPU tensors for a GPU's, and what they launch is written down instead."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_draw, "device_of", lambda tensor: tensor.device)
    monkeypatch.setattr(cuda_draw, "launch", lambda device, op, *arguments: seen.append((op, *arguments)))
    return seen


def draw_arguments(**changed: Any) -> dict[str, Any]:
    return {
        "logits": torch.zeros(3, 50),
        "settings": torch.zeros(NUM_SETTINGS, 3, dtype=torch.float64),
        "numbers": torch.zeros(3, dtype=torch.float64),
        "vocab_size": 50,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(3, 50, dtype=torch.float64)}, "logits.*float64"),
        ({"logits": torch.zeros(50)}, "logits"),
        ({"logits": torch.zeros(3, 0)}, r"logits.*1 to 1048576"),
        ({"logits": torch.zeros(50, 3).T}, "logits.*stride"),
        ({"vocab_size": 49}, "vocab_size: got 49, expected 50 to"),
        ({"vocab_size": MOST_VOCABULARY + 1}, "vocab_size: got"),
        ({"settings": torch.zeros(NUM_SETTINGS, 3)}, "settings.*float32"),
        ({"settings": torch.zeros(4, 3, dtype=torch.float64)}, r"settings.*\[5, R\]"),
        ({"numbers": torch.zeros(2, dtype=torch.float64)}, r"numbers.*\[R\]"),
    ],
)
def test_a_draw_refuses_by_name(launches: list[Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cuda_draw.draw(**draw_arguments(**changed))
    assert not launches


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("sources", torch.zeros(3, dtype=torch.int64), r"sources.*\[T\]"),
        ("num_tokens", torch.zeros(1, dtype=torch.int64), "num_tokens.*int64"),
        ("plain", torch.zeros(2, 4, dtype=torch.float64), r"plain.*\[K \+ 1, R\]"),
        ("scores", torch.zeros(2, 4, dtype=torch.float16), "scores.*float16"),
        ("draft_logits", torch.zeros(2, 4, 10, dtype=torch.float16), "draft_logits.*float16"),
        ("draft_heads", torch.zeros(2, 4, 3, dtype=torch.float64), r"draft_heads.*\[K, R, 4\]"),
        ("places", torch.zeros(49, dtype=torch.int32), r"places.*\[V\]"),
    ],
)
def test_a_cycle_is_refused_by_the_name_of_its_part(
    launches: list[Any], name: str, tensor: torch.Tensor, message: str
) -> None:
    logits, cycle = cycle_of(1, params_of(4), [2, 1, 1, 0], SHORTLIST, 50)
    with pytest.raises((ValueError, TypeError), match=message):
        cuda_draw.verify_drawn(logits, cycle._replace(**{name: tensor}))
    assert not launches


def test_what_fits_is_launched_once(launches: list[Any]) -> None:
    places, heads = cuda_draw.draw(**draw_arguments())
    logits, cycle = cycle_of(1, params_of(4), [2, 1, 1, 0], SHORTLIST, 50)
    best, chosen = cuda_draw.verify_drawn(logits, cycle)
    assert [op for op, *_ in launches] == ["draw", "verify_drawn"]
    assert (places.shape, heads.shape) == ((3,), (3, 4))
    assert best.shape == chosen.shape == (len(logits),)
    assert launches[0][-4:] == (3, 50, 50, 50)
    assert launches[1][-6:] == (len(logits), 4, 2, 50, 10, 50)

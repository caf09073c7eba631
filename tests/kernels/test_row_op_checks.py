"""The wrappers of the ops that read `row_meta`, without a GPU: what they refuse and how they name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.row_cases import keys_of, next_state_of, row_case
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.cuda import draw as cuda_draw

CASE = row_case(1, 3, 3, 2, vocab_size=50)
INT32, INT64 = torch.int32, torch.int64


def accept_drafts_arguments(**changed: Any) -> dict[str, Any]:
    carried, next_state = next_state_of(CASE)
    return {**CASE._asdict(), "branches": 1, "carried": carried, "next_state": next_state, **changed}


def draw_numbers_arguments(**changed: Any) -> dict[str, Any]:
    given = {name: getattr(CASE, name) for name in ("starts", "positions", "row_meta")}
    return {"keys": keys_of(1, 3), **given, "out": torch.zeros(4, 3, 3, dtype=torch.float64), **changed}


ROW_OPS: dict[str, tuple[Callable[..., None], Callable[..., dict[str, Any]]]] = {
    "accept_drafts": (cuda_cycle.accept_drafts, accept_drafts_arguments),
    "draw_numbers": (cuda_draw.draw_numbers, draw_numbers_arguments),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The wrappers take CPU tensors for a GPU's, and what they launch is written down instead."""
    seen: list[tuple[Any, ...]] = []
    for module in (cuda_cycle, cuda_draw):
        monkeypatch.setattr(module, "home", lambda tensor: tensor.device)
        monkeypatch.setattr(module, "launch", lambda device, op, *arguments: seen.append((op, *arguments)))
    return seen


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_tensor_that_is_on_no_gpu_is_refused(op: str) -> None:
    run, arguments = ROW_OPS[op]
    with pytest.raises(ValueError, match=r"got a tensor on cpu, expected cuda$"):
        run(**arguments())


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize(
    ("row_meta", "message"),
    [
        (torch.zeros(4, 3, dtype=INT32), r"row_meta: got shape \[4, 3\], expected \[8, R\]"),
        (torch.zeros(8, 3, dtype=INT64), "row_meta: got torch.int64"),
        (torch.zeros(3, 8, dtype=INT32).T, "row_meta: got strides"),
        (torch.zeros(8, dtype=INT32), "row_meta: got shape"),
        (torch.zeros(8, 257, dtype=INT32), "row_meta.*at most 256 rows"),
    ],
)
def test_row_metadata_is_refused_by_name(launches: list[Any], op: str, row_meta: torch.Tensor, message: str) -> None:
    run, arguments = ROW_OPS[op]
    with pytest.raises((ValueError, TypeError), match=message):
        run(**arguments(row_meta=row_meta))
    assert not launches


@pytest.mark.parametrize(
    ("op", "changed", "message"),
    [
        ("accept_drafts", {"starts": torch.zeros(4, dtype=INT64)}, "starts: got torch.int64"),
        ("accept_drafts", {"positions": torch.zeros(3, dtype=INT64)}, r"positions.*\[T\]"),
        ("accept_drafts", {"drafted": torch.zeros(2, 4, dtype=INT64)}, r"drafted.*\[K, R\]"),
        ("accept_drafts", {"scores": torch.zeros(2, 3).double()}, "scores: got torch.float64"),
        ("accept_drafts", {"scores": torch.zeros(1, 3)}, r"scores.*\[K, R\]"),
        ("accept_drafts", {"branches": 2}, "branches: got 2, expected a divisor of 3 rows"),
        ("accept_drafts", {"carried": torch.zeros(2, 3, dtype=INT32)}, r"carried.*\[2, MOST_ROWS\]"),
        ("accept_drafts", {"next_state": torch.zeros(2, 3, dtype=INT32)}, "next_state: got torch.int32"),
        ("draw_numbers", {"keys": torch.zeros(3, 3, dtype=INT64)}, r"keys.*\[4, R\]"),
        ("draw_numbers", {"starts": torch.zeros(3, dtype=INT32)}, r"starts.*\[R \+ 1\]"),
        ("draw_numbers", {"positions": torch.zeros(8, dtype=INT64)}, r"positions.*\[T\]"),
        ("draw_numbers", {"out": torch.zeros(4, 3, 3)}, "out: got torch.float32"),
        ("draw_numbers", {"out": torch.zeros(4, 9, dtype=torch.float64)}, "out: got shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    launches: list[Any], op: str, changed: dict[str, Any], message: str
) -> None:
    run, arguments = ROW_OPS[op]
    with pytest.raises((ValueError, TypeError), match=message):
        run(**arguments(**changed))
    assert not launches


SIZES = {"accept_drafts": (3, 2, 1), "draw_numbers": (3, 3)}
"""The numbers after the addresses: rows, drafts or distances, and so on."""


@pytest.mark.parametrize("op", ROW_OPS)
def test_what_fits_is_launched_once(launches: list[Any], op: str) -> None:
    run, arguments = ROW_OPS[op]
    run(**arguments())
    [(name, *given)] = launches
    assert name == op
    assert tuple(given[-len(SIZES[op]) :]) == SIZES[op]

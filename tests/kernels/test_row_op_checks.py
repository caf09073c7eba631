"""The wrappers of the ops that read `row_meta`, without a GPU: what they refuse and how they name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.row_cases import adjust_case, keys_of, next_state_of, row_case
from tide_core.kernels.cuda import adjust as cuda_adjust
from tide_core.kernels.cuda import cycle as cuda_cycle
from tide_core.kernels.cuda import draw as cuda_draw

CASE = row_case(1, 3, 3, 2, vocab_size=50)
STATE = adjust_case(1, CASE, 50).state
INT32, INT64 = torch.int32, torch.int64


def accept_drafts_arguments(**changed: Any) -> dict[str, Any]:
    device_state, next_state = next_state_of(CASE)
    return {**CASE._asdict(), "branches": 1, "device_state": device_state, "next_state": next_state, **changed}


def draw_numbers_arguments(**changed: Any) -> dict[str, Any]:
    given = {name: getattr(CASE, name) for name in ("starts", "positions", "row_meta")}
    return {"keys": keys_of(1, 3), **given, "out": torch.zeros(4, 3, 3, dtype=torch.float64), **changed}


def adjust_logits_arguments(**changed: Any) -> dict[str, Any]:
    given = {name: getattr(CASE, name) for name in ("starts", "positions", "drafted", "row_meta")}
    sources, out = torch.arange(4), torch.zeros(4, 50)
    logits = torch.zeros(4, 60).bfloat16()[:, :50]
    return {"logits": logits, "columns": None, "sources": sources, **given, "state": STATE, "out": out, **changed}


def count_outputs_arguments(**changed: Any) -> dict[str, Any]:
    given = {name: getattr(CASE, name) for name in ("row_meta", "starts", "positions", "following", "drafted")}
    return {**given, "next_state": next_state_of(CASE)[1], "counts": STATE.counts, **changed}


def top_logprobs_arguments(**changed: Any) -> dict[str, Any]:
    given = {name: getattr(CASE, name) for name in ("starts", "row_meta", "following")}
    outputs = {"ids": torch.zeros(9, 5, dtype=INT64), "logprobs": torch.zeros(9, 5), "chosen": torch.zeros(9)}
    logits = torch.zeros(9, 60).bfloat16()[:, :50]
    return {"logits": logits, "sources": torch.arange(9), **given, **outputs, **changed}


ROW_OPS: dict[str, tuple[Callable[..., None], Callable[..., dict[str, Any]]]] = {
    "accept_drafts": (cuda_cycle.accept_drafts, accept_drafts_arguments),
    "top_logprobs": (cuda_cycle.top_logprobs, top_logprobs_arguments),
    "draw_numbers": (cuda_draw.draw_numbers, draw_numbers_arguments),
    "adjust_logits": (cuda_adjust.adjust_logits, adjust_logits_arguments),
    "count_outputs": (cuda_adjust.count_outputs, count_outputs_arguments),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The wrappers take CPU tensors for a GPU's, and what they launch is written down instead."""
    seen: list[tuple[Any, ...]] = []
    for module in (cuda_adjust, cuda_cycle, cuda_draw):
        monkeypatch.setattr(module, "device_of", lambda tensor: tensor.device)
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
        (torch.zeros(4, 3, dtype=INT32), r"row_meta: got shape \[4, 3\], expected \[13, R\]"),
        (torch.zeros(13, 3, dtype=INT64), "row_meta: got torch.int64"),
        (torch.zeros(3, 13, dtype=INT32).T, "row_meta: got strides"),
        (torch.zeros(13, dtype=INT32), "row_meta: got shape"),
        (torch.zeros(13, 257, dtype=INT32), "row_meta.*at most 256 rows"),
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
        ("accept_drafts", {"device_state": torch.zeros(2, 256, dtype=INT32)}, r"device_state.*\[3, MOST_ROWS\]"),
        ("accept_drafts", {"logits": torch.zeros(8, 50)}, r"logits.*\[T, V\] with 9 rows"),
        ("accept_drafts", {"logits": torch.zeros(9, 50).double()}, "logits: got torch.float64"),
        ("accept_drafts", {"gaps": torch.zeros(8)}, r"gaps.*\[T\]"),
        ("accept_drafts", {"next_state": torch.zeros(2, 3, dtype=INT32)}, "next_state: got torch.int32"),
        ("accept_drafts", {"counting": torch.zeros(3, dtype=INT64)}, "counting: got torch.int64"),
        ("top_logprobs", {"logits": torch.zeros(9, 50).double()}, "logits: got torch.float64"),
        ("top_logprobs", {"sources": torch.zeros(8, dtype=INT64)}, r"sources.*\[T\]"),
        ("top_logprobs", {"ids": torch.zeros(9, 33, dtype=INT64)}, "ids.*at most 32 columns"),
        ("top_logprobs", {"logprobs": torch.zeros(9, 4)}, r"logprobs.*\[T, N\]"),
        ("top_logprobs", {"chosen": torch.zeros(9).double()}, "chosen: got torch.float64"),
        ("draw_numbers", {"keys": torch.zeros(3, 3, dtype=INT64)}, r"keys.*\[4, R\]"),
        ("draw_numbers", {"starts": torch.zeros(3, dtype=INT32)}, r"starts.*\[R \+ 1\]"),
        ("draw_numbers", {"positions": torch.zeros(8, dtype=INT64)}, r"positions.*\[T\]"),
        ("draw_numbers", {"out": torch.zeros(4, 3, 3)}, "out: got torch.float32"),
        ("draw_numbers", {"out": torch.zeros(4, 9, dtype=torch.float64)}, "out: got shape"),
        ("adjust_logits", {"logits": torch.zeros(4, 50).double()}, "logits: got torch.float64"),
        ("adjust_logits", {"logits": torch.zeros(50, 4).T}, "logits: got stride"),
        ("adjust_logits", {"logits": torch.zeros(4, 51), "out": torch.zeros(4, 51)}, "logits.*at most 50 columns"),
        ("adjust_logits", {"columns": torch.zeros(50, dtype=INT32)}, "columns: got torch.int32"),
        ("adjust_logits", {"columns": torch.zeros(49, dtype=INT64)}, r"columns.*\[C\]"),
        ("adjust_logits", {"sources": torch.zeros(3, dtype=INT64)}, r"sources.*\[N\]"),
        ("adjust_logits", {"positions": torch.zeros(8, dtype=INT64)}, r"positions.*\[T\]"),
        ("adjust_logits", {"drafted": torch.zeros(2, 4, dtype=INT64)}, r"positions|drafted"),
        ("adjust_logits", {"out": torch.zeros(4, 50).bfloat16()}, "out: got torch.bfloat16"),
        ("adjust_logits", {"out": torch.zeros(4, 60)[:, :50]}, "out: got strides"),
        ("adjust_logits", {"state": STATE._replace(counts=STATE.counts.int())}, "state.counts: got torch.int32"),
        ("adjust_logits", {"state": STATE._replace(penalties=STATE.penalties.float())}, "state.penalties: got"),
        ("adjust_logits", {"state": STATE._replace(entry_values=torch.zeros(4, 3))}, r"state.entry_values.*\[S, E\]"),
        ("adjust_logits", {"state": STATE._replace(entry_ids=torch.zeros(4, 513, dtype=INT32))}, "at most 512 entries"),
        ("count_outputs", {"counts": STATE.counts.int()}, "counts: got torch.int32"),
        ("count_outputs", {"next_state": torch.zeros(3, 2, dtype=INT64)}, r"next_state.*\[2, R\]"),
        ("count_outputs", {"positions": torch.zeros(8, dtype=INT64)}, r"positions.*\[T\]"),
        ("count_outputs", {"drafted": torch.zeros(2, 3, dtype=INT32)}, "drafted: got torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    launches: list[Any], op: str, changed: dict[str, Any], message: str
) -> None:
    run, arguments = ROW_OPS[op]
    with pytest.raises((ValueError, TypeError), match=message):
        run(**arguments(**changed))
    assert not launches


SIZES = {
    "accept_drafts": (3, 2, 1, 50),
    "top_logprobs": (9, 3, 50, 60, 5),
    "draw_numbers": (3, 3),
    "adjust_logits": (4, 50, 60, 3, 4, 50, 320),
    "count_outputs": (3, 50),
}
"""The numbers after the addresses: rows, drafts or distances, and so on."""


@pytest.mark.parametrize("op", ROW_OPS)
def test_what_fits_is_launched_once(launches: list[Any], op: str) -> None:
    run, arguments = ROW_OPS[op]
    run(**arguments())
    [(name, *given)] = launches
    assert name == op
    assert tuple(given[-len(SIZES[op]) :]) == SIZES[op]

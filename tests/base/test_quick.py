"""Frozen objects made the quick way are those made the plain way."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from tests.factories import make_blocks, make_request
from tide_core.batch import RowStep
from tide_core.quick import quick
from tide_core.request import Audit, ExitPolicy, FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage

pytestmark = pytest.mark.unit

TOKEN = TokenOutput(7, " cat", 30)


def arguments() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """A kind, and positional and named arguments for it."""
    table = make_blocks().new_table()
    return [
        (TokenOutput, (7, " cat", 30), {}),
        (TokenOutput, (7, " cat", 2, -0.5, ((7, -0.5),), 0.9, Audit.AGREED, "fast"), {}),
        (RequestOutput, ("r",), {}),
        (RequestOutput, ("r", (TOKEN,), FinishReason.STOP), {"usage": Usage(1, 2)}),
        (RowStep, (make_request(), table, [1], []), {"samples": True}),
        (RowStep, (make_request(), table, [1], [2], True, ExitPolicy("fast"), 3), {}),
    ]


@pytest.mark.parametrize(("kind", "positional", "named"), arguments())
def test_a_quick_object_equals_the_plain_one_and_is_of_its_class(kind: Any, positional: Any, named: Any) -> None:
    made, plain = quick(kind)(*positional, **named), kind(*positional, **named)
    assert type(made) is kind
    assert made == plain
    assert repr(made) == repr(plain)
    assert pickle.loads(pickle.dumps(made)) == plain
    assert dataclasses.replace(made) == plain


def test_a_quick_object_is_frozen_and_hashed_as_the_plain_one() -> None:
    made = quick(TokenOutput)(7, " cat", 30)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.text = "dog"  # type: ignore[misc]
    assert made in {TOKEN}


@pytest.mark.parametrize(("positional", "named"), [((), {}), ((1, "a", 2), {"color": "red"})])
def test_wrong_arguments_are_refused(positional: Any, named: Any) -> None:
    with pytest.raises(TypeError):
        quick(TokenOutput)(*positional, **named)


def test_a_kind_that_checks_itself_has_no_quick_way() -> None:
    with pytest.raises(AssertionError):
        quick(SamplingParams)


def test_each_object_made_quickly_has_default_values_of_its_own() -> None:
    make = quick(Usage)
    assert make(1, 2).exits == {}
    assert make(1, 2).exits is not make(1, 2).exits

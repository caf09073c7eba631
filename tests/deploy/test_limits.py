"""The limits of one request: their own ranges, and what they refuse or cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.limits import Limits
from tide_core.errors import RequestError
from tide_core.request import SamplingParams


@pytest.mark.parametrize(("asked", "allowed"), [(1, True), (100, True), (101, False), (2**31 - 1, False)])
def test_a_request_for_more_tokens_than_the_limit_is_refused_by_name(asked: int, allowed: bool) -> None:
    limits, params = Limits(max_tokens=100), SamplingParams(max_tokens=asked)
    if allowed:
        limits.check(params)
    else:
        with pytest.raises(RequestError, match=f"max_tokens: got {asked}, expected at most 100"):
            limits.check(params)


@pytest.mark.parametrize(("asked", "granted"), [(None, 20.0), (0.5, 0.5), (20, 20.0), (1e9, 20.0)])
def test_a_request_gets_the_time_it_asks_for_up_to_the_limit(asked: float | None, granted: float) -> None:
    assert Limits(max_timeout_s=20.0).timeout_s(asked) == granted


@pytest.mark.parametrize("asked", [0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused(asked: float) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        Limits().timeout_s(asked)


@pytest.mark.parametrize("name", list(Limits.model_fields))
@pytest.mark.parametrize("value", [0, -1, 10**12, math.nan, math.inf, True, "7", None], ids=str)
def test_a_limit_out_of_its_range_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Limits.model_validate({name: value})
    assert [error["loc"] for error in refused.value.errors()] == [(name,)]


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_token\n"):
        Limits.model_validate({"max_token": 5})


def test_limits_as_they_come_are_those_of_the_security_design() -> None:
    limits = Limits()
    assert (limits.max_tokens, limits.body_bytes, limits.json_depth) == (4096, 2_000_000, 64)
    assert (limits.header_bytes, limits.num_headers) == (65536, 100)
    with pytest.raises(ValidationError, match="frozen"):
        limits.max_tokens = 10**6  # type: ignore[misc]

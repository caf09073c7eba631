from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from tide_core.errors import RequestError
from tide_core.request import SamplingParams

pytestmark = pytest.mark.unit


def short(value: Any) -> str:
    return "huge" if isinstance(value, int) and abs(value) > 10**30 else repr(value)[:24]


BAD_VALUES: list[tuple[str, Any]] = [
    *(("max_tokens", v) for v in (0, -1, 2**31, 1.5, True, "7", None)),
    *(("min_tokens", v) for v in (-1, 129, 0.5, True)),
    *(("temperature", v) for v in (math.nan, math.inf, -math.inf, -0.1, 1e30, 10**400, "1", True, None)),
    *(("top_p", v) for v in (0, 0.0, -0.5, 1.0001, math.nan, "x")),
    *(("top_k", v) for v in (-1, -2, 2**31, 1.0, True)),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", v) for v in (0.0, 1e-60, -1.0, math.nan, 1e9)),
    *(("presence_penalty", v) for v in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, math.inf)),
    *(("seed", v) for v in (2**64, -(2**63) - 1, 0.5, True, "1")),
    *(("stop", v) for v in (("",), ("a",) * 17, ("x" * 65,), (1,), ["a"], "a")),
    *(("stop_ids", v) for v in ((1.0,), (True,), [1], "1")),
    *(("ignore_eos", v) for v in (1, "yes", None)),
    *(("logprobs", v) for v in (-1, 21, 10_000, 1.0, True)),
    *(("mode", v) for v in ("turbo", "FULL", "", 1)),
    *(("logit_bias", v) for v in ({i: 0.0 for i in range(301)}, {"1": 0.0}, {True: 1.0}, [(1, 1.0)])),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=short)
def test_a_bad_sampling_value_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize("value", [math.nan, math.inf, 101.0, -(10**400), "1", None])
def test_a_bad_logit_bias_names_its_token(value: Any) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[7\]"):
        SamplingParams(logit_bias={7: value})


@pytest.mark.parametrize("params", [{"stop_ids": (384,)}, {"stop_ids": (-1,)}, {"logit_bias": {400: 1.0}}])
def test_ids_the_model_does_not_have_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"0\.\.383"):
        SamplingParams(**params).check_ids(384)


def test_the_extremes_that_are_allowed_are_allowed() -> None:
    SamplingParams(
        max_tokens=1,
        temperature=100.0,
        top_p=1,
        top_k=2**31 - 1,
        min_p=1.0,
        seed=2**64 - 1,
        stop=("x" * 64,) * 4,
        logprobs=20,
        logit_bias={0: -100.0},
    )
    SamplingParams(seed=-(2**63), temperature=0)


def test_parameters_survive_pickling() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop=("a",))
    assert pickle.loads(pickle.dumps(params)) == params

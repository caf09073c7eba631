"""The benchmark of the engine's host code."""

from __future__ import annotations

import pytest

from benchmarks.host.__main__ import WAYS, measure
from tide_core.models.loader import load_tokenizer
from tide_core.models.resolver import resolve
from tide_core.outputs.tokenizer import Tokenizer


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_counts_its_steps_and_outputs_all_its_tokens(way: str, tokens_per_step: int) -> None:
    point = measure(Tokenizer(load_tokenizer(resolve("demo"))), way, 2, tokens_per_step, 1)
    assert 0.0 < point["us_per_token"] <= point["us_per_row_step"]
    # A step has `tokens_per_step` tokens, except for the last ones and that of the prompt.
    assert point["us_per_row_step"] / point["us_per_token"] == pytest.approx(tokens_per_step, rel=0.05)

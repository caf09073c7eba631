"""What the engine costs its host is measured by a benchmark of its own."""

from __future__ import annotations

import pytest

from benchmarks.host import WAYS, measure
from tide_core.models.loader import load_tokenizer
from tide_core.models.resolver import resolve
from tide_core.outputs.tokenizer import Tokenizer


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_counts_its_steps_and_says_all_its_tokens(way: str, tokens_per_step: int) -> None:
    point = measure(Tokenizer(load_tokenizer(resolve("demo"))), way, 2, tokens_per_step, 1)
    assert 0.0 < point["us_per_token"] <= point["us_per_row_step"]
    # A row has steps of so many tokens, but for the last ones and that of its prompt.
    assert point["us_per_row_step"] / point["us_per_token"] == pytest.approx(tokens_per_step, rel=0.05)

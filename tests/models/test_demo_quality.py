"""The demo model is the model it says it is: its perplexity on known text."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from tide_core.models.loader import load_model, load_tokenizer
from tide_core.models.resolver import resolve

WINDOW, NUM_WINDOWS = 512, 2
DATA = os.environ.get("TIDE_TEST_DATA", "")


@pytest.mark.demo
@pytest.mark.skipif(not DATA, reason="needs wikitext2-valid.txt in the folder that TIDE_TEST_DATA names")
def test_perplexity_of_the_dequantised_demo_model_on_wikitext_is_16() -> None:
    """The first two windows of 512 tokens of the validation text, beginning-of-text only at the start; four give 18.3
    and ten 20.1, which takes a minute."""
    text = (Path(DATA) / "wikitext2-valid.txt").read_bytes()[:20_000].decode(errors="ignore")
    resolved = resolve("demo")
    model = load_model(resolved, dtype="float32", device="cpu")
    ids = [model.config.bos_token_id, *load_tokenizer(resolved).encode(text)]
    windows = torch.tensor(ids[: NUM_WINDOWS * WINDOW]).view(-1, WINDOW)
    losses = []
    with torch.inference_mode():
        for window in windows:
            logits = model(window[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    assert math.exp(torch.stack(losses).mean().item()) == pytest.approx(16.07, abs=0.1)

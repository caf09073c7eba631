"""The exit histogram: what it counts, how it reads, and that it adds up."""

from __future__ import annotations

import json

import pytest

from tide_core.errors import ConfigError
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit

pytestmark = pytest.mark.unit


def made_stats() -> ExitStats:
    """A cycle of three drafts with two accepted, a token at full depth, and one exit nobody checked."""
    stats = ExitStats(30)
    cycle = [(2, Audit.VERIFIED), (2, Audit.DISAGREED), (30, Audit.VERIFIED)]
    stats.record(cycle, layers_run=4 * 30, deep_passes=1, drafts=3, accepted=2)
    stats.record([(30, Audit.VERIFIED)], layers_run=30, deep_passes=1, non_finite_scores=1)
    stats.record([(6, Audit.UNAUDITED)], layers_run=6, drafts=1, accepted=1)
    return stats


def test_the_histogram_has_the_words_its_users_know() -> None:
    stats = made_stats()
    assert (stats.total_tokens, stats.total_exited, stats.remaining_tokens) == (5, 3, 2)
    assert stats.exits_per_layer == {2: 2, 6: 1}
    assert list(stats.exits_per_layer) == [2, 6]
    assert stats.exit_rate == 0.6
    summary = stats.summary()
    for key in ("total_tokens", "total_exited", "exit_rate", "remaining_tokens"):
        assert summary[key] == getattr(stats, key)
    assert summary["exits_per_layer"] == {"2": 2, "6": 1}


def test_layers_per_token_are_of_layers_that_ran_not_of_exit_layers() -> None:
    stats = made_stats()
    assert stats.layers_per_token == (120 + 30 + 6) / 5
    assert stats.tokens_per_deep_pass == 2.5
    assert stats.acceptance == 0.75
    assert stats.summary()["audits"] == {"verified": 3, "agreed": 0, "disagreed": 1, "unaudited": 1}
    assert stats.summary()["non_finite_scores"] == 1


def test_nothing_counted_yet_is_zero_and_not_an_error() -> None:
    stats = ExitStats(12)
    assert (stats.exit_rate, stats.layers_per_token, stats.tokens_per_deep_pass, stats.acceptance) == (0, 0, 0, None)
    assert stats.exits_per_layer == {}
    json.dumps(stats.summary())
    assert "Total tokens: 0" in str(stats)
    assert stats.remaining_tokens == 0


def test_a_summary_is_json() -> None:
    stats = made_stats()
    sent = json.loads(json.dumps(stats.summary()))
    assert sent == stats.summary()


def test_the_text_shows_each_layer_and_what_ran() -> None:
    text = str(made_stats())
    assert text.splitlines() == [
        "Total tokens: 5, Exited: 3 (60.0%)",
        "  Layer 2: 2 exits (40.0%)",
        "  Layer 6: 1 exits (20.0%)",
        "  Decided after all 30 layers: 2",
        "  Layers run per token: 31.2, tokens per deep pass: 2.50, drafts accepted: 75.0%",
    ]


@pytest.mark.parametrize("layer", [-1, 31])
def test_a_layer_the_model_does_not_have_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match=rf"exit_layer: got {layer}, expected a layer in 0\.\.30"):
        ExitStats(30).record([(layer, Audit.VERIFIED)], layers_run=1)

"""Streams at once: all are counted, and the first that fails ends the others."""

from __future__ import annotations

import pytest

from tests.client import scripted
from tests.client.scripted import PATIENCE_S, GrpcServer, Script, fails
from tide_client import StatusError, TideClient
from tide_client.bench import Bench, quantile


def test_all_tokens_of_all_streams_are_counted(server: GrpcServer) -> None:
    with TideClient(server.address) as client:
        times = Bench(lambda: client.stream("Say"), 5).run()
    assert (times["streams"], times["tokens"]) == (5, 20)
    assert times["tokens_per_s"] == pytest.approx(20 / times["seconds"])
    assert 0 < times["first_token_ms_p50"] <= times["first_token_ms_max"]
    assert 0 <= times["inter_token_ms_p50"] <= times["inter_token_ms_p99"]


def test_the_first_failure_ends_the_other_streams(server: GrpcServer, script: Script) -> None:
    script.acts.extend([scripted.never_ends, scripted.never_ends, fails("INTERNAL", after=1)])
    with TideClient(server.address) as client, pytest.raises(StatusError, match="INTERNAL after 1 token"):
        Bench(lambda: client.stream("Say"), 3).run()
    assert sorted(script.ends.get(timeout=PATIENCE_S) for _ in range(3)) == ["answered", "gone", "gone"]


def test_an_answer_without_tokens_has_no_times() -> None:
    class Empty(list[object]):
        def close(self) -> None: ...

    times = Bench(Empty, 2).run()
    assert (times["tokens"], times["first_token_ms_p50"], times["inter_token_ms_p99"]) == (0, 0.0, 0.0)


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([], 0.99) == 0.0
    assert quantile([3.0], 0.99) == 3.0
    assert quantile(list(range(100)), 0.5) == 50
    assert quantile(list(range(100)), 0.99) == 99

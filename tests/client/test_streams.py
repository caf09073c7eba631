"""Streams of both clients against a scripted server: nothing is lost, nothing comes twice, no end is another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common.live import free_ports
from tests.client import scripted
from tests.client.conftest import Outcome
from tests.client.scripted import PATIENCE_S, TEXT, GrpcServer, Script, fails, hangs
from tide_client import BrokenStreamError, StatusError

Read = Callable[..., Outcome]


def test_a_whole_stream_is_its_tokens_in_order_and_then_the_answer(server: GrpcServer, read: Read) -> None:
    seen = read(server.address)
    assert seen.text == TEXT
    assert [(t.id, t.exit_layer, t.score, t.audit, t.gap, t.mode) for t in seen.tokens] == [
        (5, 4, None, "verified", None, "bounded"),
        (6, 1, 0.75, "agreed", None, "bounded"),
        (7, 1, 0.5, "disagreed", 0.125, "bounded"),
        (8, 4, None, "verified", None, "bounded"),
    ]
    answer = seen.answer
    assert answer is not None
    assert (answer.text, answer.tokens, answer.finish_reason) == (TEXT, tuple(seen.tokens), "stop")
    assert (answer.request_id, answer.model, answer.artefact_digest) == ("r-1", "scripted", "d" * 64)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_s) == (3, 4, 2.0)
    assert answer.exits.tokens_per_layer == {1: 2, 4: 2}
    assert answer.exits.differing == 1
    assert list(answer.exits.tokens_per_layer) == [1, 4]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_a_server_that_was_not_there_is_asked_again_and_no_token_comes_twice(
    server: GrpcServer, script: Script, read: Read, code: str
) -> None:
    script.acts.extend([fails(code), fails(code, opens=True)])
    seen = read(server.address)
    assert (seen.text, seen.error) == (TEXT, None)
    assert len(script.requests) == 3
    assert script.requests[0] == script.requests[2]


def test_it_is_asked_again_as_often_as_was_said_and_then_the_status_is_told(
    server: GrpcServer, script: Script, read: Read
) -> None:
    script.acts.extend([fails("UNAVAILABLE")] * 9)
    seen = read(server.address, retries=1)
    assert len(script.requests) == 2
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, seen.error.details, seen.error.num_tokens) == ("UNAVAILABLE", "scripted UNAVAILABLE", 0)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_after_the_first_token_nothing_is_asked_again(
    server: GrpcServer, script: Script, read: Read, code: str
) -> None:
    script.acts.append(fails(code, after=2))
    seen = read(server.address)
    assert (seen.text, len(script.requests)) == ("The cat", 1)
    assert str(seen.error) == f"{code} after 2 tokens: scripted {code}"


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL", "DEADLINE_EXCEEDED"])
def test_a_status_that_asking_again_cannot_mend_is_told_at_once(
    server: GrpcServer, script: Script, read: Read, code: str
) -> None:
    script.acts.append(fails(code))
    seen = read(server.address)
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, len(script.requests)) == (code, 1)


@pytest.mark.parametrize(
    ("act", "text", "said"),
    [
        (scripted.skips, "The", "chunk 2 came where 1 was next"),
        (scripted.repeats, "The", "chunk 0 came where 1 was next"),
        (scripted.ends_without_the_last_word, "The cat", "ended after 2 tokens without a final message"),
        (scripted.goes_on_after_the_last_word, TEXT, "chunk 3 came where nothing was next"),
    ],
)
def test_a_stream_with_a_piece_missing_is_broken_and_not_asked_again(
    server: GrpcServer, script: Script, read: Read, act: Any, text: str, said: str
) -> None:
    script.acts.append(act)
    seen = read(server.address)
    assert isinstance(seen.error, BrokenStreamError)
    assert said in str(seen.error)
    assert (seen.text, len(script.requests)) == (text, 1)


def test_a_status_behind_the_last_word_takes_nothing_back(server: GrpcServer, script: Script, read: Read) -> None:
    script.acts.append(scripted.fails_after_the_last_word)
    seen = read(server.address)
    assert (seen.text, seen.error) == (TEXT, None)


def test_a_stream_that_hangs_ends_at_its_deadline_with_what_had_come(
    server: GrpcServer, script: Script, read: Read
) -> None:
    script.acts.append(hangs(after=1))
    seen = read(server.address, timeout_s=10.0)
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, seen.error.num_tokens, seen.text) == ("DEADLINE_EXCEEDED", 1, "The")
    assert script.ends.get(timeout=PATIENCE_S) == "gone"


def test_no_call_goes_without_a_deadline_and_the_server_is_told_it_too(
    server: GrpcServer, script: Script, read: Read
) -> None:
    read(server.address)
    read(server.address, timeout_s=None)
    read(server.address, timeout_s=60.0)
    assert script.deadlines_s == pytest.approx([120, 120, 60], abs=30)
    assert [request.timeout_s for request in script.requests] == [120, 120, 60]


def test_asking_again_shares_the_deadline_of_the_first_call(server: GrpcServer, script: Script, read: Read) -> None:
    script.acts.extend([fails("UNAVAILABLE")] * 99)
    before = time.monotonic()
    seen = read(server.address, retries=99, timeout_s=0.5)
    assert isinstance(seen.error, StatusError)
    assert time.monotonic() - before < PATIENCE_S, "and not the sum of 99 pauses"
    assert len(script.requests) < 10


def test_a_server_that_comes_back_is_found(read: Read) -> None:
    first = GrpcServer(*free_ports(1))
    first.stop()
    second: list[GrpcServer] = []
    comes_back = threading.Timer(0.2, lambda: second.append(GrpcServer(first.port)))
    comes_back.start()
    seen = read(first.address, retries=99, timeout_s=PATIENCE_S)
    comes_back.join()
    second[0].stop()
    assert (seen.text, seen.error) == (TEXT, None)


def test_a_server_that_dies_mid_stream_is_told_with_the_tokens_that_had_come(
    server: GrpcServer, script: Script, read: Read
) -> None:
    script.acts.append(hangs(after=2))

    def kill(num_tokens: int) -> None:
        if num_tokens == 2:
            server.stop()

    seen = read(server.address, on_token=kill, timeout_s=PATIENCE_S)
    assert isinstance(seen.error, StatusError)
    assert seen.error.code in ("UNAVAILABLE", "CANCELLED")
    assert (seen.text, seen.error.num_tokens, len(script.requests)) == ("The cat", 2, 1)

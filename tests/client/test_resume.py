"""Streams that break after their first token and are resumed: no token twice, none missing, none of another answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.client.conftest import Outcome
from tests.client.scripted import FINAL, Act, Chunks, GrpcServer, Script, chunk, fails
from tide.v1 import tide_pb2 as pb
from tide_client import BrokenStreamError, StatusError
from tide_client.retry import MAX_ID_CHARS, with_own_id

Read = Callable[..., Outcome]
SAY = [ord(letter) for letter in "Say"]
"""The ids of the prompt, by the scripted server's tokenizer."""
WORDS = ["The", " cat", "", "é", " sat", "."]
"""The third token is half a character."""
IDS = [101, 102, 103, 104, 105, 106]


def answers(mode: Any = pb.MODE_VERIFIED, *, dies_after: int | None = None, ids: list[int] = IDS) -> Act:
    """What follows the prompt, as one model would say it whoever asks; dies after so many tokens of its own."""

    def act(script: Script, context: grpc.ServicerContext) -> Chunks:
        request = script.requests[-1]
        begun = len(request.prompt_ids.ids) - len(SAY) if request.HasField("prompt_ids") else 0
        assert list(request.prompt_ids.ids) in ([], SAY + IDS[:begun])
        tokens = [
            pb.Token(id=token_id, text=text, exit_layer=1 + token_id % 2, mode=mode)
            for token_id, text in zip(ids, WORDS, strict=True)
        ][begun:]
        for index, token in enumerate(tokens):
            if index == dies_after:
                context.abort(grpc.StatusCode.CANCELLED, "RST_STREAM")
            yield chunk(index, token)
        final = pb.Final()
        final.CopyFrom(FINAL)
        final.usage.prompt_tokens, final.usage.completion_tokens = len(SAY) + begun, len(tokens)
        yield chunk(len(tokens), final=final)

    return act


def assert_whole(seen: Outcome) -> None:
    assert seen.error is None
    assert [token.id for token in seen.tokens] == IDS
    assert seen.text == "The caté sat."
    assert seen.answer is not None
    assert seen.answer.tokens == tuple(seen.tokens)
    assert (seen.answer.usage.prompt_tokens, seen.answer.usage.completion_tokens) == (3, 6)


@pytest.mark.parametrize(("dies_after", "kept"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 4), (6, 5)])
def test_a_greedy_answer_goes_on_from_its_last_whole_character(
    server: GrpcServer, script: Script, read: Read, dies_after: int, kept: int
) -> None:
    script.acts.extend([answers(dies_after=dies_after) if dies_after < 6 else dies_before_the_last_word, answers()])
    assert_whole(seen := read(server.address, resume=True, max_tokens=6, min_tokens=2))
    second = script.requests[1]
    assert list(second.prompt_ids.ids) == ([] if kept == 0 else SAY + IDS[:kept])
    assert second.sampling_params.max_tokens == 6 - kept
    assert second.sampling_params.min_tokens == max(0, 2 - kept)
    assert second.HasField("prompt") == (kept == 0)
    if kept:
        assert seen.answer is not None
        assert seen.answer.exits.tokens_per_layer == {1: 3, 2: 3}


def dies_before_the_last_word(script: Script, context: grpc.ServicerContext) -> Chunks:
    yield from list(answers()(script, context))[:-1]
    context.abort(grpc.StatusCode.CANCELLED, "RST_STREAM")


def test_it_may_break_again_and_again(server: GrpcServer, script: Script, read: Read) -> None:
    script.acts.extend([answers(dies_after=2), fails("UNAVAILABLE"), answers(dies_after=2), answers()])
    assert_whole(read(server.address, resume=True, request_id="mine"))
    assert [request.request_id for request in script.requests] == ["mine", "mine~2", "mine~3", "mine~4"]


def test_a_chat_and_ids_go_on_too(server: GrpcServer, script: Script, read: Read) -> None:
    for prompt in ([{"role": "user", "content": "Say"}], SAY):
        script.acts.extend([answers(dies_after=3), answers()])
        assert_whole(read(server.address, resume=True, prompt=prompt))
        assert list(script.requests[-1].prompt_ids.ids) == SAY + IDS[:2]
        assert not script.requests[-1].HasField("chat")


REPLAYED = [
    {"temperature": 0.7, "seed": 3},
    {"stop": ["x"]},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
]


@pytest.mark.parametrize("options", REPLAYED, ids=lambda options: next(iter(options)))
def test_an_answer_that_more_than_its_ids_decide_is_replayed(
    server: GrpcServer, script: Script, read: Read, options: dict[str, Any]
) -> None:
    script.acts.extend([answers(dies_after=4), answers()])
    assert_whole(read(server.address, resume=True, **options))
    first, second = script.requests
    assert first == second


def test_early_exits_that_nothing_verifies_are_replayed(server: GrpcServer, script: Script, read: Read) -> None:
    script.acts.extend([answers(pb.MODE_FAST, dies_after=4), answers(pb.MODE_FAST)])
    assert_whole(read(server.address, resume=True))
    assert script.requests[0] == script.requests[1]


def test_an_answer_that_goes_another_way_is_broken_and_not_joined(
    server: GrpcServer, script: Script, read: Read
) -> None:
    script.acts.extend([answers(dies_after=4), answers(ids=[101, 102, 999, 104, 105, 106])])
    seen = read(server.address, resume=True, seed=1, temperature=1.0)
    assert isinstance(seen.error, BrokenStreamError)
    assert str(seen.error) == "the resumed answer has token 999 where 103 was received"
    assert [token.id for token in seen.tokens] == IDS[:4]


@pytest.mark.parametrize("options", [{"resume": True, "temperature": 0.7}, {"resume": False}])
def test_an_answer_is_not_resumed_without_a_seed_or_unasked(
    server: GrpcServer, script: Script, read: Read, options: dict[str, Any]
) -> None:
    script.acts.append(answers(dies_after=2))
    seen = read(server.address, **options)
    assert isinstance(seen.error, StatusError)
    assert (seen.error.code, seen.error.num_tokens, len(script.requests)) == ("CANCELLED", 2, 1)


def test_choices_are_replayed_with_an_id_of_their_own(server: GrpcServer, script: Script, read: Read) -> None:
    def both(*, dies: bool) -> Act:
        def act(script: Script, context: grpc.ServicerContext) -> Chunks:
            order = [0, 1, 0, 1] if dies else [0, 0, 1, 1]
            seen = [0, 0]
            for sequence, choice in enumerate(order):
                if dies and sequence == 3:
                    context.abort(grpc.StatusCode.CANCELLED, "RST_STREAM")
                part = chunk(sequence, pb.Token(id=IDS[choice + seen[choice]], text=f"{choice}{seen[choice]} "))
                part.choice, seen[choice] = choice, seen[choice] + 1
                if seen[choice] == 2:
                    part.final.CopyFrom(FINAL)
                yield part

        return act

    script.acts.extend([both(dies=True), both(dies=False)])
    seen = read(server.address, resume=True, n=2, seed=3, temperature=0.7, request_id="mine")
    assert seen.error is None
    assert [(token.choice, token.text) for token in seen.tokens] == [(0, "00 "), (1, "10 "), (0, "01 "), (1, "11 ")]
    assert seen.answer is not None
    assert [choice.text for choice in seen.answer.choices] == ["00 01 ", "10 11 "]
    assert [(request.request_id, request.n) for request in script.requests] == [("mine", 2), ("mine~2", 2)]


def test_no_attempt_has_the_id_of_another(server: GrpcServer, script: Script, call: Callable[..., Any]) -> None:
    script.acts.extend([fails("UNAVAILABLE"), fails("UNAVAILABLE")])
    call(server.address, "generate", "Say", request_id="mine")
    assert [request.request_id for request in script.requests] == ["mine", "mine~2", "mine~3"]
    long = with_own_id(pb.GenerateRequest(request_id="x" * MAX_ID_CHARS), 9)
    assert long.request_id == "x" * (MAX_ID_CHARS - 3) + "~10"

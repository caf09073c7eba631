"""OpenAI messages: requests, replies, errors, and answers that break off."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.failures import (
    DeadlineError,
    ForbiddenError,
    NotServedError,
    TooLargeError,
    UnauthenticatedError,
    failure_of,
)
from deploy.http_api.openai_replies import ChatChoice, ChatReply, Choice, CompletionReply
from deploy.http_api.openai_requests import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TideOptions,
    TokenizeRequest,
)
from deploy.http_api.reply_objects import error_object, invalid_body, sse_event
from tests.deploy.answers import make_answer
from tests.deploy.scripted import FOREVER, HEL, LO, USAGE, ScriptedEngine, call
from tide_core.errors import ConfigError, EngineBusyError, EngineDeadError, EngineError, RequestError
from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput

BODY = {"prompt": "Say", "max_tokens": 2}
NO_USAGE = StreamOptions()
ENVELOPE = {"message", "type", "param", "code"}


def completion(*, logprobs: int | None = None, usage: Any = NO_USAGE, **options: Any) -> CompletionReply:
    answer = make_answer(params=SamplingParams(logprobs=logprobs))
    return CompletionReply([Choice(answer, ScriptedEngine.tokenizer)], "tiny", TideOptions(**options), 1, usage)


def chat(*, logprobs: int | None = None, usage: Any = NO_USAGE, **options: Any) -> ChatReply:
    answer = make_answer(params=SamplingParams(logprobs=logprobs))
    return ChatReply([ChatChoice(answer, ScriptedEngine.tokenizer)], "tiny", TideOptions(**options), 1, usage)


# What goes out.


def test_a_completion_has_openais_shape() -> None:
    whole = completion().whole([[HEL, LO]])
    assert whole.pop("created") > 0
    assert whole.pop("tide")["tokens_per_layer"] == {"12": 1, "30": 1}
    assert whole == {
        "id": "cmpl-ours",
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_a_chat_has_openais_shape() -> None:
    whole = chat().whole([[HEL, LO]])
    assert whole["id"] == "chatcmpl-ours"
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_chunks_of_a_chat_are_its_role_its_text_and_its_end() -> None:
    reply = chat()
    [first] = reply.first_chunks()
    last = RequestOutput("r", (), FinishReason.LENGTH, USAGE)
    chunks = [first, reply.chunks(0, HEL)[0], reply.chunks(0, last)[0]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("make", [completion, chat])
def test_usage_is_told_in_a_stream_only_if_asked_and_then_every_chunk_speaks_of_it(make: Any) -> None:
    assert "usage" not in make().chunks(0, LO)[0]
    reply = make(usage=StreamOptions(include_usage=True))
    assert all(
        chunk["usage"] is None for chunk in (*reply.first_chunks(), reply.chunks(0, HEL)[0], reply.chunks(0, LO)[0])
    )
    written = reply.usage_chunk()
    assert written["choices"] == []
    assert written["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("make", [completion, chat])
def test_every_chunk_has_the_usage_so_far_if_asked(make: Any) -> None:
    reply = make(usage=StreamOptions(include_usage=True, continuous_usage_stats=True))
    reply.choices[0].answer.num_prompt_tokens = 5
    assert all(chunk["usage"]["completion_tokens"] == 0 for chunk in reply.first_chunks())
    assert [reply.chunks(0, output)[0]["usage"]["total_tokens"] for output in (HEL, LO)] == [6, 7]


def test_tokens_tell_of_themselves_only_if_asked() -> None:
    assert "tide" not in completion().chunks(0, HEL)[0]
    assert completion(exit_layers=True).chunks(0, HEL)[0]["tide"] == {"exit_layers": [30]}
    [token] = completion(tokens=True).chunks(0, HEL)[0]["tide"]["tokens"]
    decided = {"exit_layer": 30, "score": None, "audit": "verified", "gap": None, "mode": "full"}
    assert token == {"id": 1, "text": "Hel", **decided}
    whole = completion(exit_layers=True).whole([[HEL, LO]])["tide"]
    assert whole["exit_layers"] == [30, 12]
    assert (whole["layers_per_token"], whole["tokens_per_deep_pass"]) == (21.0, 2.0)


def test_logprobs_are_those_of_the_tokens_with_their_offsets() -> None:
    one = TokenOutput(1, "Hel", 30, logprob=-0.5, top_logprobs=((1, -0.5), (9, -1.5)))
    two = TokenOutput(2, "lo", 30, logprob=-0.1, top_logprobs=((2, -0.1),))
    reply = completion(logprobs=2)
    parts = [reply.chunks(0, RequestOutput("r", (token,)))[0]["choices"][0]["logprobs"] for token in (one, two)]
    assert parts[0] == {
        "tokens": ["<1>"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"<1>": -0.5, "<9>": -1.5}],
        "text_offset": [0],
    }
    assert parts[1]["text_offset"] == [3]
    [written] = chat(logprobs=1).chunks(0, RequestOutput("r", (two,)))[0]["choices"][0]["logprobs"]["content"]
    assert written == {
        "token": "<2>",
        "logprob": -0.1,
        "bytes": [60, 50, 62],
        "top_logprobs": [{"token": "<2>", "logprob": -0.1, "bytes": [60, 50, 62]}],
    }


def test_an_event_is_one_line_whatever_the_text_holds() -> None:
    text = "a\nb\r\n\u2028\x00é"
    event = sse_event(completion().chunks(0, RequestOutput("r", (TokenOutput(1, text, 3),)))[0])
    assert event.startswith(b"data: ")
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == text


# What may come in.


def test_defaults_are_openais() -> None:
    plain = CompletionRequest.model_validate({"prompt": "Say", "max_tokens": None, "temperature": None, "stop": "end"})
    assert (plain.params()["max_tokens"], plain.params()["temperature"]) == (16, 1.0)
    assert plain.params()["stop"] == ("end",)
    chat_body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Say"}]})
    assert (chat_body.params()["max_tokens"], chat_body.params()["temperature"]) == (None, 1.0)


async def test_parameters_reach_the_engine() -> None:
    engine = ScriptedEngine()
    sent = {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": 7, "stop": ["a", "b"], "logit_bias": {"9": -1.0}}
    assert (await call(engine, {"prompt": "Say", **sent})).status == 200
    expected = SamplingParams(
        max_tokens=3, temperature=0, top_p=0.5, seed=7, stop=("a", "b"), logit_bias={9: -1.0}, mode="full"
    )
    assert engine.asked == [("Say", expected)]


def test_messages_become_what_a_template_knows() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ]
    }
    assert [message.for_template() for message in ChatRequest.model_validate(body).messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


BAD = [
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 7.0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "7"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.0001}, "top_p"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": "x", "stop": [1]}, "stop.0"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "n": "2"}, "n"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "logprobs": 10_000}, "logprobs"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias"),
    ({"prompt": "x", "tide": {"exit_layer": True}}, "tide.exit_layer"),
    ({"prompt": "x", "tide": {"mode": "fst"}}, "tide.mode"),
    ({"prompt": "x", "tide": {"mode": "bounded", "epsilon": 0}}, "epsilon"),
    ({"prompt": "x", "tide": {"min_layers": -1}}, "min_layers"),
    ({"prompt": "x", "tide": {"timeout_s": 0}}, "timeout_s"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[str(body)[:60] for body, _ in BAD])
async def test_a_bad_value_is_400_and_names_its_field(body: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    reply = await call(engine, body)
    assert reply.status == 400
    error = reply.json["error"]
    assert set(error) == ENVELOPE
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param), "a union also names which of its kinds was looked at"
    assert param in error["message"]
    assert engine.asked == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'"x"', b"[" * 50_000, b'{"seed": ' + b"9" * 5000 + b"}"])
async def test_a_body_that_is_no_object_is_400_with_the_envelope(raw: bytes) -> None:
    reply = await call(ScriptedEngine(), raw)
    assert reply.status == 400
    assert set(reply.json["error"]) == ENVELOPE


async def test_an_error_repeats_no_input() -> None:
    for body in (
        {"prompt": {"secret": "words"}},
        {"prompt": 3, "tide": "secret"},
        {"prompt": "x", "stop": {"secret": 1}},
    ):
        reply = await call(ScriptedEngine(), body)
        assert reply.status == 400
        assert b"secret" not in reply.body


@pytest.mark.parametrize("both", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_text_to_ids_needs_one_of_prompt_and_messages(both: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="one of prompt and messages"):
        _ = TokenizeRequest.model_validate(both).engine_prompt


def test_a_request_cannot_be_changed_after_it_was_checked() -> None:
    request = CompletionRequest(prompt="x")
    with pytest.raises(ValidationError, match="frozen"):
        request.max_tokens = 3  # type: ignore[misc]


def test_what_openai_has_and_we_have_not_is_told_apart_from_what_nobody_has() -> None:
    for name, code in (("best_of", "unsupported"), ("best_off", "invalid_body")):
        with pytest.raises(ValidationError) as refused:
            CompletionRequest.model_validate({"prompt": "x", name: True})
        failure = invalid_body(refused.value.errors(), CompletionRequest.refused_names())
        assert (failure.status, failure.field, failure.code) == (400, name, code)


# How errors read.

FAILURES = [
    (RequestError("prompt", "9 tokens", "fewer than 8"), 400, "INVALID_ARGUMENT"),
    (UnauthenticatedError("a key is needed"), 401, "UNAUTHENTICATED"),
    (ForbiddenError("mode", "fast", "another"), 403, "PERMISSION_DENIED"),
    (NotServedError("model", "other", "tiny"), 404, "NOT_FOUND"),
    (TooLargeError("body", "more", "less"), 413, "RESOURCE_EXHAUSTED"),
    (DeadlineError("too long"), 408, "DEADLINE_EXCEEDED"),
    (EngineBusyError("secret count"), 429, "RESOURCE_EXHAUSTED"),
    (EngineDeadError("secret cause"), 503, "UNAVAILABLE"),
    (EngineError("secret cause"), 500, "INTERNAL"),
    (ConfigError("secret", 1, "x"), 500, "INTERNAL"),
    (ZeroDivisionError("secret cause"), 500, "INTERNAL"),
    (KeyError("secret"), 500, "INTERNAL"),
]


@pytest.mark.parametrize(("error", "status", "grpc_code"), FAILURES, ids=lambda value: type(value).__name__)
def test_every_failure_has_its_status_in_both_worlds_and_gives_no_internals_away(
    error: Exception, status: int, grpc_code: str
) -> None:
    failure = failure_of(error, "0123")
    assert (failure.status, failure.grpc_code) == (status, grpc_code)
    assert set(error_object(failure)["error"]) == ENVELOPE
    assert "secret" not in failure.message
    assert failure.is_server_error == (status >= 500) == ("0123" in failure.message)
    assert (failure.retry_after_s is not None) == (status in (429, 503))


def test_errors_are_told_apart_by_type_and_not_by_text() -> None:
    assert failure_of(ValueError("the queue is full; RequestError"), "id").status == 500


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("error", "status"), [each[:2] for each in FAILURES], ids=lambda value: type(value).__name__)
async def test_errors_before_the_first_token_become_a_status(
    error: Exception, status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)  # Serve's logger does not propagate once Serve has set it up
    try:
        reply = await call(ScriptedEngine(error), {**BODY, "stream": stream})
    finally:
        logger.removeHandler(caplog.handler)
    assert reply.status == status
    assert b"secret" not in reply.body
    assert b"Traceback" not in reply.body
    if status >= 500:
        [error_id] = {record.args for record in caplog.records if record.msg == "error %s"}
        assert isinstance(error_id, tuple)
        assert str(error_id[0]) in reply.json["error"]["message"]
        assert "secret" in caplog.text


# How an answer ends that breaks off.


@pytest.mark.parametrize(
    "failure",
    [
        ZeroDivisionError("secret"),
        RequestOutput("r", (), FinishReason.ERROR, None, EngineError("secret")),
        RequestOutput("r", (), FinishReason.ERROR),
        RequestOutput("r", (), FinishReason.ABORT),
    ],
    ids=["raised", "reported", "without a reason", "closed"],
)
async def test_an_error_in_the_middle_of_a_stream_is_an_event_and_no_done(failure: Any) -> None:
    reply = await call(ScriptedEngine(HEL, failure), {**BODY, "stream": True})
    assert reply.status == 200
    first, last = reply.events
    assert first["choices"][0]["text"] == "Hel"
    assert last["error"]["type"] == "server_error"
    assert b"secret" not in reply.body
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("script", [(HEL, FOREVER), (FOREVER,)], ids=["midway", "before the first token"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_its_request(script: Sequence[Any], stream: bool) -> None:
    engine, leave = ScriptedEngine(*script), asyncio.Event()
    request = asyncio.create_task(call(engine, {**BODY, "stream": stream}, leave=leave))
    await asyncio.wait_for(engine.waits_forever.wait(), timeout=60)
    leave.set()
    reply = await asyncio.wait_for(request, timeout=60)
    assert engine.num_open == 0
    assert reply.status == (200 if stream and len(script) == 2 else 499)


async def test_a_connection_lost_before_the_first_event_ends_its_request() -> None:
    engine, kept = ScriptedEngine(HEL, FOREVER), []
    stream = engine.stream
    engine.stream = lambda *args, **kwargs: kept.append(stream(*args, **kwargs)) or kept[0]  # type: ignore[method-assign]
    with pytest.raises(OSError, match="connection lost"):
        await call(engine, {**BODY, "stream": True}, broken=True)
    assert engine.num_open == 0, "only the garbage collector would have closed it"


async def test_a_cancelled_handler_ends_its_request() -> None:
    engine = ScriptedEngine(HEL, FOREVER)
    request = asyncio.create_task(call(engine, BODY))
    while not engine.num_open:
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert engine.num_open == 0


async def test_health_is_503_when_the_engine_is_dead() -> None:
    engine = ScriptedEngine()
    assert (await call(engine, path="/health", method="GET")).json == {"status": "ok"}
    engine.dead = True
    assert (await call(engine, path="/health", method="GET")).status == 503

"""Client and server meet in their messages: what one writes the other reads, with a tiny engine and no socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.keys import Caller
from tests.deploy.in_process import Context, Grpc, Http, all_of, make_service
from tide_client import openai_events
from tide_client.assembly import AnswerBuilder
from tide_client.requests import Options, request_of, tokenize_request_of
from tide_client.results import Answer, exit_stats_of, model_info_of, response_of
from tide_client.retry import DEFAULT_MAX_TOKENS, Retry
from tide_core.request import SamplingParams

CHAT = [{"role": "user", "content": "the cat"}]
OPTIONS: Options = {"max_tokens": 12, "ignore_eos": True, "mode": "verified", "threshold": 0.25}


async def over_grpc(service: Any, prompt: Any) -> Answer:
    builder, context = AnswerBuilder(), Context()
    for chunk in await all_of(Grpc(service).GenerateStream(request_of(prompt, OPTIONS, 30.0), context)):  # type: ignore[arg-type]
        builder.take(chunk)
    assert context.text == ""
    builder.end()
    return builder.answer


async def over_http(service: Any, prompt: Any) -> Answer:
    path, body = openai_events.request_of(prompt, OPTIONS, 30.0)
    reply = await Http(service).ask("POST", path, raw=body)
    assert reply.status == 200, reply.body
    builder = AnswerBuilder()
    events = openai_events.Events(builder)
    for line in reply.body.splitlines(keepends=True):
        events.take(line)
    return builder.answer


@pytest.mark.parametrize("prompt", ["the cat", CHAT], ids=["text", "chat"])
async def test_a_stream_is_the_same_over_both_ways(prompt: Any) -> None:
    service = make_service()
    with service.engine:
        grpc_answer, http_answer = await over_grpc(service, prompt), await over_http(service, prompt)
    assert len(grpc_answer.tokens) == 12
    assert {token.exit_layer for token in grpc_answer.tokens} == {1, 4}
    assert [token.id for token in grpc_answer.tokens] == [token.id for token in http_answer.tokens]
    assert (grpc_answer.text, grpc_answer.finish_reason) == (http_answer.text, http_answer.finish_reason)
    assert sum(http_answer.exits.tokens_per_layer.values()) == http_answer.usage.completion_tokens == 12
    assert grpc_answer.artefact_digest == http_answer.artefact_digest is not None


async def test_the_other_calls_are_read_as_they_are_written() -> None:
    service = make_service()
    with service.engine:
        whole = response_of(await Grpc(service).Generate(request_of("the cat", OPTIONS, 30.0), Context()))  # type: ignore[arg-type]
        info = model_info_of(Grpc(service)._model_info(Caller()))
        stats = exit_stats_of(await Grpc(service).GetExitStats(None, Context()))  # type: ignore[arg-type]
        models = await Http(service).ask("GET", "/v1/models")
    assert whole.usage.completion_tokens == stats.total_tokens == 12
    assert info.num_layers == stats.num_layers == openai_events.num_layers_of(models.body) == 4
    assert set(info.modes) == {"full", "verified", "bounded", "fast"}


async def test_a_refusal_over_http_is_read_in_its_own_words() -> None:
    service = make_service()
    with service.engine:
        path, body = openai_events.request_of("the cat", {"max_tokens": 0}, 30.0)
        reply = await Http(service).ask("POST", path, raw=body)
    assert reply.status == 400
    assert "max_tokens" in openai_events.error_of(reply.body)
    assert json.loads(body)["tide"] == {"tokens": True, "timeout_s": 30.0}


async def test_choices_and_calls_are_read_as_they_are_written() -> None:
    service = make_service()
    api: Any = Grpc(service)
    api.tool_parser = "hermes"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}}
    asked: Options = {"n": 2, "max_tokens": 100, "temperature": 1.0, "seed": 1, "tools": [tool], "mode": "full"}
    with service.engine:
        spaces = dict.fromkeys((await api.Tokenize(tokenize_request_of(" \n\t"), Context())).ids, -100.0)
        request = request_of(CHAT, {**asked, "tool_choice": tool, "logit_bias": spaces}, 30.0)
        whole = response_of(await api.Generate(request, Context()), 2)
        builder = AnswerBuilder.of(request)
        for chunk in await all_of(api.GenerateStream(request, Context())):
            builder.take(chunk)
    deltas = []
    while (delta := builder.next_delta()) is not None:
        deltas.append(delta)
    for index, (one, other) in enumerate(zip(whole.choices, builder.answer.choices, strict=True)):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason) == ("", "tool_calls")
        [made], [streamed] = one.tool_calls, other.tool_calls
        assert (made.name, made.arguments) == (streamed.name, streamed.arguments)
        assert json.loads(made.arguments).keys() <= {"a"}
        assert "".join(delta.arguments for delta in deltas if delta.choice == index) == made.arguments


@pytest.mark.parametrize("prompt", ["a b c", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("mode", ["full", "verified"])
async def test_an_answer_continued_from_any_token_is_the_rest_of_the_whole(prompt: Any, mode: str) -> None:
    service = make_service()
    request = request_of(prompt, {"max_tokens": 12, "ignore_eos": True, "mode": mode}, 30.0)
    with service.engine:
        api: Any = Grpc(service)
        whole = response_of(await api.Generate(request, Context()))
        retry = Retry(request, resume=True)
        ask = retry.needs_ids(1)
        assert ask is not None
        retry.take_ids(await api.Tokenize(ask, Context()))
        kept = {retry.num_kept(whole.tokens[:cut]) for cut in range(1, len(whole.tokens) + 1)} - {0}
        assert len(kept) > 3
        for num in kept:
            rest = response_of(await api.Generate(retry.next(whole.tokens[:num]), Context()))
            assert [token.id for token in rest.tokens] == [token.id for token in whole.tokens[num:]]
            assert [token.text for token in rest.tokens] == [token.text for token in whole.tokens[num:]]
            assert rest.finish_reason == whole.finish_reason


def test_the_servers_default_length_is_the_one_that_a_continued_request_counts_from() -> None:
    assert SamplingParams().max_tokens == DEFAULT_MAX_TOKENS

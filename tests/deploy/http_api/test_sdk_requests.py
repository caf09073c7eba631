"""Requests as the `openai` package makes them, sent to the application in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from deploy.http_api.api import build_api
from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import USAGE, ScriptedEngine
from tide_core.request import FinishReason, RequestOutput, TokenOutput

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
QUESTION: Any = [{"role": "user", "content": "Rome and Oslo?"}]
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Rome", "Oslo")
)


class Unit(StrEnum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Place(BaseModel):
    name: Literal["Rome", "Oslo"]
    unit: Unit


class Plan(BaseModel):
    """Its schema has `$defs`, `$ref`, `anyOf`, `enum`, `minItems` and `maxItems`."""

    stops: list[Place] = Field(min_length=1, max_length=2)
    note: bool | Literal["x"] | None
    home: Place | None


def sdk(api: Any) -> Any:
    from openai import AsyncOpenAI  # here: every process of the tests imports this file

    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=api))
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=client)


def scripted(text: str, size: int = 4) -> tuple[Any, ScriptedEngine]:
    """The package's client of a service whose answer is `text`."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    tokens = [
        TokenOutput(i, piece, 30, logprob=-0.5, top_logprobs=((i, -0.5), (9, -1))) for i, piece in enumerate(pieces)
    ]
    outputs = [RequestOutput("r", (token,)) for token in tokens[:-1]]
    engine = ScriptedEngine(*outputs, RequestOutput("r", (tokens[-1],), FinishReason.STOP, USAGE))
    service = Service(engine, model="tiny")  # type: ignore[arg-type]
    return sdk(build_api(service, playground=False, tool_parser="hermes")), engine


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture(scope="module")
def http(service: Service) -> Http:
    return Http(service, tool_parser="hermes")


@pytest.mark.parametrize("kind", ["chat", "response"])
async def test_a_nested_schema_of_the_package_is_followed_and_parsed(http: Http, kind: str) -> None:
    spaces = (await http.ask("POST", "/tokenize", {"prompt": "\n\t \r"})).json["tokens"]
    options: Any = {"model": "tiny", "temperature": 0, "extra_body": {"logit_bias": {str(one): -100 for one in spaces}}}
    client = sdk(http.api)
    if kind == "chat":
        parsed = await client.chat.completions.parse(**options, messages=QUESTION, max_tokens=200, response_format=Plan)
        plan = parsed.choices[0].message.parsed
    else:
        response = await client.responses.parse(**options, input="Where?", max_output_tokens=200, text_format=Plan)
        plan = response.output_parsed
    assert isinstance(plan, Plan)
    assert 1 <= len(plan.stops) <= 2


async def test_parallel_calls_are_streamed_and_their_results_sent_back() -> None:
    client, engine = scripted("Both. " + CALLS)
    asked: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 50, "tools": [TOOL]}
    async with client.chat.completions.stream(**asked, logprobs=True, top_logprobs=2) as events:
        kinds = [event.type async for event in events]
        message = (await events.get_final_completion()).choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert message.content == "Both. "
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Rome", "Oslo"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    await client.chat.completions.create(**{**asked, "messages": [*QUESTION, message, *results]})
    turns = engine.asked[-1][0].messages
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["arguments"] for call in turns[1]["tool_calls"]] == [{"city": "Rome"}, {"city": "Oslo"}]


@pytest.mark.parametrize("size", [3, 1000])
async def test_without_parallel_calls_only_the_first_one_is_returned(size: int) -> None:
    client, _ = scripted(CALLS, size)
    asked: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 50,
        "tools": [TOOL],
        "parallel_tool_calls": False,
    }
    [call] = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    async with client.chat.completions.stream(**asked) as events:
        choice = (await events.get_final_completion()).choices[0]
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Rome"]
    assert choice.finish_reason == "tool_calls"
    flat = {"type": "function", **TOOL["function"], "strict": False}
    response = await client.responses.create(
        model="tiny", input="Rome?", max_output_tokens=50, tools=[flat], parallel_tool_calls=False
    )
    assert [item.type for item in response.output] == ["function_call"]


async def test_log_probabilities_of_a_streamed_chat_are_those_of_the_whole_one() -> None:
    client, _ = scripted("Hello there")
    asked: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 50, "logprobs": True, "top_logprobs": 2}
    whole = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
    usage = {"include_usage": True}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=usage)]
    pieces = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
    assert [token for piece in pieces for token in piece] == whole
    assert len(whole) == 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 5


async def test_a_response_has_log_probabilities_where_they_are_included() -> None:
    client, engine = scripted("Hello there")
    asked: Any = {
        "model": "tiny",
        "input": "Hi",
        "max_output_tokens": 50,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = (await client.responses.create(**asked)).output[0].content[0].logprobs
    assert [token.logprob for token in whole] == [-0.5] * 3
    assert [len(token.top_logprobs) for token in whole] == [2] * 3
    assert engine.asked[0][1].logprobs == 2
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [token.logprob for event in deltas for token in event.logprobs] == [-0.5] * 3
    assert events[-1].response.output[0].content[0].logprobs == whole
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == 3
    plain = await client.responses.create(**{**asked, "include": ["reasoning.encrypted_content"]})
    assert plain.output[0].content[0].logprobs == []
    assert engine.asked[-1][1].logprobs is None


async def test_content_may_be_parts_of_text_in_every_way_clients_write_them() -> None:
    client, engine = scripted("Hello")
    turns: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": ["c", {"type": "input_text", "text": "d"}]},
    ]
    await client.chat.completions.create(model="tiny", messages=turns, max_tokens=50)
    await client.responses.create(
        model="tiny", input=[turns[0], turns[1], {"role": "user", "content": "cd"}], max_output_tokens=50
    )
    for prompt, _ in engine.asked:
        assert [turn["content"] for turn in prompt.messages] == ["ab", "no", "cd"]


BAD_PARTS = [
    ({"type": "image_url", "image_url": {"url": "x"}}, "not image_url"),
    ({"type": "text"}, "needs text"),
    ({"type": "refusal", "text": "x"}, "needs refusal"),
    ({}, "type and text"),
]


@pytest.mark.parametrize(("part", "problem"), BAD_PARTS, ids=[problem for _, problem in BAD_PARTS])
async def test_a_part_that_is_no_text_is_refused_with_its_place(part: Any, problem: str) -> None:
    from openai import BadRequestError

    client, engine = scripted("Hello")
    with pytest.raises(BadRequestError, match=problem) as caught:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])
    assert str(caught.value.param).startswith("messages.0.content")
    assert not engine.asked


async def test_values_that_stand_for_nothing_are_taken_as_vllm_takes_them() -> None:
    from openai import BadRequestError

    client, engine = scripted("Hello")
    more = {"top_k": -1, "documents": [], "structured_outputs": {"disable_any_whitespace": True}}
    await client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=50, logprobs=False, top_logprobs=0, extra_body=more
    )
    [(_, params)] = engine.asked
    assert (params.logprobs, params.top_k, params.grammar) == (None, 0, None)
    with pytest.raises(BadRequestError, match="structural_tag"):
        await client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=50, extra_body={"structured_outputs": {"structural_tag": "{}"}}
        )


async def test_the_tokens_of_a_chat_are_counted_with_its_tools_as_the_chat_runs_them(http: Http) -> None:
    chat = {"messages": QUESTION, "tools": [TOOL]}
    counted = (await http.ask("POST", "/tokenize", {**chat, "return_token_strs": True})).json
    ran = (await http.ask("POST", "/v1/chat/completions", {**chat, "max_tokens": 1})).json
    assert counted["count"] == ran["usage"]["prompt_tokens"]
    assert len(counted["token_strs"]) == counted["count"]
    open_end = await http.ask("POST", "/tokenize", {**chat, "add_generation_prompt": False})
    assert open_end.json["count"] < counted["count"]
    assert "x-tide-ignored" not in open_end.headers

"""OpenAI's Responses API over HTTP: items in, items out, whole and streamed, as the `openai` package's types are."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import FOREVER, HEL, LO, USAGE, ScriptedEngine, call
from tide_core.errors import EngineBusyError
from tide_core.request import FinishReason, RequestOutput, TokenOutput

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
DONE = {"response.completed", "response.incomplete", "response.failed"}


@functools.cache
def type_of_events() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent  # here: every process of the tests imports this file

    return TypeAdapter(ResponseStreamEvent)


def openai_response(data: Any) -> Any:
    from openai.types.responses import Response

    return Response.model_validate(data)


def engine_saying(text: str, size: int = 5, reason: FinishReason = FinishReason.STOP) -> ScriptedEngine:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    outputs = [RequestOutput("r", (TokenOutput(1, piece, 30),)) for piece in pieces[:-1]]
    return ScriptedEngine(*outputs, RequestOutput("r", (TokenOutput(2, pieces[-1], 12),), reason, USAGE))


async def asked(engine: ScriptedEngine, **body: Any) -> Any:
    return await call(engine, {"input": "Rome?", "max_output_tokens": 50, **body}, path=PATH, tool_parser="hermes")


def whole_of(reply: Any) -> dict[str, Any]:
    """A response that OpenAI's type accepts."""
    assert reply.status == 200, reply.body
    openai_response(reply.json)
    found: dict[str, Any] = reply.json
    return found


def events_of(reply: Any) -> list[dict[str, Any]]:
    """Events that OpenAI's types accept, named, numbered, and with one end."""
    assert reply.status == 200, reply.body
    events = []
    for index, block in enumerate(reply.body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == index
        found = type_of_events().validate_python(event)
        assert type(found).model_fields["type"].annotation.__args__ == (event["type"],)
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in DONE] == [events[-1]["type"]]
    return events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together from the events before the last."""
    items: list[dict[str, Any]] = []
    for event in events[:-1]:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
            case "content_part.added":
                assert items[event["output_index"]]["content"] == []
                items[event["output_index"]]["content"] = [event["part"]]
            case "output_text.delta":
                assert items[event["output_index"]]["id"] == event["item_id"]
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done":
                assert items[-1]["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert items[-1]["content"][0] == event["part"]
            case "function_call_arguments.delta":
                assert items[event["output_index"]]["id"] == event["item_id"]
                items[event["output_index"]]["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert items[-1]["arguments"] == event["arguments"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
    return items


def steady(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs each time."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    times = {"id", "created_at", "completed_at"}
    return {**{key: value for key, value in response.items() if key not in times}, "output": items}


# Whole responses.


async def test_a_response_has_the_text_the_usage_and_the_settings() -> None:
    engine = ScriptedEngine()
    response = whole_of(
        await asked(
            engine, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9, temperature=0.5, top_p=0.9
        )
    )
    assert openai_response(response).output_text == "Hello"
    assert response["id"].startswith("resp_")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    (item,) = response["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert response["instructions"] == "Be brief."
    assert response["metadata"] == {"a": "b"}
    assert (response["max_output_tokens"], response["temperature"], response["top_p"]) == (9, 0.5, 0.9)
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == ([], "auto", True)
    assert response["text"] == {"format": {"type": "text"}}
    assert response["tide"]["mode"] == "full"
    assert response["tide"]["tokens_per_layer"] == {"12": 1, "30": 1}
    chat, params = engine.asked[0]
    assert chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)


async def test_an_answer_cut_off_by_the_limit_is_incomplete() -> None:
    response = whole_of(await asked(engine_saying("Hello", reason=FinishReason.LENGTH)))
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_text_and_calls_are_items_in_their_order() -> None:
    text = "Let me look." + CALL + CALL.replace("Rome", "Oslo")
    response = whole_of(await asked(engine_saying(text), tools=[TOOL]))
    said, rome, oslo = response["output"]
    assert said["content"][0]["text"] == "Let me look."
    assert (rome["type"], rome["name"], rome["status"]) == ("function_call", "weather", "completed")
    assert rome["id"].startswith("fc_")
    assert rome["call_id"].startswith("call_")
    assert [json.loads(one["arguments"]) for one in (rome, oslo)] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({one[key] for one in (rome, oslo) for key in ("id", "call_id")}) == 4
    assert response["tools"] == [TOOL]


# The input.


async def test_calls_and_results_of_the_input_reach_the_template_as_in_a_chat() -> None:
    made = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    part = {"type": "input_text"}
    turns = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{**part, "text": "Ro"}, {**part, "text": "me?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}],
        },
        {**made, "id": "fc_1", "status": "completed"},
        {**made, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "dry"}]},
    ]
    engine = engine_saying("Sunny.")
    reply = await asked(engine, input=turns, tools=[TOOL])
    whole_of(reply)
    assert "x-tide-ignored" not in reply.headers
    chat_engine = engine_saying("Sunny.")
    chat_call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    function = {key: value for key, value in TOOL.items() if key != "type"}
    chat = {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Rome?"},
            {
                "role": "assistant",
                "content": "So:",
                "tool_calls": [{**chat_call, "id": "call_1"}, {**chat_call, "id": "call_2"}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "call_2", "content": "dry"},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 50,
    }
    assert (await call(chat_engine, chat, path="/v1/chat/completions", tool_parser="hermes")).status == 200
    assert engine.asked == chat_engine.asked


async def test_the_output_of_a_response_can_be_sent_back_as_it_is() -> None:
    first = whole_of(await asked(engine_saying("So: " + CALL), tools=[TOOL]))
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "sunny"}
    engine = engine_saying("Sunny.")
    turns = [{"role": "user", "content": "Rome?"}, *first["output"], result]
    reply = await asked(engine, input=turns, tools=[TOOL])
    whole_of(reply)
    assert "x-tide-ignored" not in reply.headers
    assert [message["role"] for message in engine.asked[0][0].messages] == ["user", "assistant", "tool"]


async def test_fields_that_change_nothing_are_accepted() -> None:
    reply = await asked(
        ScriptedEngine(),
        store=True,
        user="me",
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        truncation="auto",
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="x",
        background=False,
        stream_options={"include_obfuscation": False},
        previous_response_id=None,
        top_logprobs=0,
        text={"verbosity": "low"},
    )
    whole_of(reply)
    assert "x-tide-ignored" not in reply.headers


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no state"),
        ({"conversation": "conv_1"}, "conversation", "keeps no state"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "keeps no state"),
        ({"background": True}, "background", "keeps no state"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "templates"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "of type function"),
        ({"input": IMAGE}, "input.0.content.0", "not input_image"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "keeps no state"),
        ({"input": [{"type": "computer_call", "id": "c"}]}, "input.0", "not computer_call"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "none, auto, required"),
        ({"truncation": "middle"}, "truncation", "not supported"),
    ],
)
async def test_what_this_server_has_not_is_refused_by_name(body: Any, param: str, text: str) -> None:
    engine = ScriptedEngine()
    reply = await asked(engine, **body)
    assert reply.status == 400
    error = reply.json["error"]
    assert (error["param"], error["code"]) == (param, "unsupported")
    assert text in error["message"]
    assert not engine.asked


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]}, "input.0.arguments"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"n": 2}, "n"),
        ({"tide": {"mod": "full"}}, "tide.mod"),
    ],
)
async def test_a_bad_body_is_refused_with_the_place(body: Any, param: str) -> None:
    reply = await asked(ScriptedEngine(), **body)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


# Streams.


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_items_join_to_the_whole_response(size: int, reason: FinishReason) -> None:
    text = "So: " + CALL + CALL.replace("Rome", "Oslo") + "Done"
    body = {"tools": [TOOL], "tide": {"exit_layers": True}}
    whole = whole_of(await asked(engine_saying(text, size, reason), **body))
    events = events_of(await asked(engine_saying(text, size, reason), stream=True, **body))
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call", "message"]
    assert joined(events) == last["output"]
    assert steady(last) == steady(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("completed" if reason is FinishReason.STOP else "incomplete")
    assert len(whole["tide"]["exit_layers"]) == -(-len(text) // size)
    layers = [layer for event in events[:-1] for layer in event.get("tide", {}).get("exit_layers", ())]
    assert layers == whole["tide"]["exit_layers"][: len(layers)]
    assert layers


async def test_a_stream_begins_with_an_empty_response_and_has_no_done_line() -> None:
    reply = await asked(ScriptedEngine(), stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in reply.body
    events = events_of(reply)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert {event["response"]["id"] for event in events if "response" in event} == {events[-1]["response"]["id"]}


async def test_an_error_in_a_stream_ends_it_as_failed() -> None:
    events = events_of(await asked(ScriptedEngine(HEL, RuntimeError("secret")), stream=True))
    error, failed = events[-2:]
    assert error["type"] == "error"
    assert error["code"] == "internal_error"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert "secret" not in json.dumps(events)


async def test_an_error_before_the_first_token_sets_the_status() -> None:
    reply = await asked(ScriptedEngine(EngineBusyError("full")), stream=True)
    assert reply.status == 429
    assert reply.json["error"]["code"] == "engine_busy"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    engine, leave = ScriptedEngine(HEL, FOREVER, LO), asyncio.Event()
    body = {"input": "x", "stream": stream, "max_output_tokens": 9}
    task = asyncio.create_task(call(engine, body, path=PATH, leave=leave))
    await asyncio.wait_for(engine.waits_forever.wait(), 60)
    assert engine.num_open == 1
    leave.set()
    await asyncio.wait_for(task, 60)
    assert engine.num_open == 0


# With an engine.


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture(scope="module")
def http(service: Service) -> Http:
    return Http(service, tool_parser="hermes")


async def test_a_response_has_the_text_of_the_same_chat(http: Http) -> None:
    options = {"temperature": 0, "ignore_eos": True}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick brown"}]
    chat = await http.ask("POST", "/v1/chat/completions", {"messages": turns, "max_tokens": 8, **options})
    body = {"instructions": "Be brief.", "input": "the quick brown", "max_output_tokens": 8, **options}
    response = whole_of(await http.ask("POST", PATH, body))
    assert response["output"][0]["content"][0]["text"] == chat.json["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat.json["usage"]["prompt_tokens"]
    assert response["status"] == "incomplete"
    events = events_of(await http.ask("POST", PATH, {**body, "stream": True}))
    assert joined(events) == events[-1]["response"]["output"]
    assert steady(events[-1]["response"])["output"] == steady(response)["output"]


async def test_structured_output_follows_its_schema(http: Http) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    spaces = (await http.ask("POST", "/tokenize", {"prompt": " \n\t"})).json["tokens"]
    body = {
        "input": "A number?",
        "temperature": 0,
        "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}},
        "logit_bias": {str(one): -100 for one in spaces},
    }
    response = whole_of(await http.ask("POST", PATH, body))
    assert json.loads(response["output"][0]["content"][0]["text"])["n"] in (1, 2)
    assert response["text"]["format"]["schema"] == schema


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_required_call_is_made_by_any_model(http: Http, choice: Any) -> None:
    spaces = (await http.ask("POST", "/tokenize", {"prompt": " \n\t"})).json["tokens"]
    body = {
        "input": "Rome?",
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 150,
        "logit_bias": {str(one): -100 for one in spaces},
    }
    response = whole_of(await http.ask("POST", PATH, body))
    (made,) = response["output"]
    assert (made["type"], made["name"]) == ("function_call", "weather")
    assert json.loads(made["arguments"])["city"] in ("Rome", "Oslo")
    assert response["tool_choice"] == choice
    assert response["parallel_tool_calls"] is False

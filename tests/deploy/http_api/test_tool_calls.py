"""Tools over HTTP: calls in whole and streamed answers, results in the history, calls that are required."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import USAGE, ScriptedEngine, call
from tide_core.request import FinishReason, RequestOutput, TokenOutput

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
BODY = {"messages": [{"role": "user", "content": "Rome?"}], "tools": [TOOL], "max_tokens": 50}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def engine_saying(text: str, size: int = 5) -> ScriptedEngine:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    outputs = [RequestOutput("r", (TokenOutput(1, piece, 30),)) for piece in pieces[:-1]]
    return ScriptedEngine(*outputs, RequestOutput("r", (TokenOutput(2, pieces[-1], 30),), FinishReason.STOP, USAGE))


async def asked(engine: ScriptedEngine, **more: Any) -> Any:
    return await call(engine, {**BODY, **more}, path=CHAT, tool_parser="hermes")


async def test_a_call_is_in_the_message_and_not_in_its_text() -> None:
    choice = (await asked(engine_saying(CALL))).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (made,) = choice["message"]["tool_calls"]
    assert made["type"] == "function"
    assert made["function"]["name"] == "weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Rome", "days": 2}


async def test_text_before_a_call_is_content() -> None:
    message = (await asked(engine_saying("Let me look." + CALL))).json["choices"][0]["message"]
    assert message["content"] == "Let me look."
    assert len(message["tool_calls"]) == 1


async def test_an_answer_without_a_call_is_text_as_it_was() -> None:
    choice = (await asked(engine_saying("It is <tool> time, a < b"))).json["choices"][0]
    assert choice["message"]["content"] == "It is <tool> time, a < b"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_calls_join_to_the_whole_ones(size: int) -> None:
    text = "So: " + CALL + CALL.replace("Rome", "Oslo")
    whole = (await asked(engine_saying(text))).json["choices"][0]["message"]
    events = (await asked(engine_saying(text, size), stream=True, tide={"exit_layers": True})).events
    content, calls, layers = "", {}, 0
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        layers += len(event.get("tide", {}).get("exit_layers", ()))
        for piece in delta.get("tool_calls", ()):
            mine = calls.setdefault(piece["index"], {"arguments": ""})
            mine["arguments"] += piece["function"]["arguments"]
            if "id" in piece:
                mine |= {"id": piece["id"], "name": piece["function"]["name"]}
    assert content == whole["content"] == "So: "
    assert [mine["name"] for mine in calls.values()] == ["weather", "weather"]
    assert len({mine["id"] for mine in calls.values()}) == 2
    expected = [one["function"]["arguments"] for one in whole["tool_calls"]]
    assert [mine["arguments"] for mine in calls.values()] == expected
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert layers == -(-len(text) // size), "every token has its exit layer, held back or not"


async def test_with_the_choice_none_nothing_is_a_call() -> None:
    message = (await asked(engine_saying(CALL), tool_choice="none")).json["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message


async def test_calls_and_results_of_the_history_reach_the_template() -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *BODY["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    engine = engine_saying("Sunny.")
    assert (await asked(engine, messages=turns)).status == 200
    chat = engine.asked[0][0]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert chat.messages[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    assert chat.tools[0]["function"]["name"] == "weather"


async def test_a_format_whose_marker_is_a_special_token_is_read_from_text_that_shows_it() -> None:
    engine = engine_saying('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]')
    reply = await call(engine, BODY, path=CHAT, tool_parser="mistral")
    assert reply.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert engine.asked[0][1].skip_special_tokens is False


async def test_tools_for_a_model_without_a_known_format_are_refused_with_the_name_of_the_setting() -> None:
    reply = await call(ScriptedEngine(), BODY, path=CHAT)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "tools"
    assert "tool_parser" in reply.json["error"]["message"]


async def test_a_required_call_leaves_no_place_for_another_structure() -> None:
    reply = await asked(ScriptedEngine(), tool_choice="required", response_format={"type": "json_object"})
    assert reply.status == 400
    assert reply.json["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_required_call_is_made_by_any_model(choice: Any) -> None:
    service = make_service()
    try:
        http = Http(service, tool_parser="hermes")
        spaces = (await http.ask("POST", "/tokenize", {"prompt": " \n\t"})).json["tokens"]
        body = {**BODY, "tool_choice": choice, "max_tokens": 150, "temperature": 0, "parallel_tool_calls": False}
        reply = await http.ask("POST", CHAT, {**body, "logit_bias": {str(one): -100 for one in spaces}})
        assert reply.status == 200, reply.json
        found = reply.json["choices"][0]
        (made,) = found["message"]["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        assert made["function"]["name"] == "weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        assert found["finish_reason"] == "tool_calls"
    finally:
        service.engine.close()

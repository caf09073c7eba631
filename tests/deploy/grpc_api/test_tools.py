"""Tools over gRPC: calls in whole and streamed answers, calls and results in the history, calls that are required."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from deploy.failures import StatusSetError
from deploy.service import Service
from tests.deploy.http_api.test_tool_calls import CALL, TOOL, engine_saying
from tests.deploy.in_process import Context, Grpc, all_of, make_service
from tests.deploy.scripted import ScriptedEngine
from tide.v1 import tide_pb2 as pb

FUNCTION: Any = TOOL["function"]
WEATHER = pb.Tool(name="weather", description="The weather of a city", parameters=json.dumps(FUNCTION["parameters"]))
ASKED = pb.ChatMessage(role="user", content="Rome?")
NAMED = pb.ToolChoice(name="weather")
REQUIRED, NONE = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), pb.ToolChoice(mode=pb.TOOL_MODE_NONE)


def request(*tools: pb.Tool, turns: Any = (ASKED,), **values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=turns, tools=tools or (WEATHER,)), **values)


def api_of(engine: ScriptedEngine, tool_parser: str | None = "hermes") -> Any:
    api = Grpc(Service(engine, model="tiny"))  # type: ignore[arg-type]
    api.tool_parser = tool_parser
    return api


async def test_a_call_is_in_the_response_and_not_in_its_text() -> None:
    reply = await api_of(engine_saying("Let me look." + CALL)).Generate(request(), Context())
    assert reply.text == "Let me look."
    (made,) = reply.tool_calls
    assert made.name == "weather"
    assert made.id.startswith("call_")
    assert json.loads(made.arguments) == {"city": "Rome", "days": 2}
    assert reply.final.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert "".join(token.text for token in reply.tokens) == "Let me look." + CALL, "tokens are as the model wrote them"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_pieces_join_to_the_whole_calls(size: int) -> None:
    text = "So: " + CALL + CALL.replace("Rome", "Oslo")
    whole = await api_of(engine_saying(text)).Generate(request(n=2), Context())
    chunks = await all_of(api_of(engine_saying(text, size)).GenerateStream(request(n=2), Context()))
    for index, expected in enumerate([whole, *whole.other_choices]):
        content, calls = "", {}
        for delta in (delta for chunk in chunks if chunk.choice == index for delta in chunk.deltas):
            content += delta.content
            if delta.HasField("tool_call"):
                piece = delta.tool_call
                mine = calls.setdefault(piece.index, pb.ToolCall(id=piece.id, name=piece.name))
                assert mine.id == piece.id or not piece.id, "the first piece alone has the id"
                mine.arguments += piece.arguments
        assert content == expected.text == "So: "
        assert [(call.name, call.arguments) for call in calls.values()] == [
            (call.name, call.arguments) for call in expected.tool_calls
        ]
        assert len({call.id for call in calls.values()}) == 2
    assert [chunk.final.finish_reason for chunk in chunks if chunk.HasField("final")] == [
        pb.FINISH_REASON_TOOL_CALLS
    ] * 2


async def test_without_parallel_calls_only_the_first_one_is_returned() -> None:
    text, asked = CALL + CALL.replace("Rome", "Oslo"), request(parallel_tool_calls=False)
    [made] = (await api_of(engine_saying(text)).Generate(asked, Context())).tool_calls
    assert json.loads(made.arguments)["city"] == "Rome"
    chunks = await all_of(api_of(engine_saying(text, 7)).GenerateStream(asked, Context()))
    assert {delta.tool_call.index for chunk in chunks for delta in chunk.deltas if delta.HasField("tool_call")} == {0}
    assert "".join(token.text for chunk in chunks for token in chunk.tokens) == text, (
        "tokens are as the model wrote them"
    )


@pytest.mark.parametrize("values", [{"tool_choice": NONE}, {"chat": pb.Chat(messages=[ASKED])}])
async def test_where_nothing_may_be_called_all_is_text(values: Any) -> None:
    asked = request(**{key: value for key, value in values.items() if key != "chat"})
    if "chat" in values:
        asked.chat.CopyFrom(values["chat"])
    engine = engine_saying(CALL)
    reply = await api_of(engine).Generate(asked, Context())
    assert (reply.text, list(reply.tool_calls)) == (CALL, [])
    assert reply.final.finish_reason == pb.FINISH_REASON_STOP
    chunks = await all_of(api_of(engine_saying(CALL)).GenerateStream(asked, Context()))
    assert [delta for chunk in chunks for delta in chunk.deltas] == []


async def test_calls_and_results_of_the_history_reach_the_template() -> None:
    made = pb.ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}')
    cut = pb.ToolCall(name="weather", arguments='{"city": "Ro')
    turns = [
        ASKED,
        pb.ChatMessage(role="assistant", tool_calls=[made, cut]),
        pb.ChatMessage(role="tool", tool_call_id="call_1", content="sunny"),
    ]
    engine = engine_saying("Sunny.")
    await api_of(engine).Generate(request(turns=turns), Context())
    chat = engine.asked[0][0]
    assert chat.messages[1]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    assert chat.messages[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    assert chat.tools == (TOOL,)


async def test_a_format_whose_marker_is_a_special_token_is_read_from_text_that_shows_it() -> None:
    engine = engine_saying('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]')
    reply = await api_of(engine, "mistral").Generate(request(), Context())
    assert reply.tool_calls[0].name == "weather"
    assert engine.asked[0][1].skip_special_tokens is False


REFUSED = [
    (request(pb.Tool(name="a b")), "chat.tools[0].name"),
    (request(WEATHER, pb.Tool(name="f", parameters="{")), "chat.tools[1].parameters"),
    (request(pb.Tool(name="f", parameters="[]")), "chat.tools[0].parameters"),
    (request(*[WEATHER] * 1025), "chat.tools"),
    (request(tool_choice=pb.ToolChoice(mode=77)), "tool_choice.mode"),
    (request(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, name="weather")), "tool_choice"),
    (request(tool_choice=pb.ToolChoice(name="other")), "tool_choice"),
    (pb.GenerateRequest(prompt="x", tool_choice=REQUIRED), "tool_choice"),
    (request(tool_choice=NAMED, sampling_params=pb.SamplingParams(regex="a")), "tool_choice"),
]


@pytest.mark.parametrize(("message", "field"), REFUSED, ids=[f"{case[1]}-{at}" for at, case in enumerate(REFUSED)])
async def test_tools_that_cannot_be_are_refused_by_their_field(message: pb.GenerateRequest, field: str) -> None:
    for method in ("Generate", "GenerateStream"):
        context = Context()
        reply = getattr(api_of(ScriptedEngine()), method)(message, context)
        with pytest.raises(StatusSetError):
            await (reply if method == "Generate" else anext(reply))
        assert context.status is grpc.StatusCode.INVALID_ARGUMENT
        assert context.text.startswith(f"{field}:")


async def test_tools_for_a_model_without_a_known_format_are_refused_with_the_name_of_the_setting() -> None:
    context = Context()
    with pytest.raises(StatusSetError):
        await api_of(ScriptedEngine(), None).Generate(request(), context)
    assert "tool_parser" in context.text


async def test_a_required_call_is_made_by_any_model_and_tools_count_in_the_prompt() -> None:
    service = make_service()
    api: Any = Grpc(service)
    api.tool_parser = "hermes"
    with service.engine:
        spaces = (await api.Tokenize(pb.TokenizeRequest(text=" \n\t"), Context())).ids
        params = pb.SamplingParams(max_tokens=150, logit_bias=dict.fromkeys(spaces, -100.0))
        for choice in (REQUIRED, NAMED):
            asked = request(tool_choice=choice, parallel_tool_calls=False, sampling_params=params)
            reply = await api.Generate(asked, Context())
            (made,) = reply.tool_calls
            assert made.name == "weather"
            assert json.loads(made.arguments)["city"] in ("Rome", "Oslo")
            assert reply.text == ""
            assert reply.final.finish_reason == pb.FINISH_REASON_TOOL_CALLS
            ids = (await api.Tokenize(pb.TokenizeRequest(chat=asked.chat), Context())).ids
            assert reply.final.usage.prompt_tokens == len(ids)

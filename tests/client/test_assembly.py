"""Choices and tool calls put together from a stream: each choice ends once, and no piece is returned twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.scripted import FINAL
from tide.v1 import tide_pb2 as pb
from tide_client import BadValueError, BrokenStreamError, Delta, ToolCall
from tide_client.assembly import AnswerBuilder
from tide_client.requests import request_of, tokenize_request_of
from tide_client.results import response_of
from tide_client.retry import Retry

pytestmark = pytest.mark.unit

CHAT = [{"role": "user", "content": "Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": PARAMETERS}}


def chunk(sequence: int, choice: int = 0, *ids: int, ends: bool = False, deltas: Any = ()) -> pb.GenerateChunk:
    tokens = [pb.Token(id=one, text=f"<{one}>", exit_layer=1, mode=pb.MODE_VERIFIED) for one in ids]
    final = FINAL if ends else None
    return pb.GenerateChunk(request_id="r", sequence=sequence, choice=choice, tokens=tokens, final=final, deltas=deltas)


def text(content: str) -> pb.Delta:
    return pb.Delta(content=content)


def call(index: int, arguments: str = "", *, id: str = "", name: str = "") -> pb.Delta:
    return pb.Delta(tool_call=pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments))


def taken(builder: AnswerBuilder) -> list[Any]:
    found = []
    while (token := builder.next_token()) is not None:
        found.append((token.choice, token.id))
    return found


def pieces(builder: AnswerBuilder) -> list[Delta]:
    found = []
    while (delta := builder.next_delta()) is not None:
        found.append(delta)
    return found


def test_mixed_chunks_become_the_choices_that_they_name() -> None:
    builder = AnswerBuilder(3)
    for one in (
        chunk(0, 0, 1),
        chunk(1, 2, 7),
        chunk(2, 1, 4),
        chunk(3, 2, 8, ends=True),
        chunk(4, 0, 2, ends=True),
    ):
        builder.take(one)
        assert not builder.is_whole
    builder.take(chunk(5, 1, ends=True))
    assert taken(builder) == [(0, 1), (2, 7), (1, 4), (2, 8), (0, 2)]
    answer = builder.answer
    assert [choice.text for choice in answer.choices] == ["<1><2>", "<4>", "<7><8>"]
    assert answer.choices[0] is answer
    assert [choice.others for choice in answer.others] == [(), ()]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (chunk(2, 0, 3), "choice 0 goes on after its final message"),
        (chunk(2, 0, ends=True), "choice 0 goes on after its final message"),
        (chunk(2, 2, 3), "choice 2 came where 2 were asked for"),
        (chunk(3, 1, 3), "chunk 3 came where 2 was next"),
        (None, "the stream ended after 2 tokens without a final message"),
    ],
)
def test_a_choice_that_ends_twice_or_never_or_was_not_asked_for_is_broken(last: Any, expected: str) -> None:
    builder = AnswerBuilder(2)
    builder.take(chunk(0, 0, 1, ends=True))
    builder.take(chunk(1, 1, 2))
    if last is None:
        builder.end()
    else:
        builder.take(last)
    with pytest.raises(BrokenStreamError, match=expected):
        _ = builder.answer


def test_replayed_choices_return_no_token_twice_in_whatever_order_they_come() -> None:
    builder = AnswerBuilder(2)
    for one in (chunk(0, 0, 1), chunk(1, 1, 5), chunk(2, 0, 2, ends=True)):
        builder.take(one)
    builder.restart(0)
    for one in (chunk(0, 0, 1, 2), chunk(1, 1, 5, 6, ends=True)):
        builder.take(one)
        assert not builder.is_whole, "a choice that had ended must end again"
    builder.take(chunk(2, 0, ends=True))
    assert taken(builder) == [(0, 1), (1, 5), (0, 2), (1, 6)]
    assert [choice.text for choice in builder.answer.choices] == ["<1><2>", "<5><6>"]


def test_a_replayed_choice_that_goes_another_way_is_broken() -> None:
    builder = AnswerBuilder(2)
    builder.take(chunk(0, 0, 1))
    builder.take(chunk(1, 1, 5))
    builder.restart(0)
    builder.take(chunk(0, 1, 1))
    with pytest.raises(BrokenStreamError, match="has token 1 where 5 was received"):
        _ = builder.answer


def test_deltas_are_content_and_calls_and_the_answer_has_them_whole() -> None:
    builder = AnswerBuilder(reads_calls=True)
    builder.take(chunk(0, 0, 1, deltas=[text("So"), text(": ")]))
    builder.take(chunk(1, 0, 2))
    builder.take(chunk(2, 0, 3, deltas=[call(0, id="a", name="weather"), call(0, '{"city"'), call(0, ': "Rome"}')]))
    builder.take(chunk(3, 0, 4, ends=True, deltas=[call(1, id="b", name="time"), call(1, "{}")]))
    assert pieces(builder)[:4] == [
        Delta(0, "So"),
        Delta(0, ": "),
        Delta(0, call_index=0, call_id="a", name="weather"),
        Delta(0, call_index=0, arguments='{"city"'),
    ]
    assert builder.answer.text == "So: "
    assert builder.answer.tool_calls == (ToolCall("a", "weather", '{"city": "Rome"}'), ToolCall("b", "time", "{}"))
    assert len(builder.answer.tokens) == 4


def test_without_tools_the_deltas_are_the_texts_of_the_tokens() -> None:
    builder = AnswerBuilder(2)
    for one in (chunk(0, 0, 1), chunk(1, 1, 5, 6, ends=True), chunk(2, 0, ends=True)):
        builder.take(one)
    assert pieces(builder) == [Delta(0, "<1>"), Delta(1, "<5>"), Delta(1, "<6>")]


@pytest.mark.parametrize("cut", range(1, 4))
def test_replayed_calls_return_no_piece_twice_and_keep_their_first_id(cut: int) -> None:
    def attempt(call_id: str) -> list[pb.GenerateChunk]:
        return [
            chunk(0, 0, 1, deltas=[text("So")]),
            chunk(1, 0, 2, deltas=[text(": "), call(0, id=call_id, name="weather"), call(0, '{"ci')]),
            chunk(2, 0, 3, deltas=[call(0, 'ty": 1')]),
            chunk(3, 0, 4, ends=True, deltas=[call(0, "}")]),
        ]

    builder = AnswerBuilder(reads_calls=True)
    for one in attempt("first")[:cut]:
        builder.take(one)
    before = pieces(builder)
    builder.restart(0)
    again = attempt("second")
    whole = [delta for one in again for delta in one.deltas]  # the pieces are cut in another way
    builder.take(chunk(0, 0, 1, 2, 3, deltas=whole[:3]))
    builder.take(chunk(1, 0, 4, ends=True, deltas=whole[3:]))
    found = [*before, *pieces(builder)]
    assert "".join(delta.content for delta in found) == builder.answer.text == "So: "
    assert "".join(delta.arguments for delta in found) == '{"city": 1}'
    call_id = "first" if cut > 1 else "second"
    assert [delta.call_id for delta in found if delta.call_id] == [call_id]
    assert builder.answer.tool_calls == (ToolCall(call_id, "weather", '{"city": 1}'),)


def test_a_call_that_goes_on_before_it_began_is_broken() -> None:
    builder = AnswerBuilder(reads_calls=True)
    builder.take(chunk(0, 0, 1, deltas=[call(0, "{}")]))
    with pytest.raises(BrokenStreamError, match="call 0 goes on before it began"):
        _ = builder.answer


def test_a_whole_response_must_have_the_choices_that_were_asked_for() -> None:
    reply = pb.GenerateResponse(text="a", final=FINAL, other_choices=[pb.Choice(index=1, text="b", final=FINAL)])
    assert [choice.text for choice in response_of(reply, 2).choices] == ["a", "b"]
    with pytest.raises(BrokenStreamError, match="2 choices where 3 were asked for"):
        response_of(reply, 3)


OF_TOOLS = {"prompt": CHAT, "tools": [TOOL]}


@pytest.mark.parametrize(
    "values",
    [{"n": 2}, {"json_schema": {}}, {"regex": "a+"}, {"choices": ["a"]}, {"grammar": "start: /a/"}, OF_TOOLS],
    ids=lambda values: min(values),
)
def test_what_an_answer_cannot_be_continued_with_is_replayed(values: dict[str, Any]) -> None:
    tokens = AnswerBuilder()
    tokens.take(chunk(0, 0, 1, 2, 3))
    options = {name: value for name, value in values.items() if name != "prompt"}
    retry = Retry(request_of(values.get("prompt", "Say"), options, 9.0), resume=True)  # type: ignore[arg-type]
    assert retry.can_follow(tokens.tokens)
    assert retry.num_kept(tokens.tokens) == 0
    assert Retry(request_of("Say", {"n": 1}, 9.0), resume=True).num_kept(tokens.tokens) == 2


def test_tools_are_written_as_openai_has_them() -> None:
    made = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": 1}'}}
    turns: Any = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [made, ToolCall("b", "time", "{}")]},
        {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "sunny"},
    ]
    request = request_of(turns, {"tools": [TOOL], "tool_choice": "required", "n": 2, "parallel_tool_calls": False}, 9.0)
    assert [(one.id, one.name, one.arguments) for one in request.chat.messages[1].tool_calls] == [
        ("a", "weather", '{"city": 1}'),
        ("b", "time", "{}"),
    ]
    assert (request.chat.messages[2].tool_call_id, request.chat.messages[2].name) == ("a", "weather")
    (tool,) = request.chat.tools
    assert (tool.name, tool.description) == ("weather", "Now")
    assert '"city"' in tool.parameters
    assert request.tool_choice.mode == pb.TOOL_MODE_REQUIRED
    assert (request.n, request.HasField("parallel_tool_calls"), request.parallel_tool_calls) == (2, True, False)
    named = request_of(CHAT, {"tools": [TOOL], "tool_choice": TOOL}, 9.0)
    assert named.tool_choice.name == "weather"
    assert tokenize_request_of(CHAT, [TOOL]).chat == named.chat


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("Say", {"tools": [TOOL]}, "tools are given, expected a chat"),
        (CHAT, {"tools": [{"name": "weather"}]}, r"tools\[0\] is"),
        (CHAT, {"tools": [{"function": {"name": "f", "params": {}}}]}, "'params', expected name"),
        (CHAT, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice is 'always', expected auto"),
        ([{"role": "user", "content": "x", "tool_calls": [TOOL]}], {}, "message 0 has content, role, tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, r"message 0, tool_calls\[0\] is"),
        ([{"role": "assistant"}], {}, "message 0 has role"),
    ],
)
def test_tools_that_cannot_be_sent_are_refused_by_name(prompt: Any, options: Any, expected: str) -> None:
    with pytest.raises(BadValueError, match=expected):
        request_of(prompt, options, 9.0)

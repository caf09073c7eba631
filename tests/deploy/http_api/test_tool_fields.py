"""Tools in the bodies of chats: what is taken, what is refused and by which name, and what the chat template gets."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from deploy.http_api.ignored_fields import without_ignored
from deploy.http_api.tool_fields import ChatTools, MessageTools
from tests.factories import tiny_tokenizer
from tide_core.errors import RequestError

pytestmark = pytest.mark.unit

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": None}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now", "parameters": PARAMETERS, "strict": True},
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
TEMPLATE = (
    "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | list | join(',') }}) {% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>"
    "{% endfor %}{% endfor %}{{ m.tool_call_id }} {% endfor %}"
)


class Message(MessageTools):
    role: Literal["user", "assistant", "tool"]
    content: str | None = None

    def plain(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content or "", **self.tool_fields(self.role)}


class Request(ChatTools):
    messages: list[Message]


def read(strict: bool = True, **body: Any) -> Request:
    cleaned, _ = without_ignored(Request, {"messages": [], **body}, strict=strict)
    return Request.model_validate(cleaned)


def first_error(**body: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        read(**body)
    error = caught.value.errors(include_url=False)[0]
    return ".".join(str(part) for part in error["loc"]), error["msg"]


@pytest.mark.parametrize(
    ("body", "reads_calls", "forced", "one_call"),
    [
        ({}, False, [], False),
        ({"tools": []}, False, [], False),
        ({"tools": None, "tool_choice": None}, False, [], False),
        ({"tools": [], "tool_choice": "auto"}, False, [], False),
        ({"tool_choice": "none"}, False, [], False),
        ({"tools": [WEATHER, TIME]}, True, [], False),
        ({"tools": [WEATHER, TIME], "tool_choice": "auto"}, True, [], False),
        ({"tools": [WEATHER, TIME], "tool_choice": "none"}, False, [], False),
        ({"tools": [WEATHER, TIME], "tool_choice": "required"}, True, ["get_weather", "get_time"], False),
        ({"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False}, True, ["get_time"], True),
        (
            {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
            True,
            ["get_time"],
            True,
        ),
    ],
)
def test_the_plan_says_whether_calls_are_read_and_which_are_forced(
    body: dict[str, Any], reads_calls: bool, forced: list[str], one_call: bool
) -> None:
    plan = read(**body).tool_plan()
    assert (plan.reads_calls, [tool.name for tool in plan.forced], plan.one_call) == (
        reads_calls,
        forced,
        one_call,
    )
    assert (plan.template_tools is None) == (not body.get("tools"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}])
@pytest.mark.parametrize("tools", [[], None])
def test_a_forced_call_needs_tools(choice: Any, tools: Any) -> None:
    with pytest.raises(RequestError, match="tools as well") as caught:
        read(tools=tools, tool_choice=choice).tool_plan()
    assert caught.value.field == "tool_choice"


def test_a_choice_of_a_tool_that_is_not_there_is_refused_with_those_that_are() -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(RequestError, match=r"got 'other', expected one of the tools \(get_weather, get_time\)"):
        read(tools=[WEATHER, TIME], tool_choice=choice).tool_plan()


@pytest.mark.parametrize("choice", ["any", {"type": "allowed_tools"}, {"function": {"name": "f"}}])
def test_an_unknown_choice_is_refused_with_the_known_ones(choice: Any) -> None:
    place, message = first_error(tools=[TIME], tool_choice=choice)
    assert place == "tool_choice"
    assert "none, auto, required or" in message


@pytest.mark.parametrize("name", ["", "two words", 'a"b', "a{b", "<tag>", "x" * 257])
def test_a_name_that_no_format_can_write_is_refused(name: str) -> None:
    assert first_error(tools=[{"type": "function", "function": {"name": name}}])[0] == "tools.0.function.name"


def test_tools_of_other_types_are_refused() -> None:
    assert first_error(tools=[{"type": "web_search", "function": TIME["function"]}])[0] == "tools.0.type"


def test_templates_get_tools_with_parameters_and_without_what_concerns_the_server() -> None:
    assert read(tools=[WEATHER, TIME]).tool_plan().template_tools == [
        {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
    ]


def test_a_history_of_calls_and_results_fills_a_chat_template() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    request = read(tools=[WEATHER, TIME], messages=messages)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    text = tokenizer.apply_chat_template(
        [message.plain() for message in request.messages], tools=request.tool_plan().template_tools, tokenize=False
    )
    assert text == ("get_weather(city) get_time() user:Weather? assistant:get_weather<city=Köln> tool:sunnycall_1 ")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        (' {"a": 1}\n', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": ', {}),
        ("{'a': 1}", {}),
        ("get_weather", {}),
        ("[1]", {}),
        ("5", {}),
        ('{"a": NaN}', {}),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", {}),
    ],
)
def test_arguments_in_the_history_become_objects(arguments: Any, wanted: dict[str, Any]) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (message,) = read(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.plain()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": wanted}}
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("\ud800", "valid Unicode"),
        ([1], "dictionary"),
    ],
)
def test_arguments_that_are_no_object_are_refused_by_their_place(arguments: Any, problem: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    place, message = first_error(messages=[{"role": "user"}, {"role": "assistant", "tool_calls": [CALL, call]}])
    assert place == "messages.1.tool_calls.1.function.arguments"
    assert problem in message


def test_a_refusal_does_not_repeat_the_arguments() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": ["hunter2"]}}
    assert "hunter2" not in first_error(messages=[{"role": "assistant", "tool_calls": [call]}])[1]


def test_fields_of_tools_that_belong_to_another_role_are_left_out() -> None:
    given = {"tool_calls": [CALL], "tool_call_id": "call_1", "name": "x", "content": "y"}
    fields = {
        role: read(messages=[{"role": role, **given}]).messages[0].plain() for role in ("user", "assistant", "tool")
    }
    assert fields["user"].keys() == {"role", "content"}
    assert fields["assistant"].keys() == {"role", "content", "tool_calls"}
    assert fields["tool"] == {"role": "tool", "content": "y", "tool_call_id": "call_1", "name": "x"}


def test_calls_as_clients_send_them_back_are_taken() -> None:
    call = {**CALL, "index": 0, "provider_specific_fields": None, "extra_content": {"x": 1}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "a", "tool_calls": []}]
    first, second = read(messages=messages).messages
    assert first.plain()["tool_calls"][0]["id"] == "call_1"
    assert "tool_calls" not in second.plain()


def test_the_schema_of_the_api_says_that_arguments_may_be_text() -> None:
    arguments = Request.model_json_schema()["$defs"]["CalledFunction"]["properties"]["arguments"]
    assert [one["type"] for one in arguments["anyOf"]] == ["string", "object", "null"]

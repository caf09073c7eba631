"""What real clients send beside what is read: nothing of it changes an answer, and what would is refused by name."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from deploy.http_api.ignored_fields import MAX_SHOWN, shown, without_ignored
from deploy.http_api.openai_requests import ChatRequest, CompletionRequest
from tests.deploy.scripted import ScriptedEngine, call

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Say", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 2},
}
HEADER = "x-tide-ignored"

NOTHING_ASKED: dict[str, Any] = {
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "abc",
    "prompt_cache_key": "abc",
    "user": "somebody",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "verbosity": "low",
    "n": 1,
    "seed": None,
    "stop": None,
    "logit_bias": None,
    "stream_options": None,
    "tide": None,
    "response_format": {"type": "text"},
}
OF_COMPLETIONS = {"echo": False, "best_of": 1, "suffix": None, "prompt_embeds": None}
OF_CHATS = {
    "modalities": ["text"],
    "audio": None,
    "tools": [],
    "tool_choice": "auto",
    "functions": None,
    "function_call": "none",
    "max_completion_tokens": 2,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "skip_special_tokens": True,
    "guided_json": None,
}
ASKED_FOR = [
    (COMPLETIONS, {"best_of": 2}),
    (COMPLETIONS, {"suffix": "end"}),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}),
]
HISTORY = {
    "role": "assistant",
    "content": None,
    "name": "it",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "tool_calls": None,
    "function_call": None,
    "reasoning_content": "hm",
    "provider_specific_fields": {"a": 1},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("strict", [False, True])
async def test_fields_that_ask_for_nothing_change_nothing(path: str, strict: bool) -> None:
    more = NOTHING_ASKED | (OF_CHATS if path == CHAT else OF_COMPLETIONS)
    plain, other = ScriptedEngine(), ScriptedEngine()
    await call(plain, BODIES[path], path=path)
    reply = await call(other, {**more, **BODIES[path]}, path=path, strict=strict)
    assert reply.status == 200, reply.body
    assert HEADER not in reply.headers
    assert other.asked == plain.asked


async def test_the_second_turn_of_a_chat_may_have_all_that_the_first_answer_had() -> None:
    engine = ScriptedEngine()
    turns = [*BODIES[CHAT]["messages"], HISTORY, {**HISTORY, "tool_calls": [], "content": "Hello"}]
    reply = await call(engine, {**BODIES[CHAT], "messages": turns}, path=CHAT, strict=True)
    assert reply.status == 200, reply.body
    [(prompt, _)] = engine.asked
    assert prompt.messages[1:] == [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
async def test_only_the_assistant_may_have_said_nothing(role: str) -> None:
    reply = await call(ScriptedEngine(), {"messages": [{"role": role, "content": None}]}, path=CHAT)
    assert (reply.status, reply.json["error"]["param"]) == (400, "messages.0")


@pytest.mark.parametrize(("path", "more"), ASKED_FOR, ids=str)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(path: str, more: dict[str, Any]) -> None:
    reply = await call(ScriptedEngine(), {**BODIES[path], **more}, path=path)
    assert reply.status == 400
    assert reply.json["error"]["code"] == "unsupported"
    assert [reply.json["error"]["param"]] == [*more]


async def test_a_field_that_nobody_knows_is_ignored_named_in_a_header_and_counted() -> None:
    observer, engine = Mock(), ScriptedEngine()
    part = {"type": "text", "text": "Say", "cache_control": {}}
    body = {"messages": [{"role": "user", "content": [part], "mood": "good"}], "max_tokens": 2, "frobnicate": 1}
    reply = await call(engine, body, path=CHAT, observer=observer)
    assert reply.status == 200
    assert reply.headers[HEADER] == "messages.0.content.0.cache_control, messages.0.mood, frobnicate"
    observer.on_ignored_fields.assert_called_once_with(3)
    assert engine.asked[0][0].messages == [{"role": "user", "content": "Say"}]


async def test_a_stream_and_a_refusal_name_it_too() -> None:
    for more, status in (({"stream": True}, 200), ({"temperature": -1}, 400)):
        reply = await call(ScriptedEngine(), {**BODIES[COMPLETIONS], "frobnicate": 1, **more})
        assert (reply.status, reply.headers[HEADER]) == (status, "frobnicate")


@pytest.mark.parametrize("path", BODIES)
async def test_a_strict_server_refuses_a_field_that_nobody_knows(path: str) -> None:
    observer = Mock()
    reply = await call(ScriptedEngine(), {**BODIES[path], "frobnicate": 1}, path=path, strict=True, observer=observer)
    assert (reply.status, reply.json["error"]["param"]) == (400, "frobnicate")
    observer.on_ignored_fields.assert_not_called()


def test_null_for_what_is_needed_is_not_taken_for_nothing() -> None:
    assert without_ignored(CompletionRequest, {"prompt": None, "seed": None}, strict=False) == ({"prompt": None}, [])
    assert without_ignored(ChatRequest, {"messages": None}, strict=False) == ({"messages": None}, [])


def test_true_is_not_one() -> None:
    kept, _ = without_ignored(CompletionRequest, {"prompt": "x", "best_of": True}, strict=False)
    assert kept == {"prompt": "x", "best_of": True}


def test_a_header_holds_few_short_plain_names() -> None:
    assert shown(["a\r\nSet-Cookie: b", "\u00e9t\u00e9_1", "x" * 500]) == f"aSet-Cookieb, t_1, {'x' * 64}"
    assert shown([f"f{n}" for n in range(MAX_SHOWN + 3)]).endswith("f7, and 3 more")

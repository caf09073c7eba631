"""The table of OpenAI's parameters: complete, and what the bodies of requests do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deploy.http_api.ignored_fields import without_ignored
from tide_core.errors import RequestError
from tools.reference import openai_parameters
from tools.reference.openai_parameters import ENDPOINTS, IGNORED, REFUSED, TAKEN, Endpoint, group, parameters

USER = [{"role": "user", "content": "Say"}]
PLAIN: dict[str, dict[str, Any]] = {
    "chats": {"messages": USER},
    "completions": {"prompt": "Say"},
    "responses": {"input": "Say"},
}
FLAT = {"type": "function", "name": "f"}
NESTED = {"type": "function", "function": {"name": "f"}}
VALUES: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "audio": {"voice": "alloy", "format": "wav"},
    "background": True,
    "best_of": 2,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "image": {"context_compression": "auto"},
    "include": ["reasoning.encrypted_content"],
    "input": [{"role": "user", "content": "Go"}],
    "instructions": "Be brief.",
    "logit_bias": {"7": 1.0},
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "max_tool_calls": 2,
    "messages": [{"role": "user", "content": "Go"}],
    "metadata": {"run": "7"},
    "modalities": ["text", "audio"],
    "model": "tiny",
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "seed": 7,
    "service_tier": "auto",
    "stop": ["end"],
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "suffix": "end",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tool_choice": "none",
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "last_messages",
    "user": "x",
    "verbosity": "low",
    "web_search_options": {},
}
"""A value of each parameter that asks for something."""
BY_ENDPOINT: dict[tuple[str, str], Any] = {
    ("chats", "logprobs"): True,
    ("completions", "logprobs"): 2,
    ("completions", "prompt"): "Go",
    ("responses", "prompt"): {"id": "pmpt_1"},
    ("chats", "tools"): [NESTED],
    ("responses", "tools"): [FLAT],
}
CASES = [(endpoint, name) for endpoint in ENDPOINTS for name in sorted(endpoint.names)]


def read(endpoint: Endpoint, values: dict[str, Any]) -> Any:
    body, unknown = without_ignored(endpoint.body, {**PLAIN[endpoint.title], **values}, strict=False)
    assert unknown == []
    return endpoint.body.model_validate(body)


@pytest.mark.parametrize(("endpoint", "name"), CASES, ids=[f"{case[0].title}-{case[1]}" for case in CASES])
def test_a_parameter_of_openai_is_treated_as_its_group_in_the_table_says(endpoint: Endpoint, name: str) -> None:
    value = BY_ENDPOINT.get((endpoint.title, name), VALUES.get(name))
    found, plain = group(endpoint.body, name), read(endpoint, {})
    if found == REFUSED:
        with pytest.raises((ValidationError, RequestError), match=name):
            read(endpoint, {name: value})
        return
    body = read(endpoint, {name: value})
    if found == IGNORED:
        assert body.model_copy(update={name: None} if name in type(body).model_fields else {}) == plain
        assert (body.params(), body.num_choices) == (plain.params(), plain.num_choices)
    else:
        assert found == TAKEN
        assert body != plain


def test_values_that_ask_for_nothing_are_ignored_where_others_are_refused() -> None:
    for endpoint in ENDPOINTS:
        for name in endpoint.names:
            for value in openai_parameters.allowed_values(endpoint.body, name):
                assert read(endpoint, {name: value}).params() == read(endpoint, {}).params(), (endpoint.title, name)


def test_a_parameter_that_no_body_knows_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    chats, *others = ENDPOINTS
    body = type("Forgetful", (chats.body,), {"unsupported": frozenset()})
    monkeypatch.setattr(openai_parameters, "ENDPOINTS", (chats._replace(body=body), *others))
    with pytest.raises(SystemExit, match=r"audio: Forgetful neither takes nor names"):
        parameters()


def test_every_note_is_about_a_parameter_of_the_table() -> None:
    rows = parameters()
    assert [name for name in openai_parameters.NOTES if f"| `{name}` |" not in rows] == []

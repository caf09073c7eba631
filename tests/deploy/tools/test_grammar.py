"""The format of a model's calls: how it is chosen, and grammars that force a call which its parser reads."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from pydantic import ValidationError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deploy.config.args import AppArgs
from deploy.tools.formats import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolFormat,
    required_format,
    tool_format,
)
from deploy.tools.grammar import call_schema, calls_schema, forced_call
from deploy.tools.plan import Tool
from tests.factories import tiny_tokenizer
from tide_core.errors import ConfigError, RequestError

pytestmark = pytest.mark.unit

QWEN = '{% if tools %}… <tool_call>\n{"name": <function-name>}\n</tool_call>{% endif %}<|im_start|>'
LLAMA31 = "{% if tools %}…{% endif %}<|start_header_id|>assistant<|end_header_id|>"
MISTRAL_LIST = "{% for t in tools %}{% endfor %}[TOOL_CALLS] [{% endfor %}"
MISTRAL_ARGS = "{% for t in tools %}{% endfor %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"
MISTRAL_NAMED = tool_format(None, MISTRAL_ARGS)
assert MISTRAL_NAMED is not None
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (MISTRAL_LIST, "mistral"),
        (MISTRAL_ARGS, "mistral"),
        (LLAMA31, "llama3_json"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ({"default": "{{ messages }}", "tool_use": QWEN}, "hermes"),
        ({"default": LLAMA31}, "llama3_json"),
        ("<|start_header_id|>user", None),  # Llama 3.0: its template has no place for tools
        ("{{ tools }}<tool_call><function=f>", None),  # another format in the same marker
        ("{{ tools }}<|im_start|>", None),
        (None, None),
        ({}, None),
    ],
)
def test_the_format_is_guessed_from_the_chat_template(template: str | dict[str, str] | None, name: str | None) -> None:
    found = tool_format(None, template)
    assert (found and found.name) == name


def test_the_setting_goes_before_the_template_and_a_wrong_one_is_refused() -> None:
    assert tool_format("llama3_json", QWEN) is LLAMA3_JSON
    assert tool_format("hermes", None) is HERMES
    with pytest.raises(ConfigError, match=r"tool_parser: got 'qwen', expected one of hermes, llama3_json, mistral"):
        tool_format("qwen", QWEN)


def test_every_format_can_be_set_in_the_arguments_of_the_application() -> None:
    assert [AppArgs.model_validate({"tool_parser": name}).tool_parser for name in FORMATS] == list(FORMATS)
    assert AppArgs().tool_parser is None
    with pytest.raises(ValidationError, match="one of hermes, llama3_json, mistral"):
        AppArgs.model_validate({"tool_parser": "qwen"})


def test_tools_without_a_known_format_are_refused_with_the_setting_to_change() -> None:
    assert required_format(HERMES, 2) is HERMES
    with pytest.raises(
        RequestError, match=r"tools: got '2 tools', expected .* setting tool_parser \(hermes, llama3_json"
    ):
        required_format(None, 2)


def tool(name: str, parameters: Mapping[str, Any] | None = None, **fields: Any) -> Tool:
    return Tool(name, parameters=None if parameters is None else dict(parameters), **fields)


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "default": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string", "enum": ["Paris", "Köln"]}},
}
COUNT = {"properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [tool("get_city", CITY), tool("count", COUNT), tool("stop")]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Knows the markers as tokens: special ones as Mistral's, plain ones as Qwen's."""
    hf = copy.deepcopy(tiny_tokenizer())
    hf.add_tokens([AddedToken(marker, special=marker.startswith("[")) for marker in MARKERS])
    return hf


@functools.cache
def ll_tokenizer(with_markers: bool) -> LLTokenizer:
    return from_tokenizer(tokenizer() if with_markers else tiny_tokenizer())


def accepts(grammar: str, text: str, *, with_markers: bool) -> bool:
    hf = tokenizer() if with_markers else tiny_tokenizer()
    matcher = LLMatcher(ll_tokenizer(with_markers), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = hf.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def ids_of(with_markers: bool) -> dict[str, int]:
    return {marker: int(tokenizer().convert_tokens_to_ids(marker)) for marker in MARKERS} if with_markers else {}


def written(how: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as a model writes them."""
    key = how.arguments_key
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if how is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if how is LLAMA3_JSON:
        return "; ".join(objects)
    if how is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


GOOD: list[Sequence[tuple[str, str]]] = [
    [("get_city", '{"city": "Köln"}')],
    [("get_city", '{"city": "Paris", "default": "Köln"}')],
    [("count", '{\n  "n": 12\n}')],
    [("stop", "{}")],
]
BAD: list[Sequence[tuple[str, str]]] = [
    [("other", "{}")],
    [("get_city", "{}")],
    [("get_city", '{"city": "Rome"}')],
    [("get_city", '{"city": "Paris", "default": "Rome"}')],
    [("count", '{"n": "12"}')],
    [("count", '{"n": 1, "m": 2}')],
    [("stop", '{"now": true}')],
    [("stop", "null")],
    [("count", "[1]")],
    [("count", "{" + " " * 100 + '"n": 1}')],
]
HOWS = [HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED]


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_a_forced_call_is_one_of_the_tools_with_arguments_that_fit_and_its_parser_reads_it(
    how: ToolFormat, with_markers: bool
) -> None:
    grammar = forced_call(how, TOOLS, one_call=True, token_ids=ids_of(with_markers))
    for calls in GOOD:
        text = written(how, *calls)
        assert accepts(grammar, text, with_markers=with_markers), text
        answer = how.parser().whole(text)
        assert answer.content == ""
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in answer.calls] == list(calls)
    for calls in BAD:
        assert not accepts(grammar, written(how, *calls), with_markers=with_markers), calls
    for text in ("", "I would rather talk.", written(how, *GOOD[0])[:-1], written(how, *GOOD[0]) + " And"):
        assert not accepts(grammar, text, with_markers=with_markers), text


@pytest.mark.parametrize("how", HOWS)
def test_one_call_is_one_and_several_are_allowed_where_not(how: ToolFormat) -> None:
    two = written(how, *GOOD[0], *GOOD[2])
    assert accepts(forced_call(how, TOOLS, one_call=False, token_ids=ids_of(True)), two, with_markers=True)
    assert not accepts(forced_call(how, TOOLS, one_call=True, token_ids=ids_of(True)), two, with_markers=True)
    assert len(how.parser().whole(two).calls) == 2


def test_a_marker_that_is_a_token_needs_its_id() -> None:
    text = written(HERMES, *GOOD[0])
    assert not accepts(forced_call(HERMES, TOOLS, one_call=True), text, with_markers=True)


@pytest.mark.parametrize("how", HOWS)
def test_a_named_tool_alone_can_be_called(how: ToolFormat) -> None:
    grammar = forced_call(how, [TOOLS[1]], one_call=True, token_ids=ids_of(True))
    assert accepts(grammar, written(how, *GOOD[2]), with_markers=True)
    assert not accepts(grammar, written(how, *GOOD[0]), with_markers=True)


def test_a_schema_that_no_grammar_expresses_is_approximated_unless_the_tool_is_strict() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}, "b": {"oneOf": [{}, {}]}}}
    lax, strict = (forced_call(HERMES, [tool("f", odd, strict=value)], one_call=True) for value in (None, True))
    assert accepts(lax, written(HERMES, ("f", '{"a": "red"}')), with_markers=False)
    assert "colour" in LLMatcher(ll_tokenizer(False), strict, log_level=0).get_error()


def test_names_and_schemas_are_quoted_in_the_grammar() -> None:
    strange = tool("get/ä.b'c", {"properties": {'"}\n%json\\': {"const": '"""'}}})
    arguments = json.dumps({'"}\n%json\\': '"""'})
    for how in HOWS:
        grammar = forced_call(how, [strange], one_call=True, token_ids=ids_of(True))
        assert accepts(grammar, written(how, ("get/ä.b'c", arguments)), with_markers=True)


def test_the_schemas_are_json_schema() -> None:
    one, many = call_schema(TOOLS, "parameters"), calls_schema(TOOLS, one_call=True)
    for schema in (one, many):
        jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"name": "get_city", "parameters": {"city": "Köln", "default": "Paris"}}, one)
    jsonschema.validate([{"name": "count", "arguments": {"n": 1}}], many)
    for bad in (
        {"name": "get_city", "parameters": {"city": "Rome"}},
        {"name": "stop"},
        {"name": "x", "parameters": {}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, one)
    for wrong in ([], [{"name": "stop", "arguments": {}}] * 2):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, many)

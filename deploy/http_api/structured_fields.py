"""Fields of a body that bind the text of the answer to a grammar, in the ways of OpenAI and vLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

from deploy.http_api.ignored_fields import Body
from tide_core.errors import RequestError
from tide_core.request import Grammar

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of vLLM's that would change the answer."""
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
BACKEND_OPTIONS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Of vLLM's `structured_outputs`: they concern how vLLM compiles a grammar."""
ANY_OBJECT = '{"type": "object"}'


class ResponseFormat(Body):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @property
    def grammar(self) -> Grammar | None:
        field = "response_format"
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_schema", ANY_OBJECT, field)
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, (dict, bool)):
            raise RequestError(f"{field}.json_schema.schema", type(schema).__name__, "a JSON schema")
        return Grammar("json_schema", json.dumps(schema), field)


def _grammar(name: str, value: Any) -> Grammar:
    """The grammar in a field of vLLM's: `guided_json`, `structured_outputs.regex` and so on."""
    kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, name)
    if kind == "json" and isinstance(value, (dict, bool)):
        value = json.dumps(value)
    if kind == "choice" and isinstance(value, list) and all(isinstance(one, str) and one for one in value):
        value = json.dumps(value)
    elif kind == "choice" or not isinstance(value, str):
        expected = {"json": "a JSON schema", "choice": "a list of texts"}.get(kind, "text")
        raise RequestError(name, type(value).__name__, expected)
    return Grammar("json_schema" if kind == "json" else kind, value, name)


class StructuredFields(Body):
    """Base of a body: at most one way to structure the output."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's newer way: one of json, regex, choice, grammar and json_object."""

    @property
    def grammar(self) -> Grammar | None:
        """What the text must be, in whichever way it was asked for."""
        given = {name: value for name in GUIDED if (value := getattr(self, name)) is not None}
        for name, value in (self.structured_outputs or {}).items():
            if name in BACKEND_OPTIONS or value in (None, False):
                continue
            if name not in STRUCTURED:
                raise RequestError("structured_outputs", name[:40], f"one of {', '.join(STRUCTURED)}")
            given[f"structured_outputs.{name}"] = value
        found = [_grammar(name, value) for name, value in given.items()]
        if self.response_format is not None and (asked := self.response_format.grammar) is not None:
            found.append(asked)
        if len(found) > 1:
            raise RequestError(found[0].field, found[1].field, "only one way to structure the output")
        return found[0] if found else None

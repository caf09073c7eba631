"""The OpenAPI document. The strict JSON reader parses the bodies, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deploy.http_api.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TideOptions,
    TokenizeRequest,
)
from deploy.http_api.responses.requests import ResponseRequest

BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
ERROR_STATUSES = {
    "400": "a refused value or body",
    "401": "no key, or an unknown one",
    "403": "not allowed",
    "404": "not found",
    "405": "wrong method",
    "408": "deadline exceeded",
    "413": "too large",
    "415": "not JSON",
    "429": "too many waiting requests",
    "431": "headers too large",
    "500": "internal error",
    "503": "the engine is not running",
}


def describe(api: FastAPI, *, strict: bool) -> None:
    """Add bodies and errors to the document of `api`. Bodies may have other fields unless the server is strict."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            _add_bodies(document, strict)
            _add_errors(document)
            api.openapi_schema = document
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(document: dict[str, Any], strict: bool) -> None:
    template = "#/components/schemas/{model}"
    models: list[Any] = [(model, "validation") for model in BODIES.values()]
    names, definitions = models_json_schema(models, ref_template=template)
    for name, definition in definitions["$defs"].items():
        definition["additionalProperties"] = not strict and name != TideOptions.__name__
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, model in BODIES.items():
        schema = names[(model, "validation")]  # type: ignore[index]
        content = {"application/json": {"schema": schema}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}


def _add_errors(document: dict[str, Any]) -> None:
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable}
    inner = {"type": "object", "properties": fields, "required": sorted(fields)}
    document["components"]["schemas"]["Error"] = {
        "type": "object",
        "properties": {"error": inner},
        "required": ["error"],
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for status, text in ERROR_STATUSES.items():
                operation["responses"].setdefault(status, {"description": text, "content": content})

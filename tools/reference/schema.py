"""Generate the gRPC reference from the schema and its comments."""

from __future__ import annotations

import importlib.resources
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

from tools.reference.markdown import NOTE, code, lines, table

ROOT = Path(__file__).parents[2]
SCHEMA = "tide/v1/tide.proto"


def grpc() -> str:
    file = schema(ROOT / "protos", SCHEMA)
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    head = next(place for place in file.source_code_info.location if list(place.path) == [12])  # the syntax line
    opening = "\n".join([*head.leading_detached_comments, head.leading_comments])
    parts = [
        "# gRPC reference",
        NOTE,
        prose(opening),
        lines(
            f"Package `{file.package}`, schema [protos/{SCHEMA}](../../protos/{SCHEMA}). `tide_client` is the Python",
            "client; other languages can generate one from the schema.",
            "Errors by status: [serving](../serving.md#errors).",
        ),
    ]
    for number, service in enumerate(file.service):
        rows = [
            (
                code(method.name),
                message_link(method.input_type),
                ("stream of " if method.server_streaming else "") + message_link(method.output_type),
                prose(comments.get((6, number, 2, place), "")),
            )
            for place, method in enumerate(service.method)
        ]
        parts += [f"## {service.name}", table(("method", "request", "response", "meaning"), rows)]
    parts.append("## Enums")
    for number, enum in enumerate(file.enum_type):
        values = [
            (code(value.name), str(value.number), prose(comments.get((5, number, 2, place), "")))
            for place, value in enumerate(enum.value)
        ]
        parts += [
            f"### {enum.name}",
            prose(comments.get((5, number), "")),
            table(("name", "number", "meaning"), values),
        ]
    parts.append("## Messages")
    for number, message in enumerate(file.message_type):
        rows = [
            (
                code(field.name),
                str(field.number),
                field_type(field, message),
                prose(comments.get((4, number, 2, place), "")),
            )
            for place, field in enumerate(message.field)
        ]
        body = table(("field", "number", "type", "meaning"), rows) if rows else "No fields."
        parts += [f"### {message.name}", prose(comments.get((4, number), "")), body]
    return "\n\n".join(part for part in parts if part) + "\n"


def schema(root: Path, path: str) -> Any:
    """The descriptor of a schema, with its comments."""
    import grpc_tools
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        known = importlib.resources.files(grpc_tools) / "_proto"
        arguments = [f"-I{root}", f"-I{known}", "--include_source_info", f"--descriptor_set_out={out}", path]
        if protoc.main(["", *arguments]) != 0:
            raise SystemExit(f"{path} cannot be compiled")
        [file] = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def prose(comment: str) -> str:
    """A comment of several lines as paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(comment).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def message_link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})"


def field_type(field: Any, message: Any) -> str:
    """The type as in the schema: optional, repeated, map."""
    entry = next((one for one in message.nested_type if field.type_name.endswith(f".{message.name}.{one.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return f"map of {plain_type(key)} to {plain_type(value)}"
    if field.label == field.LABEL_REPEATED:
        return f"repeated {plain_type(field)}"
    return f"optional {plain_type(field)}" if field.proto3_optional else plain_type(field)


def plain_type(field: Any) -> str:
    if field.type_name:
        return message_link(field.type_name)
    return str(field.Type.Name(field.type)).removeprefix("TYPE_").lower()

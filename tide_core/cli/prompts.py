"""Read prompts from an argument, standard input, or a file. An error names the file and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_core.errors import RequestError

STDIN = "-"
LINE_EXPECTED = 'one object with "prompt" (text) or "messages" (a list of objects)'


@dataclass(frozen=True, slots=True)
class PromptItem:
    """A prompt and its source."""

    prompt: str | list[dict[str, str]]
    where: str = ""
    """`file line n`, or nothing for a prompt of the command line."""


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text_of(argument: str) -> str:
    """The argument, or standard input where it is `-`."""
    text = read_stdin() if argument == STDIN else argument
    if not text.strip():
        raise RequestError("prompt", text, "text")
    return text


def read_stdin() -> str:
    """All of standard input without the final line end."""
    raw = b"" if sys.stdin is None else sys.stdin.buffer.read()  # None: started with it closed
    text = _decode(raw, "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def read_file(path: Path, *, labels: Sequence[str] = ()) -> list[PromptItem]:
    """One prompt per line; lines of a .jsonl file are objects, which may have `labels`. Blank lines are skipped."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise RequestError("--file", path, f"a readable file: {error.strerror or error}") from error
    parse = _parse_json if path.suffix.lower() == ".jsonl" else _parse_text
    items = []
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        text = _decode(line, where)
        if text.strip():
            items.append(PromptItem(parse(text.removesuffix("\r"), where, labels), where))
    if not items:
        raise RequestError("--file", path, "at least one line that is not blank")
    return items


def _parse_text(line: str, where: str, labels: Sequence[str]) -> str:
    return line


def _parse_json(line: str, where: str, labels: Sequence[str]) -> str | list[dict[str, str]]:
    # Errors name the line and what is wrong, never the user's text.
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(where, "a line that is not JSON", LINE_EXPECTED) from error
    if not isinstance(value, dict):
        raise RequestError(where, _json_type(value), LINE_EXPECTED)
    keys = value.keys() - set(labels)
    if len(keys) != 1 or not keys <= {"prompt", "messages"}:
        raise RequestError(where, f"keys {', '.join(map(str, value)) or '(none)'}", LINE_EXPECTED)
    if "prompt" in value:
        return _check_text(value["prompt"], where)
    return _check_messages(value["messages"], where)


def _check_text(prompt: Any, where: str) -> str:
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError(f"{where}: prompt", _json_type(prompt), "text that is not blank")
    return prompt


def _check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{where}: messages", _json_type(messages), "a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            expected = "an object with role and content"
            raise RequestError(f"{where}: messages[{index}]", _json_type(message), expected)
    return messages


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(where, f"byte 0x{raw[error.start]:02x} at {error.start}", "UTF-8 text") from None


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")

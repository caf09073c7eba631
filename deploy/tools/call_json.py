"""Reads the JSON object of one tool call while the model writes it.

A call is an object with a name and arguments, in any order: `{"name": "f", "arguments": {"a": 1}}`. Arguments leave as
the model wrote them, character by character, as soon as it is certain that the object is a call: its name is known and
the arguments have begun like a JSON object. Before that nothing leaves, and the object may still be rejected; after
that it stays a call, also if the rest is broken.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeAlias, TypeVar

T = TypeVar("T")
Reader: TypeAlias = Generator[None, str, T]
"""Takes one character at a time and returns when its part of the text is complete."""

SPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
"""Llama writes `parameters`, the others `arguments`; either is accepted from all."""
_OUTSIDE_STRINGS = frozenset('{}[],:"+-.0123456789' + SPACE + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Characters of JSON outside of strings. Letters as in `True` are not JSON, but end no arguments."""


class Status(enum.Enum):
    OPEN = "open"
    """More text is needed."""
    DONE = "done"
    """The call is complete."""
    REJECTED = "rejected"
    """This is no call: all of its text is content."""
    BROKEN = "broken"
    """A call whose arguments stopped being JSON: what follows, up to the end of the call, belongs to them."""


class CallScanner:
    """Reads one object, its opening brace included."""

    def __init__(self, *, keys: frozenset[str] | None = None, may_lack_arguments: bool = False) -> None:
        """`keys`: an object with another key is rejected at once. None: any key may be there.
        `may_lack_arguments`: an object with a name alone is a call with arguments `{}`."""
        self._keys, self._may_lack_arguments = keys, may_lack_arguments
        self.status = Status.OPEN
        self.name: str | None = None
        self.tail = ""
        """Text after the arguments, until it is certain that it belongs to the object; then it is empty."""
        self._arguments: list[str] = []
        self._has_arguments = self._past_arguments = False
        self._start(self._object())

    @classmethod
    def of_arguments(cls, name: str) -> CallScanner:
        """Reads an object that is the arguments themselves; the name stood before it."""
        scanner = cls()
        scanner.name = name
        scanner._start(scanner._arguments_alone())
        return scanner

    @property
    def is_call(self) -> bool:
        """Whether it is certain that this is a call."""
        return self.name is not None and self._has_arguments

    def scan(self, text: str) -> int:
        """Read on; returns how many characters were used: all of them while the status is OPEN."""
        for index, char in enumerate(text):
            in_tail = self.is_call and self._past_arguments
            try:
                self._reader.send(char)
            except StopIteration:
                self.status, self.tail = Status.DONE, ""
                return index + 1
            except _EndsHereError as end:
                self.status = end.status
                return index
            if in_tail:
                self.tail += char
        return len(text)

    def take_arguments(self) -> str:
        """Text of the arguments that was not taken yet."""
        if not self.is_call:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _start(self, reader: Reader[None]) -> None:
        self._reader = reader
        next(reader)

    def _fail(self) -> NoReturn:
        """The character just read does not continue the object."""
        raise _EndsHereError(Status.DONE if self.is_call else Status.REJECTED)

    def _fail_in_arguments(self) -> NoReturn:
        raise _EndsHereError(Status.BROKEN if self.is_call else Status.REJECTED)

    def _object(self) -> Reader[None]:
        yield  # the opening brace
        char = yield from _past_space()
        while char == '"':
            key = yield from self._key()
            if (yield from _past_space()) != ":":
                self._fail()
            char = yield from self._member(key, (yield from _past_space()))
            if char == ",":
                char = yield from _past_space()
            elif char != "}":
                self._fail()
        if char != "}":
            self._fail()
        if self.name is not None and self._may_lack_arguments and not self._has_arguments:
            self._set_arguments("{}")
        if not self.is_call:
            self._fail()

    def _arguments_alone(self) -> Reader[None]:
        yield  # the opening brace
        yield from self._object_of_arguments()

    def _key(self) -> Reader[str]:
        """The rest of a key, which may be rejected before it is complete."""
        text = ""
        while (char := (yield)) != '"':
            text += char
            if char == "\\":
                text += yield
            if not self._may_begin(text):
                self._fail()
        key = _decoded(f'"{text}"')
        if not isinstance(key, str) or not (self.is_call or self._keys is None or key in self._keys):
            self._fail()
        return key

    def _may_begin(self, text: str) -> bool:
        return self.is_call or self._keys is None or any(key.startswith(text) for key in self._keys)

    def _member(self, key: str, first: str) -> Reader[str]:
        """A value from its first character on; returns the first character after it that is not space."""
        if key == "name" and self.name is None:
            if first != '"':
                self._fail()
            name = _decoded((yield from _string()))
            if not isinstance(name, str) or not name:
                self._fail()
            self.name = name
        elif key not in ARGUMENT_KEYS or self._has_arguments:
            return (yield from self._other_value(first))
        elif first == "{":
            yield from self._object_of_arguments()
        elif first == '"':  # an object as text, as OpenAI's own messages have it
            text = _decoded((yield from _string()))
            if not isinstance(text, str) or not isinstance(_decoded(text), dict):
                self._fail()
            self._set_arguments(text)
        else:
            text, char = yield from _scalar(first)
            if text != "null":
                self._fail()
            self._set_arguments("{}")
            return char if char not in SPACE else (yield from _past_space())
        return (yield from _past_space())

    def _object_of_arguments(self) -> Reader[None]:
        """Arguments after their opening brace. They are arguments if they go on as an object does."""
        begun = ["{"]
        while (char := (yield)) in SPACE:
            begun.append(char)
        if char not in '"}':
            self._fail()
        self._arguments, self._has_arguments = [*begun, char], True
        if char == '"':
            yield from _until_closed(self._arguments.append, self._fail_in_arguments, in_string=True)
        self._past_arguments = True

    def _set_arguments(self, text: str) -> None:
        self._arguments, self._has_arguments, self._past_arguments = [text], True, True

    def _other_value(self, first: str) -> Reader[str]:
        if first == '"':
            yield from _string()
        elif first in "{[":
            yield from _until_closed(_dropped, self._fail)
        else:
            text, char = yield from _scalar(first)
            if not text:
                self._fail()
            return char if char not in SPACE else (yield from _past_space())
        return (yield from _past_space())


class ObjectEnd:
    """Finds the end of an object of which nothing else matters."""

    def __init__(self) -> None:
        self.found = False
        self._reader = self._object()
        next(self._reader)

    def scan(self, text: str) -> int:
        """Read on; returns how many characters were used: all of them while the end is not found."""
        for index, char in enumerate(text):
            try:
                self._reader.send(char)
            except StopIteration:
                self.found = True
                return index + 1
        return len(text)

    def _object(self) -> Reader[None]:
        yield  # the opening brace
        yield from _until_closed(_dropped, None)


class _EndsHereError(Exception):
    """The character just read is not part of the object."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def _past_space() -> Reader[str]:
    while (char := (yield)) in SPACE:
        pass
    return char


def _string() -> Reader[str]:
    """A string after its opening quote; returns it with both quotes."""
    chars = ['"']
    while (char := (yield)) != '"':
        chars.append(char)
        if char == "\\":
            chars.append((yield))
    return "".join(chars) + '"'


def _scalar(first: str) -> Reader[tuple[str, str]]:
    """A number or a word, and the character after it."""
    text, char = "", first
    while char.isalnum() or char in "+-.":
        text += char
        char = yield
    return text, char


def _until_closed(
    keep: Callable[[str], object], fail: Callable[[], NoReturn] | None, *, in_string: bool = False
) -> Reader[None]:
    """An object or list after its opening bracket. `fail`: called at a character that JSON has in strings alone."""
    depth = 1
    while depth:
        char = yield
        if in_string:
            keep(char)
            if char == "\\":
                keep((yield))
            in_string = char != '"'
            continue
        if fail is not None and char not in _OUTSIDE_STRINGS:
            fail()
        keep(char)
        in_string = char == '"'
        depth += (char in "{[") - (char in "}]")


def _decoded(text: str) -> Any:
    """The value of JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dropped(_: str) -> None:
    pass

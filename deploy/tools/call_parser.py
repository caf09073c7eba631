"""Finds tool calls in the text that a model writes: what the parsers of all formats have in common.

Text goes in piece by piece and comes out as content and as calls, the way OpenAI streams them; a whole answer is one
piece. Where the pieces are cut changes nothing. Text is held back only while it may still become a call. No text is
lost: what turns out not to be a call is content. Only framing is dropped: markers of calls that were made, separators
between them, and space that stands alone before, between or after them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from deploy.tools.call_json import SPACE, CallScanner, Status

PIECE_CHARS = 512
"""Longer text is read in pieces of this length, so that text full of what may begin a call costs linear time."""
NAME = r'[^\s{}\[\]<>"\\]{1,256}'
"""Pattern of the names of functions: wider than OpenAI's letters, digits, `_` and `-`, but without what could end a
name in any format."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call: the first has id, name and no arguments, the others have arguments alone."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def chunk(self) -> dict[str, Any]:
        """The entry of `tool_calls` in the delta of a streamed chat."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Delta: TypeAlias = str | CallDelta
"""Content or a piece of a call: one chunk of a stream each."""


@dataclass(slots=True)
class Answer:
    """The deltas of one answer put together."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """As in `tool_calls` of a whole message."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        answer = cls()
        for delta in deltas:
            if isinstance(delta, str):
                answer.content += delta
            elif delta.id is not None:
                function = {"name": delta.name, "arguments": delta.arguments}
                answer.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                answer.calls[delta.index]["function"]["arguments"] += delta.arguments
        return answer


class ToolParser:
    """Base of the parsers. One object reads one answer: `feed` its text, then `finish`. With `one_call` it leaves out
    every call after the first."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that the format needs. Where one is a special token, the text must show it."""
    separators: ClassVar[str] = ""
    """Characters between calls that are framing, besides space."""
    stop_marker: ClassVar[str] = ""
    """Ends arguments that are not JSON. Empty: the end of the text does."""

    def __init__(self, *, one_call: bool = False) -> None:
        self.num_calls = 0
        self._one_call = one_call
        self._deltas: list[Delta] = []
        self._pending = ""  # text that was not looked at yet, or not enough of it
        self._held = ""  # text of what may still become a call; it stands before `_pending`
        self._prefix = ""  # its beginning: framing before the object
        self._margin = ""  # framing or the beginning of content
        self._in_margin = True
        self._scanner = CallScanner()
        self._state: Callable[[], bool] = self._read_text  # returns False if it needs more text

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of the answer's text."""
        for start in range(0, len(text), PIECE_CHARS):
            self._pending += text[start : start + PIECE_CHARS]
            while self._pending and self._state():
                pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Take the end of the answer. What is held back is content, for nothing can complete it any more."""
        if self._state == self._read_broken:
            self._add_arguments(self._pending)
        else:
            rest = self._scanner.tail if self._scanner.is_call and not self._held else self._held
            self._add_content(rest + self._pending)
        if not self.num_calls and self._margin:
            self._deltas.append(self._margin)
        self._pending = self._held = self._margin = ""
        return self._taken()

    def whole(self, text: str) -> Answer:
        """Read an answer that is there as a whole."""
        return Answer.of([*self.feed(text), *self.finish()])

    def finish_reason(self, reason: str) -> str:
        """The finish reason of the answer. A call cut off by `max_tokens` is told by `length`."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _open_markers(self) -> Sequence[str]:
        """Strings in text at which `_read_text` stops."""
        raise NotImplementedError

    def _on_marker(self, marker: str) -> None:
        """A marker was found and is no longer pending."""
        raise NotImplementedError

    def _after_call(self) -> None:
        """Set the state after the object of a call."""
        self._state = self._read_text

    def _on_rejected(self) -> None:
        """The object that was read is no call. Its text is in `_held`, after `_prefix`."""
        self._release(len(self._prefix))

    def _read_text(self) -> bool:
        markers = self._open_markers()
        found = [(at, marker) for marker in markers if (at := self._pending.find(marker)) >= 0]
        if not found:
            keep = _held_back(self._pending, markers)
            self._add_content(self._use(len(self._pending) - keep))
            return False
        at, marker = min(found)
        self._add_content(self._use(at))
        self._use(len(marker))
        self._on_marker(marker)
        return True

    def _read_opening(self) -> bool:
        """After a marker: space and the brace of an object, or the marker was text."""
        at = first_visible(self._pending)
        if at < 0:
            return False
        if self._pending[at] == "{":
            self._held += self._use(at)
            self._read_object(CallScanner(may_lack_arguments=True))
        else:
            self._release(len(self._held))
        return True

    def _read_object(self, scanner: CallScanner) -> None:
        """Read a call from here on. `_held` is framing before it."""
        self._prefix, self._scanner, self._state = self._held, scanner, self._read_call

    def _read_call(self) -> bool:
        scanner, opened = self._scanner, self._scanner.is_call
        self._held += self._use(scanner.scan(self._pending))
        if scanner.is_call:
            if not opened:
                self._add_call(scanner.name or "")
            self._held = ""
            self._add_arguments(scanner.take_arguments())
        if scanner.status is Status.OPEN:
            return False
        if scanner.status is Status.REJECTED:
            self._on_rejected()
        elif scanner.status is Status.BROKEN:
            self._state = self._read_broken
        else:
            self._pending = scanner.tail + self._pending
            scanner.tail = ""
            self._after_call()
        return True

    def _read_broken(self) -> bool:
        at = self._pending.find(self.stop_marker) if self.stop_marker else -1
        if at < 0:
            keep = _held_back(self._pending, [self.stop_marker])
            self._add_arguments(self._use(len(self._pending) - keep))
            return False
        self._add_arguments(self._use(at))
        self._after_call()
        return True

    def _release(self, length: int) -> None:
        """Held text is no call: its first `length` characters are content, the others are read as text again."""
        content, self._pending = self._held[:length], self._held[length:] + self._pending
        self._held = ""
        self._state = self._read_text
        self._add_content(content)

    def _use(self, length: int) -> str:
        used, self._pending = self._pending[:length], self._pending[length:]
        return used

    def _add_content(self, text: str) -> None:
        if self._in_margin:
            text, self._margin = self._margin + text, ""
            if not text.strip(SPACE + (self.separators if self.num_calls else "")):
                self._margin = text
                return
            self._in_margin = False
        if text:
            self._deltas.append(text)

    def _add_call(self, name: str) -> None:
        self._margin, self._in_margin = "", True
        self._deltas.append(CallDelta(self.num_calls, "", self.new_id(), name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self.num_calls - 1, text))

    def _taken(self) -> list[Delta]:
        """Deltas since the last call, neighbours of one kind as one."""
        joined: list[Delta] = []
        for delta in self._deltas:
            if self._one_call and isinstance(delta, CallDelta) and delta.index > 0:
                continue
            last = joined[-1] if joined else None
            if isinstance(delta, str) and isinstance(last, str):
                joined[-1] = last + delta
            elif isinstance(delta, CallDelta) and delta.id is None and isinstance(last, CallDelta) and last.id is None:
                joined[-1] = CallDelta(last.index, last.arguments + delta.arguments)
            else:
                joined.append(delta)
        self._deltas.clear()
        return joined


def first_visible(text: str) -> int:
    """Index of the first character that is not space; -1 if there is none."""
    at = run_length(text, SPACE)
    return at if at < len(text) else -1


def run_length(text: str, chars: str) -> int:
    """Length of the beginning of `text` that has only these characters."""
    return len(text) - len(text.lstrip(chars)) if chars else 0


def _held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        at = text.find(marker[:1], max(0, len(text) - len(marker) + 1)) if marker else -1
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        longest = max(longest, len(text) - at if at >= 0 else 0)
    return longest

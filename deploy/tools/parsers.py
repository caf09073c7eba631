"""The parsers of the formats in which models write tool calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from deploy.tools.call_json import ARGUMENT_KEYS, SPACE, CallScanner, ObjectEnd
from deploy.tools.call_parser import NAME, Delta, ToolParser, first_visible, run_length

ALPHANUMERIC = string.ascii_letters + string.digits

_NAME = re.compile(NAME)


class HermesParser(ToolParser):
    """Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call."""

    start, end = "<tool_call>", "</tool_call>"
    markers = (start, end)
    stop_marker = end

    def __init__(self, *, one_call: bool = False) -> None:
        super().__init__(one_call=one_call)
        self._in_block = False

    def finish(self) -> list[Delta]:
        if self._in_block and self._in_margin and self.end.startswith(self._pending):
            self._pending = ""  # the end marker was cut off
        return super().finish()

    def _open_markers(self) -> Sequence[str]:
        return self.markers if self._in_block else (self.start,)

    def _on_marker(self, marker: str) -> None:
        self._in_block = False
        if marker == self.start:
            self._held, self._state = marker, self._read_opening
        elif self._in_margin:
            self._margin = ""

    def _after_call(self) -> None:
        self._in_block, self._state = True, self._read_text  # the end marker is still to come, if it comes


class Llama3JsonParser(ToolParser):
    """Llama 3: `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`; several with `;` between them."""

    tag = "<|python_tag|>"
    markers = (tag,)
    separators = ";"
    keys = frozenset({"name", "type", "id", *ARGUMENT_KEYS})

    def __init__(self, *, one_call: bool = False) -> None:
        super().__init__(one_call=one_call)
        self._other = ObjectEnd()

    def _open_markers(self) -> Sequence[str]:
        return self.tag, "{"

    def _on_marker(self, marker: str) -> None:
        if marker == self.tag:
            self._held, self._state = marker, self._read_opening
        else:
            self._pending = marker + self._pending
            self._read_object(CallScanner(keys=self.keys))

    def _on_rejected(self) -> None:
        """An object that is no call is content with all that is in it; braces of other text are but braces."""
        inside = (self._held[len(self._prefix) + 1 :] + self._pending).lstrip(SPACE)
        if self._prefix or not inside.startswith('"'):
            self._release(len(self._prefix) + (not self._prefix))
        else:
            self._release(0)
            self._other, self._state = ObjectEnd(), self._read_other

    def _read_other(self) -> bool:
        self._add_content(self._use(self._other.scan(self._pending)))
        if self._other.found:
            self._state = self._read_text
        return self._other.found


class MistralParser(ToolParser):
    """Mistral: `[TOOL_CALLS]` and a list of `{"name": …, "arguments": …}`, or since 2025 `[TOOL_CALLS]name{…}` for
    each call, with `[CALL_ID]…` and `[ARGS]` between name and arguments if the text shows them."""

    start, call_id, args = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    markers = (start, call_id, args)
    separators = ","
    stop_marker = start

    def __init__(self, *, one_call: bool = False) -> None:
        super().__init__(one_call=one_call)
        self._in_list = False

    def new_id(self) -> str:
        """Mistral's chat templates refuse every other kind of id."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))

    def _open_markers(self) -> Sequence[str]:
        return (self.start,)

    def _on_marker(self, marker: str) -> None:
        self._held, self._state, self._in_list = marker, self._read_opening, False

    def _read_opening(self) -> bool:
        at = first_visible(self._pending)
        if at < 0:
            return False
        if self._pending[at] == "[" and not self._in_list:
            self._held += self._use(at + 1)
            self._in_list = True
            return True
        if self._pending[at] == "{" or self._in_list:
            return super()._read_opening()
        return self._read_name(at)

    def _read_name(self, start: int) -> bool:
        """A name with the opening brace of its arguments, or the marker was text."""
        found = _NAME.match(self._pending, start)
        name, rest = (found[0], self._pending[found.end() :]) if found else ("", "")
        for marker, allowed in ((self.call_id, ALPHANUMERIC), (self.args, "")):
            if marker.startswith(rest):
                return self._release_unless(name != "")
            if rest.startswith(marker):
                rest = rest[len(marker) :]
                rest = rest[run_length(rest, allowed) :]
        rest = rest.lstrip(SPACE)
        if name and rest.startswith("{"):
            self._held += self._use(len(self._pending) - len(rest))
            self._read_object(CallScanner.of_arguments(name))
            return True
        return self._release_unless(name != "" and not rest)

    def _release_unless(self, may_be_call: bool) -> bool:
        """Wait for more text if this may be a call; else the marker is content."""
        if not may_be_call:
            self._release(len(self._held))
        return not may_be_call

    def _after_call(self) -> None:
        self._state = self._read_next if self._in_list else self._read_text

    def _on_rejected(self) -> None:
        self._in_list = False
        super()._on_rejected()

    def _read_next(self) -> bool:
        """In a list after a call: another one, the end, or text if the list is broken."""
        at = run_length(self._pending, SPACE + self.separators)
        self._add_content(self._use(at))
        if not self._pending:
            return False
        if self._pending[0] == "{":
            self._read_object(CallScanner(may_lack_arguments=True))
            return True
        if self._pending[0] == "]":
            self._use(1)
        self._in_list, self._state = False, self._read_text
        return True

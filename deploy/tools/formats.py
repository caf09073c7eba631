"""Which format a model writes its tool calls in, and the text around a call in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deploy.tools.call_parser import ToolParser
from deploy.tools.parsers import HermesParser, Llama3JsonParser, MistralParser
from tide_core.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format: its parser, and the text that stands around calls, as a model is made to write them."""

    name: str
    parser: type[ToolParser]
    before: tuple[str, ...] = ()
    """Text before a call. A part that is a marker may be a token of its own."""
    after: tuple[str, ...] = ()
    between: str = ""
    """Text between two calls."""
    arguments_key: str = "arguments"
    as_list: bool = False
    """Whether all calls are one JSON list after a single `before`."""
    name_end: tuple[str, ...] | None = None
    """Text between name and arguments where these are not one JSON object."""


HERMES = ToolFormat(
    "hermes",
    HermesParser,
    before=(HermesParser.start, "\n"),
    after=("\n", HermesParser.end),
    between="\n",
)
LLAMA3_JSON = ToolFormat("llama3_json", Llama3JsonParser, between="; ", arguments_key="parameters")
MISTRAL = ToolFormat("mistral", MistralParser, before=(MistralParser.start,), as_list=True)
FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL)}

_OTHER_FORMATS = ("<function=", "<arg_key>")
"""Templates with these have `<tool_call>` too, but no JSON in it."""
_LLAMA3_HEADER = "<|start_header_id|>"


def tool_format(setting: str | None, chat_template: str | Mapping[str, str] | None) -> ToolFormat | None:
    """The format that the setting `tool_parser` names, or the one that the model's chat template shows; None if it
    shows none that is known here. A model may have several templates, by name."""
    if setting is not None and setting not in FORMATS:
        raise ConfigError("tool_parser", setting, f"one of {', '.join(FORMATS)}")
    if isinstance(chat_template, Mapping):
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    text = chat_template or ""
    found = _shown_in(text) if setting is None else FORMATS[setting]
    if found is MISTRAL and MistralParser.args in text:
        return replace(found, as_list=False, name_end=(MistralParser.args,))
    return found


def _shown_in(template: str) -> ToolFormat | None:
    if "tools" not in template:
        return None
    if HermesParser.start in template:
        return None if any(mark in template for mark in _OTHER_FORMATS) else HERMES
    if MistralParser.start in template:
        return MISTRAL
    if Llama3JsonParser.tag in template or _LLAMA3_HEADER in template:
        return LLAMA3_JSON
    return None


def required_format(found: ToolFormat | None, num_tools: int) -> ToolFormat:
    """The format for a request that may call tools; refused where none is known."""
    if found is None:
        expected = (
            "no tools: the model's chat template shows no format of calls that is known here; "
            f"the server's setting tool_parser ({', '.join(FORMATS)}) can name it"
        )
        raise RequestError("tools", f"{num_tools} tools", expected)
    return found

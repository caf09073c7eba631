"""What the answers to one chat need because of its tools: a parser of calls, and parameters of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from deploy.tools.call_parser import ToolParser
from deploy.tools.formats import ToolFormat, required_format
from deploy.tools.grammar import forced_call
from deploy.tools.plan import ToolPlan
from tide_core.errors import RequestError
from tide_core.request import Grammar


class Markers(Protocol):
    """What is needed of the tokenizer."""

    def added_id(self, text: str) -> int | None: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallReading:
    """How calls are found in the answers of one request."""

    parser_class: type[ToolParser] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    one_call: bool = False
    """Whether an answer has one call at most."""

    def parser(self) -> ToolParser | None:
        """For one answer; None where all of it is content."""
        return None if self.parser_class is None else self.parser_class(one_call=self.one_call)


def call_reading(
    plan: ToolPlan, found: ToolFormat | None, tokenizer: Markers, *, other_grammar: Grammar | None
) -> CallReading:
    """`found`: the format of the model's calls. Required calls are forced by a grammar, which leaves no place for
    `other_grammar`."""
    if not plan.reads_calls:
        return CallReading()
    tool_format = required_format(found, len(plan.template_tools or ()))
    parser = tool_format.parser
    ids = {marker: token_id for marker in parser.markers if (token_id := tokenizer.added_id(marker)) is not None}
    params: dict[str, Any] = {}
    if any(map(tokenizer.is_special, ids.values())):
        params["skip_special_tokens"] = False  # else the text would not show where a call begins
    if plan.forced:
        if other_grammar is not None:
            raise RequestError("tool_choice", "a call", f"no {other_grammar.field} with a call that is required")
        lark = forced_call(tool_format, plan.forced, one_call=plan.one_call, token_ids=ids)
        params["grammar"] = Grammar("lark", lark, "tools")
    return CallReading(parser, params, plan.one_call)

"""Convert messages of `tide.v1` to calls, and counts of the engine to messages. Pure functions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deploy.answer import Call
from deploy.strict import json_body
from deploy.tools.plan import (
    AUTO,
    MAX_ARGUMENTS_DEPTH,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    Tool,
    ToolPlan,
    arguments_object,
    is_tool_name,
    tool_plan,
)
from tide.v1 import tide_pb2 as pb
from tide_core.errors import RequestError
from tide_core.request import Chat, Grammar
from tide_core.stats import EngineStats

if TYPE_CHECKING:
    from tide_core.engine.engine import Prompt

MODES = {"full": pb.MODE_FULL, "verified": pb.MODE_VERIFIED, "bounded": pb.MODE_BOUNDED, "fast": pb.MODE_FAST}
MODE_NAMES = {number: name for name, number in MODES.items()}
TOOL_MODES = {
    pb.TOOL_MODE_UNSPECIFIED: AUTO,
    pb.TOOL_MODE_AUTO: AUTO,
    pb.TOOL_MODE_NONE: NONE,
    pb.TOOL_MODE_REQUIRED: REQUIRED,
}
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
)


def call_of(request: pb.GenerateRequest) -> Call:
    """The call in a request; the service checks its values."""
    return Call(
        prompt=_prompt(request),
        params={**_sampling(request.sampling_params), **_exits(request.exits)},
        request_id=request.request_id or None,
        model=request.model or None,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    given = [name for name in ("prompt", "prompt_ids", "chat") if request.HasField(name)]
    if len(given) != 1:
        raise RequestError("prompt", ", ".join(given) or "nothing", "exactly one of prompt, prompt_ids and chat")
    if given == ["prompt"]:
        return request.prompt
    if given == ["prompt_ids"]:
        if not request.prompt_ids.ids:
            raise RequestError("prompt_ids", "no ids", "at least one token id")
        return list(request.prompt_ids.ids)
    return chat_of(request.chat)


def chat_of(chat: pb.Chat) -> Chat:
    if not chat.messages:
        raise RequestError("chat.messages", "no messages", "at least one message")
    return Chat([_message(message) for message in chat.messages], tuple(tool.for_template() for tool in _tools(chat)))


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """As the chat template expects it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "assistant" and message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        found |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
    return found


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_object(call.arguments)}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _tools(chat: pb.Chat) -> list[Tool]:
    if len(chat.tools) > MAX_TOOLS:
        raise RequestError("chat.tools", f"{len(chat.tools)} tools", f"at most {MAX_TOOLS}")
    return [_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(chat.tools)]


def _tool(tool: pb.Tool, field: str) -> Tool:
    if not is_tool_name(tool.name):
        raise RequestError(f"{field}.name", tool.name[:64], "1..256 characters without space, quotes and brackets")
    parameters = None
    if tool.parameters:
        try:
            parameters = json_body.parse(tool.parameters.encode(), MAX_ARGUMENTS_DEPTH)
        except RequestError as error:
            raise RequestError(f"{field}.parameters", error.value, error.expected) from None
        if not isinstance(parameters, dict):
            raise RequestError(f"{field}.parameters", type(parameters).__name__, "a JSON object")
    return Tool(tool.name, tool.description or None, parameters, tool.strict)


def tools_of(request: pb.GenerateRequest) -> ToolPlan:
    """What the request asks of tools."""
    choice = request.tool_choice
    if choice.mode not in TOOL_MODES:
        raise RequestError("tool_choice.mode", choice.mode, f"one of {', '.join(pb.ToolMode.keys())}")
    if choice.name and choice.mode != pb.TOOL_MODE_UNSPECIFIED:
        raise RequestError("tool_choice", f"{pb.ToolMode.Name(choice.mode)} and a name", "one of mode and name")
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    return tool_plan(_tools(request.chat), TOOL_MODES[choice.mode], named=choice.name or None, parallel=parallel)


def num_choices(request: pb.GenerateRequest) -> int:
    return request.n if request.HasField("n") else 1


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    return values | {
        "logit_bias": dict(params.logit_bias),
        "stop": tuple(params.stop),
        "stop_ids": tuple(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "grammar": _grammar(params),
    }


def _grammar(params: pb.SamplingParams) -> Grammar | None:
    given = {name: getattr(params, name) for name in ("json_schema", "regex", "grammar") if params.HasField(name)}
    found = [Grammar(name, text, name) for name, text in given.items()]
    if params.choices:
        found.append(Grammar("choice", json.dumps(list(params.choices)), "choices"))
    if len(found) > 1:
        raise RequestError(found[0].field, found[1].field, "only one way to structure the output")
    return found[0] if found else None


def _exits(exits: pb.ExitParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(exits, name) for name in ("epsilon", "margin", "threshold", "min_layers") if exits.HasField(name)
    }
    if exits.mode != pb.MODE_UNSPECIFIED:
        if exits.mode not in MODE_NAMES:
            raise RequestError("mode", exits.mode, f"one of {', '.join(pb.Mode.keys())}")
        values["mode"] = MODE_NAMES[exits.mode]
    return values


def stats_of(stats: EngineStats) -> pb.GetExitStatsResponse:
    exits = stats.exits
    layers = {int(layer): count for layer, count in exits["exits_per_layer"].items()}
    return pb.GetExitStatsResponse(
        total_tokens=exits["total_tokens"],
        exited_tokens=exits["total_exited"],
        num_layers=exits["num_layers"],
        tokens_per_layer={**layers, exits["num_layers"]: exits["remaining_tokens"]},
        layers_per_token=exits["layers_per_token"],
        tokens_per_deep_pass=exits["tokens_per_deep_pass"],
        drafts=exits["drafts"],
        accepted=exits["accepted"],
        non_finite_scores=exits["non_finite_scores"],
        audits=[
            pb.AuditReport(
                contract=audit.contract,
                tenant=audit.tenant,
                epsilon=audit.epsilon,
                answers=audit.num_answers,
                mean_loss=audit.mean_loss,
                evidence=audit.evidence,
                delta=audit.delta,
                alarmed=audit.alarmed,
            )
            for audit in stats.audits
        ],
        answers_not_judged=stats.num_audits_dropped,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        artefact_digest=stats.artefact or "",
    )

"""LiteLLM, which calls many servers with one function."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.clients.features import Checks, Service, expect
from benchmarks.clients.openai_sdk import CITY, COLORS, PROMPT, QUESTION, WEATHER

check = Checks("litellm")


def _litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for a table of prices on the network
    import litellm

    litellm.telemetry = False
    return litellm


def _options(at: Service, **options: Any) -> dict[str, Any]:
    base = {"api_base": at.base_url, "api_key": "none", "max_retries": 0, "timeout": 240}
    return {**base, "max_tokens": 6, "temperature": 0, **options}


def _chat(at: Service, messages: Any = QUESTION, **options: Any) -> Any:
    return _litellm().completion(f"openai/{at.model}", messages=messages, **_options(at, **options))


def _text(at: Service, prompt: Any, **options: Any) -> Any:
    return _litellm().text_completion(prompt, f"text-completion-openai/{at.model}", **_options(at, **options))


@check("chat")
def chat(at: Service) -> None:
    answer = _chat(at)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens == 6, answer)
    known = _litellm().completion(f"hosted_vllm/{at.model}", messages=QUESTION, **_options(at))
    expect(known.choices[0].message.content == answer.choices[0].message.content, known)


@check("stream")
def stream(at: Service) -> None:
    chunks = list(_chat(at, stream=True))
    expect("".join(c.choices[0].delta.content or "" for c in chunks) == _chat(at).choices[0].message.content, chunks)


@check("second-turn")
def second_turn(at: Service) -> None:
    first = _chat(at).choices[0].message
    expect(_chat(at, [*QUESTION, first, {"role": "user", "content": "Why these?"}]).choices[0].message.content, first)


@check("stop")
def stop(at: Service) -> None:
    text = _chat(at, max_tokens=12).choices[0].message.content
    word = text.split()[2]
    cut = _chat(at, max_tokens=12, stop=[word]).choices[0]
    expect(cut.finish_reason == "stop" and cut.message.content == text[: text.index(word)], (text, cut))


@check("choices")
def choices(at: Service) -> None:
    expect(len(_chat(at, n=2, temperature=1, seed=7).choices) == 2, "another number")


@check("logprobs")
def logprobs(at: Service) -> None:
    answer = _chat(at, logprobs=True, top_logprobs=2)
    expect(len(answer.choices[0].logprobs.content) == 6, answer)


@check("usage")
def usage(at: Service) -> None:
    chunks = list(_chat(at, stream=True, stream_options={"include_usage": True}))
    expect([c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [6], chunks)


@check("completion")
def completion(at: Service) -> None:
    whole = _text(at, PROMPT).choices[0].text
    expect(whole and "".join(c.choices[0].text or "" for c in _text(at, PROMPT, stream=True)) == whole, whole)


@check("prompts")
def prompts(at: Service) -> None:
    both = _text(at, [PROMPT, "One, two,"]).choices
    expect(len(both) == 2 and both[0].text == _text(at, PROMPT).choices[0].text, both)


@check("echo")
def echo(at: Service) -> None:
    choice = _text(at, PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    expect(choice.text == PROMPT and choice.logprobs.token_logprobs[0] is None, choice)


@check("tools-auto")
def tools_auto(at: Service) -> None:
    choice = _chat(at, CITY, tools=[WEATHER]).choices[0]
    expect(choice.message.content or choice.message.tool_calls, choice)


@check("tools-required")
def tools_required(at: Service) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    [call] = _chat(at, CITY, **forced).choices[0].message.tool_calls
    expect(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call)
    deltas = [c.choices[0].delta.tool_calls for c in _chat(at, CITY, **forced, stream=True)]
    pieces = [piece.function.arguments or "" for some in deltas for piece in some or ()]
    expect("".join(pieces) == call.function.arguments, (pieces, call))


@check("tool-result")
def tool_result(at: Service) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    called = _chat(at, CITY, **forced).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called.tool_calls]
    expect(_chat(at, [*CITY, called, *results], tools=[WEATHER]).choices[0].finish_reason, called)


@check("schema")
def schema(at: Service) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLORS, "strict": True}}
    answer = _chat(at, max_tokens=40, response_format=wanted).choices[0]
    expect(json.loads(answer.message.content)["name"] in ("red", "blue"), answer)


@check("responses")
def responses(at: Service) -> None:
    options = {"api_base": at.base_url, "api_key": "none", "max_output_tokens": 6, "temperature": 0}
    whole = _litellm().responses(model=f"openai/{at.model}", input="Name a color.", **options)
    expect(whole.output[0].content[0].text, whole)
    events = _litellm().responses(model=f"openai/{at.model}", input="Name a color.", stream=True, **options)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == whole.output[0].content[0].text, text)


@check("errors")
def errors(at: Service) -> None:
    litellm = _litellm()
    refused: list[tuple[Any, dict[str, Any]]] = [
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "no-such-model"}),
    ]
    for kind, wrong in refused:
        options = _options(at, **{"model": at.model, **wrong})
        try:
            litellm.completion(f"openai/{options.pop('model')}", messages=QUESTION, **options)
        except kind:
            continue
        raise AssertionError(f"{wrong} was not refused")


@check("timeout")
def timeout(at: Service) -> None:
    litellm = _litellm()
    try:
        _chat(at, timeout=0.3, max_tokens=2000, extra_body={"ignore_eos": True})
    except litellm.Timeout:
        expect(_chat(at).choices, "no answer after it")
    else:
        raise AssertionError("no timeout")

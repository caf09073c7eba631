"""The OpenAI SDK for Python."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from benchmarks.clients.features import Checks, Service, expect

check = Checks("openai")
QUESTION = [{"role": "user", "content": "Name a color and a number."}]
PROMPT = "The capital of France is"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = [{"role": "user", "content": "How is the weather in Rome?"}]
COLORS: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}},
    "required": ["name"],
    "additionalProperties": False,
}


def _client(at: Service, **options: Any) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=at.base_url, api_key="none", **{"max_retries": 0, "timeout": 240, **options})


def _chat(at: Service, messages: Any = QUESTION, **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, **options}
    return _client(at).chat.completions.create(model=at.model, messages=messages, **options)


@check("models")
def models(at: Service) -> None:
    client = _client(at)
    expect([model.id for model in client.models.list()] == [at.model], "another list")
    expect(client.models.retrieve(at.model).id == at.model, "another model")


@check("chat")
def chat(at: Service) -> None:
    answer = _chat(at)
    expect(answer.choices[0].message.content, answer)
    expect(answer.choices[0].finish_reason == "length", answer)
    expect(answer.usage.completion_tokens == 6, answer)
    asked: Any = {"model": at.model, "messages": QUESTION, "max_tokens": 6, "temperature": 0}
    raw = _client(at).chat.completions.with_raw_response.create(**asked)
    expect(raw.status_code == 200 and raw.headers["content-type"] == "application/json", raw.headers)
    expect(raw.parse().choices[0].message.content == answer.choices[0].message.content, raw)
    expect(asyncio.run(_asynchronous(at, asked)) == [answer.choices[0].message.content] * 3, "another text")


async def _asynchronous(at: Service, asked: dict[str, Any]) -> list[str]:
    """The text of two answers at once, and of a stream."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=at.base_url, api_key="none", max_retries=0, timeout=240) as client:
        both = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(2)))
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return [*(answer.choices[0].message.content for answer in both), streamed]


@check("stream")
def stream(at: Service) -> None:
    chunks = list(_chat(at, stream=True))
    expect(len(chunks) > 1, chunks)
    expect("".join(c.choices[0].delta.content or "" for c in chunks) == _chat(at).choices[0].message.content, chunks)
    helper = _client(at).chat.completions.stream
    with helper(model=at.model, messages=QUESTION, extra_body={"guided_choice": ["red"]}) as events:
        expect(any(event.type == "content.delta" for event in events), "no delta")
        expect(events.get_final_completion().choices[0].message.content == "red", "another text")


@check("second-turn")
def second_turn(at: Service) -> None:
    first = _chat(at).choices[0].message
    expect(_chat(at, [*QUESTION, first, {"role": "user", "content": "Why these?"}]).choices[0].message.content, first)
    expect(_chat(at, [*QUESTION, first.model_dump(), *QUESTION]).choices[0].message.content, first)
    parts = [{"type": "text", "text": "Name a color "}, {"type": "text", "text": "and a number."}]
    as_parts = _chat(at, [{"role": "user", "content": parts}]).choices[0].message.content
    expect(as_parts == first.content, (as_parts, first))


@check("stop")
def stop(at: Service) -> None:
    text = _chat(at, max_tokens=12).choices[0].message.content
    word = text.split()[2]
    cut = _chat(at, max_tokens=12, stop=["no such text", word]).choices[0]
    expect(cut.finish_reason == "stop" and cut.message.content == text[: text.index(word)], (text, cut))


@check("choices")
def choices(at: Service) -> None:
    drawn = _chat(at, n=3, temperature=1, seed=7).choices
    expect([choice.index for choice in drawn] == [0, 1, 2], drawn)
    expect(len({choice.message.content for choice in drawn}) > 1, drawn)


@check("logprobs")
def logprobs(at: Service) -> None:
    tokens = _chat(at, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expect(len(tokens) == 6, tokens)
    for token in tokens:
        expect(token.logprob == token.top_logprobs[0].logprob <= 0 and len(token.top_logprobs) == 3, token)
        expect(bytes(token.bytes).decode(errors="replace") == token.token, token)
    chunks = list(_chat(at, logprobs=True, top_logprobs=3, stream=True))
    streamed = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    expect([token.token for token in streamed] == [token.token for token in tokens], streamed)
    asked: Any = {"model": at.model, "input": "Name a color.", "max_output_tokens": 6, "temperature": 0}
    included = _client(at).responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = included.output[0].content
    expect("".join(token.token for token in part.logprobs) == part.text, part)


@check("usage")
def usage(at: Service) -> None:
    chunks = list(_chat(at, stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6, chunks[-1])


@check("completion")
def completion(at: Service) -> None:
    asked: Any = {"model": at.model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    whole = _client(at).completions.create(**asked).choices[0]
    chunks = list(_client(at).completions.create(**asked, stream=True))
    expect(whole.text and "".join(chunk.choices[0].text for chunk in chunks) == whole.text, (whole, chunks))


@check("prompts")
def prompts(at: Service) -> None:
    asked = [PROMPT, "One, two,"]
    both = _client(at).completions.create(model=at.model, prompt=asked, max_tokens=4, temperature=0).choices
    second = _client(at).completions.create(model=at.model, prompt=asked[1], max_tokens=4, temperature=0).choices
    expect([choice.index for choice in both] == [0, 1] and both[1].text == second[0].text, (both, second))


@check("echo")
def echo(at: Service) -> None:
    asked: Any = {"model": at.model, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = _client(at).completions.create(**asked).choices[0]
    scores = choice.logprobs.token_logprobs
    expect(choice.text == PROMPT == "".join(choice.logprobs.tokens), choice)
    expect(scores[0] is None and all(score <= 0 for score in scores[1:]) and len(scores) > 1, scores)


@check("tools-auto")
def tools_auto(at: Service) -> None:
    choice = _chat(at, CITY, tools=[WEATHER]).choices[0]
    expect(choice.message.content or choice.message.tool_calls, choice)
    expect(_chat(at, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None, "a call")


@check("tools-required")
def tools_required(at: Service) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    choice = _chat(at, CITY, **forced).choices[0]
    [call] = choice.message.tool_calls
    expect(choice.finish_reason == "tool_calls" and call.function.name == "weather", choice)
    expect(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call)
    deltas = [c.choices[0].delta.tool_calls for c in _chat(at, CITY, **forced, stream=True)]
    pieces = [piece.function.arguments or "" for some in deltas for piece in some or ()]
    expect("".join(pieces) == call.function.arguments, (pieces, call))


@check("tool-result")
def tool_result(at: Service) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    called = (
        _chat(at, CITY, tools=[WEATHER], tool_choice=named, parallel_tool_calls=False, max_tokens=60).choices[0].message
    )
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called.tool_calls]
    expect(_chat(at, [*CITY, called, *results], tools=[WEATHER]).choices[0], called)


@check("schema")
def schema(at: Service) -> None:
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Color(BaseModel):
        name: Literal["red", "blue"]

    parsed = _client(at).chat.completions.parse(
        model=at.model, messages=QUESTION, max_tokens=40, temperature=0, response_format=Color
    )
    expect(parsed.choices[0].message.parsed.name in ("red", "blue"), parsed)
    asked: Any = {"model": at.model, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    with _client(at).chat.completions.stream(**asked, response_format=Color) as events:
        kinds = {event.type for event in events}
        expect("content.done" in kinds, kinds)
        expect(events.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed, parsed)
    tool = pydantic_function_tool(Color)
    with _client(at).chat.completions.stream(**asked, tools=[tool], tool_choice="required") as events:
        kinds = {event.type for event in events}
        expect("tool_calls.function.arguments.done" in kinds, kinds)
        [call] = events.get_final_completion().choices[0].message.tool_calls
        expect(call.function.parsed_arguments.name in ("red", "blue"), call)
    anything = _chat(at, max_tokens=60, response_format={"type": "json_object"}).choices[0]
    expect(anything.message.content.startswith("{"), anything)


@check("responses")
def responses(at: Service) -> None:
    from pydantic import BaseModel

    asked: Any = {"model": at.model, "instructions": "Be brief.", "input": "Name a color.", "max_output_tokens": 6}
    whole = _client(at).responses.create(**asked, temperature=0)
    expect(whole.output_text, whole)
    events = list(_client(at).responses.create(**asked, temperature=0, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == whole.output_text and events[-1].response.usage.output_tokens == 6, events[-1])
    history: Any = [{"role": "user", "content": "Name a color."}, *whole.output, *QUESTION]
    expect(_client(at).responses.create(**{**asked, "input": history}).output_text, "no second turn")

    class Color(BaseModel):
        name: Literal["red", "blue"]

    asked |= {"max_output_tokens": 40, "temperature": 0}
    parsed = _client(at).responses.parse(**asked, text_format=Color).output_parsed
    expect(parsed.name in ("red", "blue"), parsed)
    with _client(at).responses.stream(**asked, text_format=Color) as events:
        kinds = {event.type for event in events}
        expect({"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds, kinds)
        expect(events.get_final_response().output_parsed == parsed, parsed)


@check("errors")
def errors(at: Service) -> None:
    import openai

    refused: list[tuple[Any, dict[str, Any]]] = [
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
    ]
    for kind, wrong in refused:
        asked: Any = {"model": at.model, "messages": QUESTION, "max_tokens": 1, **wrong}
        try:
            _client(at).chat.completions.create(**asked)
        except kind as error:
            expect(error.body["message"] and error.body["type"], error.body)
        else:
            raise AssertionError(f"{wrong} was not refused")


@check("embeddings")
def embeddings(at: Service) -> None:
    import openai

    try:
        _client(at).embeddings.create(model=at.model, input="text")
    except openai.NotFoundError as error:
        expect(isinstance(error.body, dict) and error.body["message"], error)
    else:
        raise AssertionError("embeddings were not refused")


@check("timeout")
def timeout(at: Service) -> None:
    import openai

    try:
        _client(at, timeout=0.3).chat.completions.create(
            model=at.model, messages=QUESTION, max_tokens=2000, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        expect(_chat(at, max_tokens=1).choices, "no answer after it")
    else:
        raise AssertionError("no timeout")

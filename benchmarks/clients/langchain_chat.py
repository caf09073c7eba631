"""LangChain's package for OpenAI's API."""

from __future__ import annotations

from typing import Any

from benchmarks.clients.features import Checks, Service, expect
from benchmarks.clients.openai_sdk import COLORS, PROMPT, WEATHER

check = Checks("langchain-openai")
QUESTION = "Name a color and a number."


def _model(at: Service, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    options = {"max_tokens": 6, "temperature": 0, "max_retries": 0, "timeout": 240, **options}
    return ChatOpenAI(base_url=at.base_url, api_key="none", model=at.model, **options)  # type: ignore[call-arg, arg-type]


@check("chat")
def chat(at: Service) -> None:
    answer = _model(at).invoke(QUESTION)
    expect(answer.content and answer.usage_metadata["output_tokens"] == 6, answer)


@check("stream")
def stream(at: Service) -> None:
    chunks = list(_model(at).stream(QUESTION))
    expect("".join(chunk.text for chunk in chunks) == _model(at).invoke(QUESTION).content, chunks)


@check("second-turn")
def second_turn(at: Service) -> None:
    first = _model(at).invoke(QUESTION)
    expect(_model(at).invoke([("user", QUESTION), first, ("user", "Why these?")]).content, first)


@check("stop")
def stop(at: Service) -> None:
    text = _model(at, max_tokens=12).invoke(QUESTION).content
    word = text.split()[2]
    cut = _model(at, max_tokens=12).invoke(QUESTION, stop=[word]).content
    expect(cut == text[: text.index(word)], (text, cut))


@check("choices")
def choices(at: Service) -> None:
    from langchain_core.messages import HumanMessage

    [drawn] = _model(at, n=2, temperature=1, seed=7).generate([[HumanMessage(QUESTION)]]).generations
    expect(len(drawn) == 2, drawn)


@check("logprobs")
def logprobs(at: Service) -> None:
    answer = _model(at, logprobs=True, top_logprobs=2).invoke(QUESTION)
    expect(len(answer.response_metadata["logprobs"]["content"]) == 6, answer)


@check("usage")
def usage(at: Service) -> None:
    chunks = list(_model(at, stream_usage=True).stream(QUESTION))
    expect([c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata] == [6], chunks)


@check("completion")
def completion(at: Service) -> None:
    whole = _completions(at).invoke(PROMPT)
    expect(whole and "".join(_completions(at).stream(PROMPT)) == whole, whole)


@check("prompts")
def prompts(at: Service) -> None:
    both = _completions(at).generate([PROMPT, "One, two,"]).generations
    expect(len(both) == 2 and both[0][0].text == _completions(at).invoke(PROMPT), both)


def _completions(at: Service) -> Any:
    from langchain_openai import OpenAI

    return OpenAI(base_url=at.base_url, api_key="none", model=at.model, max_tokens=6, temperature=0, max_retries=0)  # type: ignore[call-arg, arg-type]


@check("tools-required")
def tools_required(at: Service) -> None:
    model = _model(at, max_tokens=60).bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False)
    [call] = model.invoke("How is the weather in Rome?").tool_calls
    expect(call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo"), call)
    joined: Any = None
    for chunk in model.stream("How is the weather in Rome?"):
        joined = chunk if joined is None else joined + chunk
    expect([one["args"] for one in joined.tool_calls] == [call["args"]], joined)


@check("tools-auto")
def tools_auto(at: Service) -> None:
    answer = _model(at).bind_tools([WEATHER]).invoke("How is the weather in Rome?")
    expect(answer.content or answer.tool_calls, answer)


@check("tool-result")
def tool_result(at: Service) -> None:
    from langchain_core.messages import ToolMessage

    model = _model(at, max_tokens=60)
    forced = model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    called = forced.invoke("How is the weather in Rome?")
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in called.tool_calls]
    history = [("user", "How is the weather in Rome?"), called, *results]
    expect(_model(at).bind_tools([WEATHER]).invoke(history).response_metadata["finish_reason"], called)


@check("schema")
def schema(at: Service) -> None:
    for method in ("json_schema", "function_calling"):
        model = _model(at, max_tokens=60).with_structured_output({"title": "Color", **COLORS}, method=method)
        answer = model.invoke("A color")
        expect(answer["name"] in ("red", "blue"), (method, answer))


@check("responses")
def responses(at: Service) -> None:
    model = _model(at, use_responses_api=True)
    whole = model.invoke(QUESTION)
    expect(whole.text, whole)
    expect("".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text, whole)
    expect(model.invoke([("user", QUESTION), whole, ("user", "Why?")]).text, "no second turn")


@check("errors")
def errors(at: Service) -> None:
    import openai

    try:
        _model(at, temperature=-1).invoke(QUESTION)
    except openai.BadRequestError as error:
        expect("temperature" in str(error), error)
    else:
        raise AssertionError("temperature -1 was not refused")


@check("timeout")
def timeout(at: Service) -> None:
    import openai

    try:
        _model(at, timeout=0.3, max_tokens=2000, extra_body={"ignore_eos": True}).invoke(QUESTION)
    except openai.APITimeoutError:
        expect(_model(at).invoke(QUESTION).content, "no answer after it")
    else:
        raise AssertionError("no timeout")

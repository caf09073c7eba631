"""Several choices for one request: n for each prompt, lists of prompts, and the prompt before the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deploy.answer import Call
from deploy.choices import outputs_of
from deploy.config.args import Limits
from deploy.failures import DeadlineError
from deploy.keys import Caller
from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import FOREVER, HEL, LO, USAGE, ScriptedEngine, call
from tide_core.errors import EngineBusyError
from tide_core.request import FinishReason, RequestOutput, SamplingParams

LONG = "the quick brown fox jumps over the lazy dog " * 4
BODY = {"model": "tiny", "prompt": LONG, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {**{k: v for k, v in BODY.items() if k != "prompt"}, "messages": [{"role": "user", "content": LONG}]}


@pytest.fixture(scope="module")
def service() -> Any:
    service = make_service(max_rows=3, max_queued=8)
    yield service
    service.engine.close()


@pytest.fixture
def http(service: Service) -> Http:
    return Http(service)


async def texts_of(http: Http, body: Any) -> list[str]:
    answer = (await http.ask("POST", "/v1/completions", body)).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


async def test_each_choice_is_the_answer_to_a_seed_of_its_own_and_the_first_to_the_given_one(http: Http) -> None:
    drawn = {**BODY, "temperature": 1.5, "max_tokens": 12, "tide": {"mode": "full"}}
    several = await texts_of(http, {**drawn, "seed": 5, "n": 3})
    alone = [(await texts_of(http, {**drawn, "seed": 5 + number}))[0] for number in range(3)]
    assert several == alone
    assert len(set(several)) == 3


async def test_choices_run_their_prompt_once(http: Http, service: Service) -> None:
    body = {**BODY, "prompt": "another " + LONG, "n": 4, "tide": {"mode": "full"}}
    num_before = service.engine.stats().num_prompt_tokens
    usage = (await http.ask("POST", "/v1/completions", body)).json["usage"]
    ran = service.engine.stats().num_prompt_tokens - num_before
    block = service.engine.config.block_size
    assert usage["prompt_tokens"] <= ran <= usage["prompt_tokens"] + 3 * block, "what fills no block runs again"
    assert usage["completion_tokens"] == 24


async def test_a_list_of_prompts_is_answered_in_its_order_whatever_its_form(http: Http) -> None:
    prompts = ["hello there", "a dog", LONG, "x"]
    alone = [(await texts_of(http, {**BODY, "prompt": prompt}))[0] for prompt in prompts]
    assert await texts_of(http, {**BODY, "prompt": prompts}) == alone
    ids = [(await http.ask("POST", "/tokenize", {"prompt": prompt})).json["tokens"] for prompt in prompts]
    assert await texts_of(http, {**BODY, "prompt": ids}) == alone
    twice = await texts_of(http, {**BODY, "prompt": prompts, "n": 2})
    assert twice == [text for text in alone for _ in range(2)]


async def test_usage_counts_every_prompt_once_and_all_choices(http: Http) -> None:
    prompts = ["hello there", "a dog"]
    counts = [(await http.ask("POST", "/tokenize", {"prompt": prompt})).json["count"] for prompt in prompts]
    usage = (await http.ask("POST", "/v1/completions", {**BODY, "prompt": prompts, "n": 3})).json["usage"]
    assert usage["prompt_tokens"] == sum(counts)
    assert usage["completion_tokens"] == 6 * 6
    assert usage["total_tokens"] == sum(counts) + 36


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_streamed_choices_join_to_the_whole_ones(http: Http, path: str, body: Any) -> None:
    asked = {**body, "n": 3, "temperature": 1.2, "seed": 3, "tide": {"mode": "full", "exit_layers": True}}
    whole = (await http.ask("POST", path, asked)).json
    events = (await http.ask("POST", path, {**asked, "stream": True, "stream_options": {"include_usage": True}})).events
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": events[-2]["usage"]["prompt_tokens_details"],
    }
    texts, reasons, layers = [""] * 3, [0] * 3, [0] * 3
    for event in events[:-2]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reasons[choice["index"]] += choice["finish_reason"] is not None
        layers[choice["index"]] += len(event.get("tide", {}).get("exit_layers", ()))
    assert texts == [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [1, 1, 1]
    assert layers == [len(choice["tide"]["exit_layers"]) for choice in whole["choices"]] == [6, 6, 6]
    assert "tide" not in whole, "each choice has its own"


async def test_a_list_longer_than_the_queue_is_answered(http: Http, service: Service) -> None:
    num = service.engine.config.max_rows + service.engine.config.max_queued + 5
    assert num <= service.limits.max_choices
    answered = await texts_of(http, {**BODY, "prompt": ["x"] * num, "max_tokens": 2})
    assert len(answered) == num
    assert len(set(answered)) == 1


async def test_an_echo_has_the_prompt_before_each_choice(http: Http) -> None:
    plain = await texts_of(http, {**BODY, "prompt": ["hello there", "a dog"], "n": 2})
    echoed = await texts_of(http, {**BODY, "prompt": ["hello there", "a dog"], "n": 2, "echo": True})
    assert echoed == [p + t for p, t in zip(["hello there"] * 2 + ["a dog"] * 2, plain, strict=True)]
    streamed = (
        await http.ask("POST", "/v1/completions", {**BODY, "prompt": "a dog", "echo": True, "stream": True})
    ).events
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == echoed[2]


async def test_an_echo_of_no_token_is_the_prompt(http: Http) -> None:
    body = {**BODY, "prompt": "a dog", "echo": True, "max_tokens": 0}
    answer = (await http.ask("POST", "/v1/completions", body)).json
    assert answer["choices"][0]["text"] == "a dog"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_an_echo_with_logprobs_scores_the_prompt_as_the_engine_does(http: Http, service: Service) -> None:
    ids = (await http.ask("POST", "/tokenize", {"prompt": LONG})).json["tokens"]
    asked = {**BODY, "prompt": ids, "echo": True, "logprobs": 3, "max_tokens": 2}
    choice = (await http.ask("POST", "/v1/completions", asked)).json["choices"][0]
    lists = choice["logprobs"]
    assert {len(column) for column in lists.values()} == {len(ids) + 2}
    (answer,) = service.engine.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=3, mode="full"))
    assert lists["token_logprobs"][: len(ids)] == [token.logprob for token in answer.prompt_logprobs]
    assert lists["token_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert lists["top_logprobs"][0] is None
    assert all(len(top) >= 1 for top in lists["top_logprobs"][1:])
    assert choice["text"].startswith(LONG)
    assert "".join(lists["tokens"]) == choice["text"]
    assert [
        choice["text"][offset:][: len(name)] for offset, name in zip(lists["text_offset"], lists["tokens"], strict=True)
    ] == lists["tokens"]
    alone = (await http.ask("POST", "/v1/completions", {**asked, "max_tokens": 0})).json["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == lists["token_logprobs"][: len(ids)]
    events = (await http.ask("POST", "/v1/completions", {**asked, "stream": True})).events[:-1]
    joined = [value for event in events for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == lists["token_logprobs"]


# How several answers end.


async def test_one_that_fails_ends_them_all_with_its_error() -> None:
    class Uneven(ScriptedEngine):
        def stream(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            self._script = (EngineBusyError("full"),) if prompt == "bad" else (HEL, FOREVER)
            return super().stream(prompt, *args, **kwargs)

    engine = Uneven()
    reply = await call(engine, {"prompt": ["good", "bad", "good"], "max_tokens": 2})
    assert reply.status == 429
    assert engine.num_open == 0


async def test_a_client_that_goes_ends_all_choices() -> None:
    engine, leave = ScriptedEngine(HEL, FOREVER), asyncio.Event()
    asked = asyncio.create_task(call(engine, {"prompt": "x", "n": 3, "stream": True}, leave=leave))
    while engine.num_open < 3:
        await asyncio.sleep(0)
    leave.set()
    await asked
    assert engine.num_open == 0


async def test_no_more_choices_run_than_the_engine_has_rows() -> None:
    class Counting(ScriptedEngine):
        most = 0

        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().stream(*args, **kwargs):
                self.most = max(self.most, self.num_open)
                yield output

    engine = Counting(HEL, LO)
    reply = await call(engine, {"prompt": ["x"] * 20, "max_tokens": 2})
    assert len(reply.json["choices"]) == 20
    assert engine.most == engine.config.max_rows


async def test_the_deadline_is_of_the_request_and_not_of_each_choice() -> None:
    class Stopping(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.aborted = asyncio.Event()

        def abort(self, request_id: str) -> bool:
            self.aborted.set()
            return True

        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            await self.aborted.wait()
            yield RequestOutput("r", (), FinishReason.ABORT, USAGE)

    service = Service(Stopping(), model="tiny", limits=Limits(max_timeout_s=50.0))  # type: ignore[arg-type]
    answer = service.begin(Call("x"), Caller())
    answer.started_at -= 60.0  # as if it had waited for a slot
    with pytest.raises(DeadlineError, match="longer than 50 s"):
        await anext(outputs_of(service, [answer], 1))

"""Fields of vLLM's that show ids and log-probabilities of a prompt, cut it, or keep what stopped the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import ScriptedEngine, call
from tide_core.request import SamplingParams

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY = {"model": "tiny", "prompt": "the cat sat on the mat", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello there"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: BODY,
    CHAT: {**{k: v for k, v in BODY.items() if k != "prompt"}, "messages": MESSAGES},
    RESPONSES: {**{k: v for k, v in BODY.items() if k != "prompt"}, "input": "hello there"},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture
def http(service: Service) -> Http:
    return Http(service)


async def prompt_ids(http: Http, path: str) -> list[int]:
    asked = {"prompt": BODY["prompt"]} if path == COMPLETIONS else {"messages": MESSAGES}
    ids: list[int] = (await http.ask("POST", "/tokenize", asked)).json["tokens"]
    return ids


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_ids_of_prompt_and_answer_come_when_asked_for_whole_and_streamed(http: Http, path: str) -> None:
    asked = {**BODIES[path], "return_token_ids": True, "n": 2, "tide": {"tokens": True}}
    ids = await prompt_ids(http, path)
    whole = (await http.ask("POST", path, asked)).json
    for choice in whole["choices"]:
        assert choice["token_ids"] == [token["id"] for token in choice["tide"]["tokens"]]
        assert len(choice["token_ids"]) == 5
    holders = whole["choices"] if path == COMPLETIONS else [whole]
    assert [holder["prompt_token_ids"] for holder in holders] == [ids] * len(holders)
    events = (await http.ask("POST", path, {**asked, "stream": True})).events[:-1]
    for index, choice in enumerate(whole["choices"]):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [i for piece in mine for i in piece.get("token_ids", ())] == choice["token_ids"]
    shown = [place["prompt_token_ids"] for e in events for place in (e, *e["choices"]) if "prompt_token_ids" in place]
    assert shown == [ids] * len(holders), "once for each"
    plain = (await http.ask("POST", path, BODIES[path])).json
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in {**plain, **plain["choices"][0]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_log_probabilities_of_the_prompt_are_those_of_the_engine(http: Http, service: Service, path: str) -> None:
    ids = await prompt_ids(http, path)
    answer = (await http.ask("POST", path, {**BODIES[path], "prompt_logprobs": 2})).json
    first, *others = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, mode="full")
    [alone] = service.engine.generate([ids], params)
    assert first is None
    for token, shown in zip(alone.prompt_logprobs[1:], others, strict=True):
        assert shown[str(token.token_id)]["logprob"] == token.logprob
        assert {int(key): value["logprob"] for key, value in shown.items() if value["rank"]} == dict(token.top_logprobs)
        assert [shown[str(token_id)]["rank"] for token_id, _ in token.top_logprobs] == [1, 2]
        assert all(isinstance(value["decoded_token"], str) for value in shown.values())
    assert answer["choices"][0]["logprobs"] is None


async def test_log_probabilities_of_the_prompt_stay_apart_from_those_of_the_answer(http: Http) -> None:
    asked = {**BODY, "prompt_logprobs": 1, "logprobs": 3}
    choice = (await http.ask("POST", COMPLETIONS, asked)).json["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 5
    assert {len(each) for each in choice["prompt_logprobs"][1:]} <= {1, 2}


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "logprobs": 2, "echo": True}, "prompt_logprobs"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 3, "echo": True}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
async def test_what_cannot_be_together_is_refused_by_name(http: Http, path: str, more: Any, field: str) -> None:
    reply = await http.ask("POST", path, {**BODIES[path], **more})
    assert (reply.status, reply.json["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_a_prompt_is_kept(http: Http, stream: bool) -> None:
    ids = await prompt_ids(http, COMPLETIONS)
    asked = {**BODY, "return_token_ids": True, "stream": stream}

    async def answered(more: Any) -> tuple[list[int], list[int]]:
        reply = await http.ask("POST", COMPLETIONS, {**asked, **more})
        choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
        return choices[0]["prompt_token_ids"], [i for choice in choices for i in choice["token_ids"]]

    cut, output = await answered({"truncate_prompt_tokens": 3})
    assert cut == ids[-3:]
    assert (cut, output) == await answered({"prompt": ids[-3:]})
    assert (await answered({"truncate_prompt_tokens": 10_000}))[0] == ids


@pytest.mark.parametrize("max_tokens", [7, None])
async def test_a_prompt_may_be_cut_to_what_leaves_place_for_the_answer(
    http: Http, service: Service, max_tokens: int | None
) -> None:
    long = {**BODIES[CHAT], "messages": [{"role": "user", "content": "z" * 400}], "max_tokens": max_tokens}
    assert (await http.ask("POST", CHAT, long)).status == 400
    usage = (await http.ask("POST", CHAT, {**long, "truncate_prompt_tokens": -1})).json["usage"]
    assert usage["total_tokens"] == service.engine.max_answer_tokens(0)
    assert usage["completion_tokens"] == (max_tokens or 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_stopped_the_text_is_its_end_when_asked_for(http: Http, path: str) -> None:
    def text_of(answer: Any) -> str:
        choice = answer["choices"][0]
        text: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        return text

    free = text_of((await http.ask("POST", path, {**BODIES[path], "max_tokens": 20})).json)
    stop = free[4:7]
    asked = {**BODIES[path], "max_tokens": 20, "stop": stop}
    without = text_of((await http.ask("POST", path, asked)).json)
    assert without == free[: free.index(stop)]
    answer = (await http.ask("POST", path, {**asked, "include_stop_str_in_output": True})).json
    assert text_of(answer) == without + stop
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids", "use_beam_search", "logits_processors"])
async def test_what_would_change_the_answer_and_is_not_there_is_refused_by_name(path: str, field: str) -> None:
    value = True if field == "use_beam_search" else ["x"]
    reply = await call(ScriptedEngine(), {**BODIES[path], field: value}, path=path)
    assert (reply.status, reply.json["error"]["param"], reply.json["error"]["code"]) == (400, field, "unsupported")
    assert (await call(ScriptedEngine(), {**BODIES[path], field: None}, path=path, strict=True)).status == 200

"""The HTTP API: OpenAI objects, whole and streamed, and errors in one envelope."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.policy import LivePolicy
from deploy.keys import Caller, KeyRing
from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.deploy.scripted import FOREVER, HEL, ScriptedEngine
from tide_core.stats import AuditSnapshot

BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def service() -> Any:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture
def http(service: Service) -> Http:
    return Http(service)


def streamed_text(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def test_a_completion_has_openais_shape_and_the_usage(http: Http) -> None:
    reply = await http.ask("POST", "/v1/completions", BODY)
    assert reply.status == 200
    answer = reply.json
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 6 + answer["usage"]["prompt_tokens"]
    assert answer["tide"]["mode"] == "verified"
    assert "exit_layers" not in answer["tide"], "returned only on request"


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_a_stream_joins_to_the_whole_answer_and_ends_with_done(http: Http, path: str, body: Any) -> None:
    whole = (await http.ask("POST", path, body)).json["choices"][0]
    text = whole.get("text") or whole["message"]["content"]
    reply = await http.ask("POST", path, {**body, "stream": True})
    events = reply.events
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert streamed_text(events) == text
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_usage_comes_last_in_a_stream_that_asks_for_it(http: Http, path: str, body: Any) -> None:
    reply = await http.ask("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *pieces, usage, done = reply.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(piece["usage"] is None for piece in pieces)


async def test_a_chat_begins_with_its_role(http: Http) -> None:
    first = (await http.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True})).events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"


async def test_tokens_tell_their_layer_score_and_audit_to_those_who_ask(http: Http, service: Service) -> None:
    asked = {**BODY, "max_tokens": 24, "tide": {"tokens": True, "exit_layers": True, "mode": "verified"}}
    tide = (await http.ask("POST", "/v1/completions", asked)).json["tide"]
    assert len(tide["tokens"]) == len(tide["exit_layers"]) == 24
    assert {token["audit"] for token in tide["tokens"]} == {"verified"}
    assert min(tide["exit_layers"]) < service.engine.describe().num_layers
    assert tide["artefact"] == service.engine.artefact_digest
    assert sum(tide["tokens_per_layer"].values()) == 24


async def test_logprobs_have_openais_shapes(http: Http) -> None:
    plain = (await http.ask("POST", "/v1/completions", {**BODY, "logprobs": 2})).json["choices"][0]["logprobs"]
    assert len(plain["tokens"]) == len(plain["token_logprobs"]) == len(plain["text_offset"]) == 6
    assert all(value <= 0 for value in plain["token_logprobs"])
    assert all(1 <= len(top) <= 2 for top in plain["top_logprobs"])
    asked = {**CHAT, "logprobs": True, "top_logprobs": 3}
    chat = (await http.ask("POST", "/v1/chat/completions", asked)).json["choices"][0]["logprobs"]["content"]
    assert len(chat) == 6
    assert all(len(token["top_logprobs"]) == 3 for token in chat)


async def test_sampling_fields_reach_the_engine(http: Http) -> None:
    greedy = (await http.ask("POST", "/v1/completions", BODY)).json["choices"][0]["text"]
    seeded = {**BODY, "temperature": 1.5, "seed": 5}
    one, two = [(await http.ask("POST", "/v1/completions", seeded)).json["choices"][0]["text"] for _ in range(2)]
    assert one == two != greedy
    forced = {**BODY, "logit_bias": {"9": 100}}
    ids = (await http.ask("POST", "/v1/completions", {**forced, "tide": {"tokens": True}})).json["tide"]["tokens"]
    assert {token["id"] for token in ids} == {9}


async def test_token_ids_are_a_prompt_too(http: Http) -> None:
    ids = (await http.ask("POST", "/tokenize", {"prompt": BODY["prompt"]})).json["tokens"]
    by_text = await http.ask("POST", "/v1/completions", BODY)
    by_ids = await http.ask("POST", "/v1/completions", {**BODY, "prompt": ids})
    assert by_ids.json["choices"][0]["text"] == by_text.json["choices"][0]["text"]


async def test_tokens_go_there_and_back(http: Http) -> None:
    there = (await http.ask("POST", "/tokenize", {"prompt": "hello there"})).json
    assert there["count"] == len(there["tokens"]) > 0
    back = (await http.ask("POST", "/detokenize", {"tokens": there["tokens"]})).json
    assert "hello" in back["prompt"]


async def test_a_client_can_count_tokens_as_the_model_does(http: Http, service: Service) -> None:
    """lm-eval's tokenizer: the names of special tokens, text without them, and the id of one alone."""
    info = (await http.ask("GET", "/tokenizer_info")).json
    assert info.keys() >= {"bos_token", "eos_token", "pad_token", "unk_token", "chat_template"}
    assert info["chat_template"] == service.engine.tokenizer.chat_template
    plain = {"add_special_tokens": False}
    [eos] = (await http.ask("POST", "/tokenize", {"prompt": info["eos_token"], **plain})).json["tokens"]
    assert service.engine.tokenizer.is_special(eos)
    inside = f"a {info['eos_token']}"
    ids = (await http.ask("POST", "/tokenize", {"prompt": inside, **plain})).json["tokens"]
    assert eos not in ids, "inside other text it is text"
    assert ids == service.engine.tokenizer.encode(inside, add_special_tokens=False)
    as_a_prompt = (await http.ask("POST", "/tokenize", {"prompt": info["eos_token"]})).json["tokens"]
    assert eos not in as_a_prompt[1:], "what /v1/completions would run"


async def test_the_model_is_listed_with_its_exits(http: Http) -> None:
    listed = (await http.ask("GET", "/v1/models")).json["data"][0]
    assert listed["id"] == "tiny"
    assert listed["tide"]["checkpoint_layers"]
    assert (await http.ask("GET", "/v1/models/tiny")).json == listed
    assert (await http.ask("GET", "/v1/models/other")).status == 404


async def test_every_name_of_the_model_is_listed_and_accepted_and_answers_have_the_first() -> None:
    service = make_service(other_names=["gpt-4o", "org/other"])
    try:
        http = Http(service)
        listed = (await http.ask("GET", "/v1/models")).json["data"]
        assert [each["id"] for each in listed] == ["tiny", "gpt-4o", "org/other"]
        for each in listed:
            assert (await http.ask("GET", f"/v1/models/{each['id']}")).json == each
            named = {"model": each["id"]}
            assert (await http.ask("POST", "/v1/completions", BODY | named)).json["model"] == "tiny"
            assert (await http.ask("POST", "/v1/chat/completions", CHAT | named)).json["model"] == "tiny"
            asked = {"input": "hello", "max_output_tokens": 2, **named}
            assert (await http.ask("POST", "/v1/responses", asked)).json["model"] == "tiny"
            assert (await http.ask("POST", "/tokenize", {"prompt": "x", **named})).status == 200
        refused = await http.ask("POST", "/v1/completions", BODY | {"model": "gpt-4"})
        assert (refused.status, refused.json["error"]["param"]) == (404, "model")
        assert "tiny or gpt-4o or org/other" in refused.json["error"]["message"]
    finally:
        service.engine.close()


async def test_health_and_version_and_exit_stats_answer(http: Http) -> None:
    assert (await http.ask("GET", "/health")).json == {"status": "ok"}
    assert (await http.ask("GET", "/version")).json["version"]
    stats = (await http.ask("GET", "/exit_stats")).json
    assert stats["policy_refused"] is None
    assert stats["total_tokens"] == stats["total_exited"] + stats["remaining_tokens"]


async def test_exit_stats_have_the_audits_of_each_tenant_and_contract(
    http: Http, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    audits = (AuditSnapshot("a1b2", 0.05, 40, 0.125, 1e30, 0.025, alarmed=True),)
    found = replace(service.engine.stats(), audits=audits, num_audits_dropped=3)
    monkeypatch.setattr(service.engine, "stats", lambda: found)
    stats = (await http.ask("GET", "/exit_stats")).json
    assert stats["contracts"] == [
        {
            "contract": "fast(0.05)",
            "tenant": "a1b2",
            "epsilon": 0.05,
            "answers": 40,
            "mean_loss": 0.125,
            "evidence": 1e30,
            "delta": 0.025,
            "alarmed": True,
        }
    ]
    assert stats["answers_not_judged"] == 3


UNSUPPORTED = [
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools.0.function"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
    ),
    ("/v1/completions", {**BODY, "guided_json": {"type": "objekt"}}, "guided_json"),
    ("/v1/completions", {**BODY, "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ("/v1/completions", {**BODY, "structured_outputs": {"choice": "red"}}, "structured_outputs.choice"),
    ("/v1/chat/completions", {**CHAT, "n": 0}, "n"),
    ("/v1/completions", {**BODY, "n": 1000000}, "n"),
    ("/v1/completions", {**BODY, "prompt": ["hello"] * 200, "n": 2}, "prompt"),
    ("/v1/completions", {**BODY, "prompt": []}, "prompt"),
    ("/v1/completions", {**BODY, "best_of": 3}, "best_of"),
    ("/v1/completions", {**BODY, "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        None,
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), UNSUPPORTED, ids=[str(case[2]) for case in UNSUPPORTED])
async def test_what_is_not_supported_is_refused_by_name(http: Http, path: str, body: Any, field: str | None) -> None:
    reply = await http.ask("POST", path, body)
    assert reply.status == 400
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error"
    if field is not None:
        assert error["param"] == field


SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
    "required": ["sure", "color"],
    "additionalProperties": False,
}
STRUCTURED = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "guided_json": {"guided_json": SCHEMA},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
}


@pytest.mark.parametrize("ask", STRUCTURED.values(), ids=STRUCTURED)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_output_follows_the_schema_however_it_is_asked_for(http: Http, path: str, body: Any, ask: Any) -> None:
    spaces = (await http.ask("POST", "/tokenize", {"prompt": "\n\t \r"})).json["tokens"]
    asked = {**body, **ask, "max_tokens": 60, "logit_bias": {str(one): -100 for one in spaces}}
    choice = (await http.ask("POST", path, asked)).json["choices"][0]
    text = choice.get("text") or choice["message"]["content"]
    assert choice["finish_reason"] == "length", "ignore_eos: true"
    found, _ = json.JSONDecoder().raw_decode(text)
    assert found.keys() == {"sure", "color"}


async def test_choices_and_expressions_bind_the_output(http: Http) -> None:
    body = {**BODY, "ignore_eos": False, "max_tokens": 20}
    chosen = (await http.ask("POST", "/v1/completions", {**body, "guided_choice": ["red", "blue"]})).json
    assert chosen["choices"][0]["text"] in ("red", "blue")
    assert chosen["choices"][0]["finish_reason"] == "stop"
    matched = (await http.ask("POST", "/v1/completions", {**body, "guided_regex": "[0-9]{3}-x"})).json
    assert re.fullmatch("[0-9]{3}-x", matched["choices"][0]["text"])
    grammar = {"guided_grammar": 'root ::= "yes" | "no"'}
    assert (await http.ask("POST", "/v1/completions", {**body, **grammar})).json["choices"][0]["text"] in ("yes", "no")


async def test_a_client_that_goes_before_its_answer_ends_the_request(http: Http, service: Service) -> None:
    data = json.dumps({**BODY, "max_tokens": 200}).encode()
    headers = [(b"content-type", b"application/json")]
    reply = await http.send("POST", "/v1/completions", headers, [data], gone=True)
    assert reply.status == 499
    assert service.num_open == 0


async def test_the_page_is_shut_in_by_its_policy(http: Http) -> None:
    reply = await http.ask("GET", "/playground")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert "http://" not in reply.body.decode()
    assert "https://" not in reply.body.decode()


async def test_the_start_page_links_what_is_there_and_needs_no_key(service: Service) -> None:
    with_playground = await Http(service).ask("GET", "/")
    assert with_playground.status == 200
    links = set(re.findall('href="([^"]*)"', with_playground.body.decode()))
    assert "playground" in links
    without = await Http(service, playground=False).ask("GET", "/")
    assert set(re.findall('href="([^"]*)"', without.body.decode())) == links - {"playground"}
    for path in links:
        assert (await Http(service).ask("GET", f"/{path}")).status == 200, path
    assert "default-src 'none'" in without.headers["content-security-policy"]


async def test_the_start_page_links_the_documentation_where_its_address_is_set(service: Service) -> None:
    address = "https://docs.example/tide?a=1&b=2"
    text = (await Http(service, docs_url=address).ask("GET", "/")).body.decode()
    assert '<a href="https://docs.example/tide?a=1&amp;b=2">Documentation</a>' in text
    assert "https://" not in (await Http(service).ask("GET", "/")).body.decode()


async def test_metrics_are_there_only_if_the_setting_is_on(service: Service) -> None:
    assert (await Http(service).ask("GET", "/metrics")).status == 404
    shown = await Http(service, metrics=lambda: b"tide_requests_total 1\n").ask("GET", "/metrics")
    assert shown.body == b"tide_requests_total 1\n"
    assert shown.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_the_load_is_the_number_of_open_answers() -> None:
    engine = ScriptedEngine(HEL, FOREVER)
    http = Http(Service(engine, model="tiny"))  # type: ignore[arg-type]
    running = asyncio.ensure_future(http.ask("POST", "/v1/completions", BODY))
    await engine.waits_forever.wait()
    assert (await http.ask("GET", "/load")).json == {"server_load": 1}
    running.cancel()
    await asyncio.wait([running])
    assert (await http.ask("GET", "/load")).json == {"server_load": 0}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_needs_neither_key_nor_body(
    service: Service, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(service, "keys", KeyRing({b"x" * 32: Caller("someone")}))
    reply = await Http(service).send(method, "/ping", [], [b""])
    assert (reply.status, reply.json) == (200, {"status": "ok"})


async def test_health_answers_head_requests(http: Http) -> None:
    reply = await http.ask("HEAD", "/health")
    assert reply.status == 200


async def test_a_page_of_an_allowed_origin_may_call_the_api_and_no_other(service: Service) -> None:
    ring = KeyRing({hashlib.sha256(b"k").digest(): Caller("someone")})
    http = Http(service, cors_origins=["https://chat.example"])
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    service.keys, before = ring, service.keys
    try:
        preflight = await http.ask("OPTIONS", "/v1/completions", headers=asks)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        refused = await http.ask("POST", "/v1/completions", BODY, headers={"origin": "https://chat.example"})
        assert refused.status == 401, "an allowed origin needs a key too"
        assert refused.headers["access-control-allow-origin"] == "https://chat.example", "so that the page can read why"
        other = await http.ask("OPTIONS", "/v1/completions", headers={**asks, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    finally:
        service.keys = before
    closed = await Http(service).ask("GET", "/health", headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in closed.headers


async def test_two_keys_at_once_are_refused(http: Http) -> None:
    headers = [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")]
    reply = await http.send("GET", "/v1/models", headers, [b""])
    assert reply.status == 400


async def test_models_lists_the_modes_of_the_callers_key(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing({hashlib.sha256(b"narrow").digest(): Caller("someone", modes=("full",))})
    monkeypatch.setattr(service, "keys", ring)
    reply = await Http(service).send("GET", "/v1/models", [(b"authorization", b"Bearer narrow")], [b""])
    assert reply.json["data"][0]["tide"]["modes"] == ["full"]


@pytest.mark.parametrize("prefix", ["", "/apps/tiny"])
async def test_health_alone_is_open_whatever_the_prefix(
    service: Service, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(service, "keys", KeyRing({b"x" * 32: Caller("someone")}))
    http = Http(service, playground=False)
    statuses = {
        path: (await http.send("GET", f"{prefix}{path}", [], [b""], prefix=prefix)).status
        for path in ("/health", "/v1/models", "/version", "/playground", "/health/x", "/nothing")
    }
    assert statuses.pop("/health") == 200
    assert set(statuses.values()) == {401}


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [2]})])
async def test_tokens_of_another_model_are_refused_by_name(http: Http, path: str, body: Any) -> None:
    assert (await http.ask("POST", path, {**body, "model": "tiny"})).status == 200
    reply = await http.ask("POST", path, {**body, "model": "other"})
    assert (reply.status, reply.json["error"]["param"]) == (404, "model")


async def test_modes_that_the_policy_forbids_are_not_listed(
    http: Http, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "policy", LivePolicy.read({"modes": ["full", "fast"]}))
    assert (await http.ask("GET", "/v1/models/tiny")).json["tide"]["modes"] == ["full", "fast"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_has_the_time_that_its_body_says(http: Http, stream: bool) -> None:
    reply = await http.ask("POST", "/v1/completions", {**BODY, "stream": stream, "tide": {"timeout_s": 1e-9}})
    assert (reply.status, reply.json["error"]["code"]) == (408, "deadline_exceeded")


async def test_a_chat_without_a_length_goes_on_to_the_room_there_is(http: Http, service: Service) -> None:
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    usage = (await http.ask("POST", "/v1/chat/completions", body)).json["usage"]
    assert usage["total_tokens"] == service.engine.max_model_len


async def test_a_wrong_method_is_told_the_right_ones(http: Http) -> None:
    reply = await http.ask("GET", "/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


async def test_nobody_on_the_way_may_keep_a_stream_or_hold_it_back(http: Http) -> None:
    headers = (await http.ask("POST", "/v1/completions", {**BODY, "stream": True})).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")

"""The HTTP guard: each limit at its edge, and one response to whatever is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from typing import Any

import pytest

from deploy.config.args import Limits
from deploy.http_api.guard import LARGE_BODY_BYTES, SLOW_S, Arriving, Guard
from deploy.keys import Caller, KeyRing
from deploy.service import Service
from deploy.strict import json_body
from tests.deploy.in_process import Http
from tests.deploy.scripted import ScriptedEngine
from tide_core.errors import EngineBusyError

JSON = (b"content-type", b"application/json")
BODY = json.dumps({"tokens": [1]}).encode()


def make_service(engine: ScriptedEngine | None = None, *, keys: KeyRing | None = None, **limits: Any) -> Service:
    return Service(engine or ScriptedEngine(), model="tiny", limits=Limits(**limits), keys=keys)  # type: ignore[arg-type]


def make_http(engine: ScriptedEngine | None = None, **settings: Any) -> Http:
    return Http(make_service(engine, **settings), playground=False)


@pytest.mark.parametrize(("number", "status"), [(4, 200), (5, 431)])
async def test_as_many_headers_as_the_limit_pass_and_one_more_is_refused(number: int, status: int) -> None:
    reply = await make_http(num_headers=4).send("GET", "/version", [(b"x", b"y")] * number, [b""])
    assert reply.status == status


@pytest.mark.parametrize(("size", "status"), [(1024, 200), (1025, 431)])
async def test_headers_of_as_many_bytes_as_the_limit_pass_and_one_more_is_refused(size: int, status: int) -> None:
    headers = [(b"names-count", b"y" * 500), (b"too", b"y" * (size - 514))]
    assert (await make_http(header_bytes=1024).send("GET", "/version", headers, [b""])).status == status


@pytest.mark.parametrize("declared", [True, False], ids=["with its length", "in pieces"])
@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413)])
async def test_a_body_of_the_limit_passes_and_one_byte_more_is_refused(size: int, status: int, declared: bool) -> None:
    body = BODY.ljust(size)
    headers = [JSON, (b"content-length", str(size).encode())] if declared else [JSON]
    reply = await make_http(body_bytes=100).send("POST", "/detokenize", headers, [body[:60], body[60:]])
    assert reply.status == status
    if status == 413:
        assert reply.json["error"]["code"] == "too_large"


@pytest.mark.parametrize("length", [b"101", b"9" * 5000])
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(length: bytes) -> None:
    http = make_http(body_bytes=100, body_timeout_s=60)
    assert (await http.send("POST", "/detokenize", [JSON, (b"content-length", length)], [])).status == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 415),
        ([(b"content-type", b"text/plain")], 415),
        ([(b"content-type", b"application/jsonp")], 415),
        ([(b"Content-Type", b" Application/JSON ; charset=utf-8")], 200),
        ([JSON, (b"content-encoding", b"gzip")], 415),
        ([JSON, (b"content-encoding", b"Identity")], 200),
    ],
    ids=str,
)
async def test_a_body_is_json_that_is_not_compressed(headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert (await make_http().send("POST", "/detokenize", headers, [BODY])).status == status


@pytest.mark.timeout(60)
async def test_a_body_that_does_not_come_is_waited_for_only_so_long() -> None:
    reply = await make_http(body_timeout_s=0.05).send("POST", "/detokenize", [JSON], [])
    assert reply.status == 408
    assert reply.json["error"]["code"] == "deadline_exceeded"


async def test_a_client_that_goes_while_it_sends_its_body_is_told_apart_from_a_bad_body() -> None:
    assert (await make_http().send("POST", "/detokenize", [JSON], [], gone=True)).status == 499


@pytest.mark.parametrize(("depth", "status"), [(5, 200), (4, 400)])
async def test_a_body_may_be_as_deep_as_the_limit(depth: int, status: int) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    body = {"messages": [message], "max_tokens": 2}
    reply = await make_http(json_depth=depth).ask("POST", "/v1/chat/completions", body)
    assert reply.status == status


async def test_a_busy_engine_says_when_to_come_again() -> None:
    reply = await make_http(ScriptedEngine(EngineBusyError("full"))).ask("POST", "/v1/completions", {"prompt": "x"})
    assert reply.status == 429
    assert int(reply.headers["retry-after"]) >= 1


async def test_who_comes_without_a_key_is_told_how_to_send_one() -> None:
    http = make_http(keys=KeyRing({b"x" * 32: Caller("someone")}))
    refused = await http.ask("GET", "/v1/models")
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"


async def test_a_request_runs_as_the_holder_of_its_key() -> None:
    holder = Caller("team-a", "salt", modes=("full",))
    http = make_http(keys=KeyRing({hashlib.sha256(b"tide-one").digest(): holder}))
    headers = {"authorization": "Bearer tide-one"}
    body = {"prompt": "x", "max_tokens": 2, "tide": {"mode": "fast"}}
    refused = await http.ask("POST", "/v1/completions", body, headers=headers)
    assert (refused.status, refused.json["error"]["param"]) == (403, "mode")
    assert (await http.ask("POST", "/v1/completions", {**body, "tide": {}}, headers=headers)).status == 200


async def test_an_answer_that_breaks_after_it_began_gets_no_second_beginning() -> None:
    sent: list[Any] = []

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(breaks, service=make_service(), open_paths=frozenset())
    scope = {"type": "http", "method": "GET", "path": "/version", "root_path": "", "headers": []}
    with pytest.raises(ZeroDivisionError):
        await guard(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


@pytest.mark.timeout(60)
async def test_of_many_slow_bodies_the_oldest_are_cut_off_early_and_a_few_get_the_whole_time() -> None:
    service = make_service(slow_bodies=3, body_timeout_s=3600)
    arriving, cut, begun = Arriving(service.limits), [], asyncio.get_running_loop().time()

    async def wait(number: int) -> None:
        try:
            async with arriving.timeout():
                await asyncio.Event().wait()
        except TimeoutError:
            cut.append(number)

    tasks = [asyncio.ensure_future(wait(number)) for number in range(10)]
    await asyncio.wait(tasks[:7])
    assert sorted(cut) == list(range(7))
    assert asyncio.get_running_loop().time() - begun >= SLOW_S
    assert not any(task.done() for task in tasks[7:])
    for task in tasks[7:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with arriving.timeout():
        assert len(arriving._patient) == 1, "whoever has ended is forgotten"


async def test_a_large_body_is_parsed_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parse = [], json_body.parse

    def watched(data: bytes, depth: int) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(data, depth)

    monkeypatch.setattr(json_body, "parse", watched)
    for size in (LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1):
        reply = await make_http().send("POST", "/detokenize", [JSON], [BODY.ljust(size)])
        assert reply.status == 200
    assert threads == [True, False]


async def test_a_body_of_very_many_fields_is_refused() -> None:
    body = json.dumps({"prompt": "x", **{f"field{number}": 1 for number in range(100_000)}}).encode()
    reply = await make_http().send("POST", "/v1/completions", [JSON], [body])
    assert reply.status == 400
    assert "fields" in reply.json["error"]["message"]

"""Streams that are left early, closed, or read again; clients that are closed under them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.client import scripted
from tests.client.scripted import PATIENCE_S, TEXT, GrpcServer, Script, fails, hangs
from tests.client.test_resume import answers
from tide_client import (
    AsyncStream,
    AsyncTideClient,
    BrokenStreamError,
    StatusError,
    TideClient,
    TideClientError,
    Token,
    settings,
)

LONG_PAUSE_S = 100.0
"""Below the deadline of a call, so that the pause is made."""


def test_leaving_the_with_of_a_stream_ends_it_on_the_server(server: GrpcServer, script: Script) -> None:
    script.acts.append(scripted.never_ends)
    with TideClient(server.address) as client:
        with client.stream("Say") as stream:
            assert next(stream).text == "The"
            assert stream.request_id == "r-1"
        assert script.ends.get(timeout=PATIENCE_S) == "gone"
        assert list(stream) == []
        with pytest.raises(TideClientError, match="no answer yet"):
            _ = stream.answer


async def test_leaving_the_with_of_an_async_stream_ends_it_on_the_server(server: GrpcServer, script: Script) -> None:
    script.acts.append(scripted.never_ends)
    async with AsyncTideClient(server.address) as client:
        async with client.stream("Say") as stream:
            assert (await anext(stream)).text == "The"
            assert stream.request_id == "r-1"
        assert await asyncio.to_thread(script.ends.get, timeout=PATIENCE_S) == "gone"
        assert [token async for token in stream] == []
        with pytest.raises(TideClientError, match="no answer yet"):
            _ = stream.answer


def test_a_loop_that_was_left_goes_on_where_it_stopped_and_a_read_stream_has_no_more(server: GrpcServer) -> None:
    with TideClient(server.address) as client, client.stream("Say") as stream:
        for token in stream:
            first = token.text
            break
        assert first + "".join(token.text for token in stream) == TEXT
        assert list(stream) == []
        assert stream.answer.text == TEXT


async def test_an_async_loop_that_was_left_goes_on_where_it_stopped(server: GrpcServer) -> None:
    async with AsyncTideClient(server.address) as client, client.stream("Say") as stream:
        async for token in stream:
            first = token.text
            break
        assert first + "".join([token.text async for token in stream]) == TEXT
        assert [token async for token in stream] == []
        assert stream.answer.text == TEXT


def test_a_broken_stream_is_ended_on_the_server_and_broken_each_time_it_is_read(
    server: GrpcServer, script: Script
) -> None:
    script.acts.append(scripted.skips_and_hangs)
    with TideClient(server.address) as client:
        stream = client.stream("Say")
        with pytest.raises(BrokenStreamError):
            list(stream)
        assert script.ends.get(timeout=PATIENCE_S) == "gone"
        with pytest.raises(BrokenStreamError):
            list(stream)
        with pytest.raises(BrokenStreamError):
            _ = stream.answer


async def test_a_broken_async_stream_is_ended_on_the_server_and_broken_each_time_it_is_read(
    server: GrpcServer, script: Script
) -> None:
    script.acts.append(scripted.skips_and_hangs)
    async with AsyncTideClient(server.address) as client:
        stream = client.stream("Say")
        assert (await anext(stream)).text == "The"
        with pytest.raises(BrokenStreamError):
            await anext(stream)
        assert await asyncio.to_thread(script.ends.get, timeout=PATIENCE_S) == "gone"
        with pytest.raises(BrokenStreamError):
            await anext(stream)


def test_another_thread_may_close_a_stream_that_waits(server: GrpcServer, script: Script) -> None:
    script.acts.append(hangs(after=1))
    with TideClient(server.address) as client:
        stream = client.stream("Say")
        assert next(stream).text == "The"
        threading.Timer(0.2, stream.close).start()
        assert list(stream) == []
        assert script.ends.get(timeout=PATIENCE_S) == "gone"


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FIRST_PAUSE_S", LONG_PAUSE_S)
    monkeypatch.setattr(settings, "LONGEST_PAUSE_S", LONG_PAUSE_S)


@pytest.mark.usefixtures("long_pauses")
def test_a_stream_closed_while_it_waits_to_ask_again_does_not_ask(server: GrpcServer, script: Script) -> None:
    script.acts.append(fails("UNAVAILABLE"))
    with TideClient(server.address) as client:
        stream = client.stream("Say")
        closing = threading.Thread(target=lambda: (script.ends.get(timeout=PATIENCE_S), stream.close()))
        closing.start()
        before = time.monotonic()
        assert list(stream) == []
        assert time.monotonic() - before < LONG_PAUSE_S / 2
        closing.join()
    assert len(script.requests) == 1


@pytest.mark.usefixtures("long_pauses")
async def test_an_async_stream_closed_while_it_waits_to_ask_again_does_not_ask(
    server: GrpcServer, script: Script
) -> None:
    script.acts.append(fails("UNAVAILABLE"))
    async with AsyncTideClient(server.address) as client:
        stream = client.stream("Say")

        async def close() -> None:
            await asyncio.to_thread(script.ends.get, timeout=PATIENCE_S)
            stream.close()

        closing = asyncio.create_task(close())
        async with asyncio.timeout(LONG_PAUSE_S / 2):
            assert [token async for token in stream] == []
        await closing
    assert len(script.requests) == 1


@pytest.mark.usefixtures("long_pauses")
def test_a_pause_that_would_outlast_the_deadline_is_not_made(server: GrpcServer, script: Script) -> None:
    script.acts.append(fails("UNAVAILABLE"))
    with (
        TideClient(server.address, timeout_s=LONG_PAUSE_S / 2) as client,
        pytest.raises(StatusError, match="UNAVAILABLE"),
    ):
        client.generate("Say")
    assert len(script.requests) == 1


async def test_another_task_may_close_a_stream_that_waits(server: GrpcServer, script: Script) -> None:
    script.acts.append(hangs(after=1))
    async with AsyncTideClient(server.address) as client:
        stream = client.stream("Say")
        assert (await anext(stream)).text == "The"
        asyncio.get_running_loop().call_later(0.2, stream.close)
        assert [token async for token in stream] == []
        assert await asyncio.to_thread(script.ends.get, timeout=PATIENCE_S) == "gone"


async def test_an_async_stream_closed_while_it_resumes_starts_no_call(server: GrpcServer, script: Script) -> None:
    script.acts.append(answers(dies_after=3))
    asked, go_on = threading.Event(), threading.Event()
    script.on_tokenize = lambda: (asked.set(), go_on.wait(PATIENCE_S))
    async with AsyncTideClient(server.address, resume=True) as client:
        stream, started = client.stream("Say"), list[str]()
        start = stream._start

        def noted(method: str, *rest: Any) -> Any:
            started.append(method)
            return start(method, *rest)

        stream._start = noted
        reading = asyncio.create_task(_all_of(stream))
        assert await asyncio.to_thread(asked.wait, PATIENCE_S)
        stream.close()
        go_on.set()
        assert len(await reading) == 3
    assert started == ["Tokenize"]


async def _all_of(stream: AsyncStream) -> list[Token]:
    return [token async for token in stream]


async def test_a_cancelled_task_ends_its_stream_on_the_server_and_is_cancelled(
    server: GrpcServer, script: Script
) -> None:
    script.acts.append(hangs(after=1))
    async with AsyncTideClient(server.address) as client:
        stream = client.stream("Say")
        assert (await anext(stream)).text == "The"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.2)
        assert await asyncio.to_thread(script.ends.get, timeout=PATIENCE_S) == "gone"
        with pytest.raises(TideClientError, match="cancelled"):
            await anext(stream)


@pytest.mark.parametrize("after", [0, 1], ids=["before the first token", "after it"])
def test_closing_the_client_ends_its_streams_with_an_error(server: GrpcServer, script: Script, after: int) -> None:
    script.acts.append(hangs(after=after))
    client = TideClient(server.address)
    stream = client.stream("Say")
    closing = threading.Thread(target=lambda: (script.until_asked(), client.close()))
    closing.start()
    with pytest.raises(TideClientError, match=r"[Cc]losed"):
        list(stream)
    closing.join()
    with pytest.raises(TideClientError, match="this client is closed"):
        client.generate("Say")


async def test_closing_the_async_client_ends_its_calls_with_an_error(server: GrpcServer, script: Script) -> None:
    script.acts.extend([hangs(), hangs()])
    client = AsyncTideClient(server.address)
    stream = client.stream("Say")
    assert (await anext(stream)).text == "The"
    answer = asyncio.create_task(client.generate("Say"))
    await asyncio.to_thread(script.until_asked, 2)
    await client.close()
    with pytest.raises(TideClientError, match="cancelled"):
        await anext(stream)
    with pytest.raises(TideClientError, match="closed"):
        await answer

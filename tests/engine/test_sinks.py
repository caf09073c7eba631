"""The way out of the loop: every output once, in order, and few hand-overs per step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.factories import make_request
from tide_core.engine.loop import EngineLoop
from tide_core.engine.sinks import AnswerSink, AsyncSink, ThreadSink
from tide_core.errors import RequestError
from tide_core.request import FinishReason, Request, RequestOutput, TokenOutput

NUM_TOKENS = 5
NAMES = ("a", "b", "c")


class ReadyCore:
    """Every step gives each request one token, from the moment `expected` of them are there."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._rows: dict[str, int] = {}
        self._last_step = 0

    @property
    def has_work(self) -> bool:
        return len(self._rows) >= self._expected or (self._last_step > 0 and bool(self._rows))

    def add(self, request: Request) -> None:
        self._rows[request.request_id] = 0

    def abort(self, request_id: str) -> RequestOutput | None:
        return RequestOutput(request_id, (), FinishReason.ABORT) if self._rows.pop(request_id, -1) >= 0 else None

    def advance(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        deliver(self._step())

    def emit(self) -> list[RequestOutput]:
        """Nothing is pending after a step."""
        return []

    def _step(self) -> list[RequestOutput]:
        self._last_step += 1
        outputs = []
        for request_id in list(self._rows):
            self._rows[request_id] += 1
            ends = self._rows[request_id] == NUM_TOKENS
            outputs.append(token_of(request_id, self._last_step, FinishReason.LENGTH if ends else None))
            if ends:
                del self._rows[request_id]
        return outputs

    def check_idle(self) -> None:
        """Nothing is held."""


def token_of(request_id: str, number: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id, (TokenOutput(number, str(number), 1),), reason)


def start(expected: int) -> tuple[EngineLoop, Any]:
    core: Any = ReadyCore(expected)
    return EngineLoop(core, max_open=expected), core


def close(loop: EngineLoop) -> None:
    loop.close()
    assert loop._death is None


def test_a_thread_that_waits_for_several_requests_gets_each_step_at_once_and_in_order() -> None:
    puts: list[int] = []

    class Counting(ThreadSink):
        def put(self, outputs: Sequence[RequestOutput]) -> None:
            puts.append(len(outputs))
            super().put(outputs)

    loop, core = start(len(NAMES))
    sink = Counting()
    loop.submit([make_request(request_id=name) for name in NAMES], sink, core)
    got = [sink.get() for _ in range(NUM_TOKENS * len(NAMES))]
    close(loop)
    assert [output.request_id for output in got] == [*NAMES] * NUM_TOKENS
    assert [output.tokens[0].token_id for output in got[::3]] == [1, 2, 3, 4, 5]
    assert [output.request_id for output in got if output.finished] == [*NAMES]
    assert puts == [len(NAMES)] * NUM_TOKENS


def test_requests_handed_over_together_begin_with_the_same_step() -> None:
    """However soon the engine's thread runs: between two of them it never does."""

    class Eager(ReadyCore):
        def _step(self) -> list[RequestOutput]:
            started.append(len(self._rows))
            return super()._step()

    names, started = [str(number) for number in range(200)], list[int]()
    core: Any = Eager(1)
    loop, sink = EngineLoop(core, max_open=len(names)), AnswerSink()
    assert loop.submit([make_request(request_id=name) for name in names], sink, core) == len(names)
    for _ in names:
        sink.get()
    close(loop)
    assert started == [len(names)] * NUM_TOKENS


def test_of_requests_handed_over_together_the_first_have_the_free_slots() -> None:
    loop, core = start(len(NAMES))
    sink = AnswerSink()
    waiting = [make_request(request_id=name) for name in (*NAMES, "late")]
    assert loop.submit(waiting, sink, core) == len(NAMES)
    got = [ended for _ in NAMES if (ended := sink.get()) is not None]
    close(loop)
    assert [last.request_id for last, _ in got] == [*NAMES]
    assert sink.get(timeout=0.01) is None


def test_none_is_taken_of_requests_handed_over_together_when_one_has_the_id_of_an_open_one() -> None:
    loop, core = start(len(NAMES))
    loop.submit([make_request(request_id="a")], ThreadSink(), core)
    with pytest.raises(RequestError, match="request_id"):
        loop.submit([make_request(request_id=name) for name in ("b", "a")], ThreadSink(), core)
    assert loop.num_open == 1
    close(loop)


def test_a_thread_that_wants_whole_answers_is_not_woken_before_one_has_ended() -> None:
    sink = AnswerSink()
    sink.put([token_of("a", 1), token_of("b", 1)])
    sink.put([token_of("a", 2), token_of("b", 2)])
    assert sink.get(timeout=0.01) is None
    sink.put([token_of("a", 3), token_of("b", 3, FinishReason.LENGTH)])
    ended = sink.get()
    assert ended is not None
    last, tokens = ended
    assert last.request_id == "b"
    assert last.finish_reason is FinishReason.LENGTH
    assert [token.token_id for token in tokens] == [1, 2, 3]
    assert sink.get(timeout=0.01) is None, "the other goes on"


def test_a_thread_that_wants_whole_answers_gets_each_one_once_with_all_its_tokens() -> None:
    loop, core = start(len(NAMES))
    sink = AnswerSink()
    loop.submit([make_request(request_id=name) for name in NAMES], sink, core)
    got = [ended for _ in NAMES if (ended := sink.get()) is not None]
    close(loop)
    assert sorted(last.request_id for last, _ in got) == [*NAMES]
    assert [[token.token_id for token in tokens] for _, tokens in got] == [[1, 2, 3, 4, 5]] * len(NAMES)
    assert sink.get(timeout=0.01) is None, "nothing is left"


async def test_an_event_loop_is_woken_once_per_step_however_many_requests_wait_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event_loop = asyncio.get_running_loop()
    calls: list[object] = []
    wake = event_loop.call_soon_threadsafe
    monkeypatch.setattr(event_loop, "call_soon_threadsafe", lambda *args: (calls.append(args), wake(*args))[1])
    loop, core = start(len(NAMES))

    async def read(name: str) -> list[int]:
        sink, ids, finished = AsyncSink(event_loop), list[int](), False
        loop.submit([make_request(request_id=name)], sink, core)
        while not finished:
            output = await sink.get()
            ids += [token.token_id for token in output.tokens]
            finished = output.finished
        return ids

    assert await asyncio.gather(*map(read, NAMES)) == [[1, 2, 3, 4, 5]] * len(NAMES)
    assert len(calls) == NUM_TOKENS
    close(loop)


async def test_a_slow_reader_gets_all_that_waits_as_one_output_with_the_end_of_the_last() -> None:
    sink = AsyncSink(asyncio.get_running_loop())
    sink.put([token_of("r", 1)])
    sink.put([token_of("r", 2), token_of("r", 3, FinishReason.LENGTH)])
    got = await sink.get()
    assert [token.token_id for token in got.tokens] == [1, 2, 3]
    assert got.finish_reason is FinishReason.LENGTH


async def test_an_output_that_comes_when_the_reader_was_cancelled_is_there_for_the_next_one() -> None:
    sink = AsyncSink(asyncio.get_running_loop())
    reader = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    reader.cancel()
    sink.put([token_of("r", 1)])
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (await sink.get()).tokens[0].token_id == 1


async def test_a_reader_that_waits_is_woken_by_the_next_output() -> None:
    sink = AsyncSink(asyncio.get_running_loop())
    reader = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    assert not reader.done()
    sink.put([token_of("r", 1)])
    sink.put([token_of("r", 2)])
    assert [token.token_id for token in (await reader).tokens] == [1, 2]

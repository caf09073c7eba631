"""What goes wrong stays with the request that caused it, and every request gets exactly one end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.runners import HANG_S, Gate, Run, RunnerOf
from tests.factories import make_engine, make_parts, make_request, random_prompts
from tide_core.batch import ScheduledBatch, StepResult
from tide_core.engine.engine import Engine
from tide_core.engine.sinks import AnswerSink, ThreadSink
from tide_core.errors import ConfigError, EngineBusyError, EngineDeadError, EngineError, RequestError
from tide_core.kv.block_manager import BlockTable
from tide_core.request import FinishReason, RequestOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
POISON = 333


def engine_with(wrap: Callable[[Run], Run], **settings: Any) -> Engine:
    """An engine whose model runner is wrapped."""
    parts = make_parts(**settings)
    parts.core._runner = RunnerOf(wrap(parts.runner.run))
    return Engine.from_parts(parts)


def breaking_on_poison(run: Run) -> Run:
    """A runner that raises for any batch with a poisoned request in it."""

    def broken(batch: ScheduledBatch) -> StepResult:
        if any(POISON in row.request.prompt_ids for row in batch.rows):
            raise RuntimeError("a bad row")
        return run(batch)

    return broken


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "condition never held"
        time.sleep(0.005)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    (None, "prompt"),
    (b"bytes", "prompt"),
    (7, "prompt"),
    ([2, 384], r"prompt\[1\]"),
    ([-1], r"prompt\[0\]"),
    ([2**31], r"prompt\[0\]"),
    ([2, 3.0], r"prompt\[1\]"),
    ([2, True], r"prompt\[1\]"),
    ([[2]], r"prompt\[0\]"),
    ([2] * 256, "prompt"),
    ([2] * 250, "max_tokens"),
    ([{"role": "nobody", "content": "x"}], "messages"),
]


@pytest.mark.parametrize(("prompt", "field"), BAD_PROMPTS, ids=lambda v: repr(v)[:20])
def test_a_bad_prompt_is_refused_by_field_and_the_engine_goes_on(prompt: Any, field: str) -> None:
    with make_engine() as engine:
        with pytest.raises(RequestError, match=field):
            engine.make_request(prompt, PARAMS)
        assert len(engine.generate(["the cat"], PARAMS)[0].tokens) == 8
        assert engine.stats().blocks_owned == 0


def test_a_prompt_that_fits_the_model_but_not_the_pool_is_refused() -> None:
    with (
        make_engine(kv_memory_gib=0.0001, block_size=4) as engine,
        pytest.raises(RequestError, match=r"max_tokens.*the KV pool"),
    ):
        engine.generate(random_prompts(1, 9), LONG)


def test_one_bad_prompt_of_many_is_named_and_none_is_run() -> None:
    with make_engine() as engine:
        with pytest.raises(RequestError, match=r"prompts\[1\]\.prompt\[0\]"):
            engine.generate([[2, 3], [9999]], PARAMS)
        assert engine.stats().num_steps == 0


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", "a\x00b", 5, ["x"]])
@pytest.mark.parametrize("field", ["request_id", "cache_salt"])
def test_a_bad_request_id_or_salt_is_refused(field: str, name: Any) -> None:
    with make_engine() as engine, pytest.raises(RequestError, match=field):
        engine.make_request("the cat", PARAMS, **{field: name})


@pytest.mark.parametrize("prompts", [None, 7, b"bytes", {"role": "user", "content": "x"}])
def test_prompts_of_a_wrong_type_are_refused(prompts: Any) -> None:
    with make_engine() as engine, pytest.raises(RequestError, match="prompts"):
        engine.generate(prompts, PARAMS)


def test_parameters_of_a_wrong_type_are_refused() -> None:
    with make_engine() as engine, pytest.raises(RequestError, match="params"):
        engine.generate(["the cat"], {"max_tokens": 2})  # type: ignore[arg-type]


def test_a_tokenizer_with_tokens_the_model_lacks_is_refused_by_token() -> None:
    parts = make_parts()
    parts.tokenizer.encode = lambda text: [2, 384]  # type: ignore[method-assign]
    with Engine.from_parts(parts) as engine, pytest.raises(RequestError, match=r"prompt\[1\]"):
        engine.make_request("the cat", PARAMS)


def test_a_pool_larger_than_memory_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 4 TB")

    monkeypatch.setattr("tide_core.engine.pool.PagedKV", no_memory)
    with pytest.raises(ConfigError, match="kv_memory_gib"):
        make_engine()


def test_callers_of_generate_that_fill_the_queue_together_all_get_their_answers() -> None:
    answers: list[int] = []
    with make_engine(max_rows=1, max_queued=4) as engine:

        def call() -> None:
            answers.append(len(engine.generate(random_prompts(20, 5), PARAMS)))

        def call_when_a_slot_is_free() -> None:
            while True:
                try:
                    return call()
                except EngineBusyError:  # nothing of this call had been taken yet
                    time.sleep(0.01)

        threads = [threading.Thread(target=call_when_a_slot_is_free) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [20, 20, 20]


def test_prompts_that_found_the_queue_full_come_in_when_others_have_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when one of the same call has ended, which may take long."""
    monkeypatch.setattr("tide_core.engine.engine.BUSY_S", 0.005)
    gate = Gate()
    with engine_with(gate, max_rows=3, max_queued=2) as engine, gate:
        others = [engine.make_request("the cat", LONG) for _ in range(4)]
        for other in others:
            engine._loop.submit([other], ThreadSink(), engine._parts.core)
        submit, refused, came_in = engine._loop.submit, list[int](), list[int]()

        def watched(requests: Any, sink: Any, core: Any) -> int:
            try:
                came_in.append(submit(requests, sink, core))
            except EngineBusyError:
                refused.append(len(requests))
                if len(refused) == 1:
                    for other in others:
                        engine.abort(other.request_id)
                    gate.let(1)  # aborts are carried out between steps
                raise
            if len(came_in) == 2:
                gate.open()
            return came_in[-1]

        monkeypatch.setattr(engine._loop, "submit", watched)
        answers = engine.generate_as_completed([[1, 2], [3, 4]], [LONG, PARAMS])  # one place is left
        first, answer = next(answers)
        answers.close()  # type: ignore[attr-defined]
    assert refused
    assert came_in == [1, 1]
    assert first == 1, "the short one, though the long one was there before it"
    assert answer.finish_reason is FinishReason.LENGTH


def test_whoever_waits_for_answers_is_woken_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[object] = []

    class Counting(AnswerSink):
        def get(self, timeout: float | None = None) -> Any:
            woken.append(got := super().get(timeout))
            return got

    monkeypatch.setattr("tide_core.engine.engine.AnswerSink", Counting)
    with make_engine() as engine:
        answers = engine.generate(random_prompts(3, 5), PARAMS)
    assert sum(len(answer.tokens) for answer in answers) > 3
    assert len(woken) == 3


def test_two_open_requests_cannot_have_one_id() -> None:
    async def run(engine: Engine) -> None:
        first = engine.stream("the cat", LONG, request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match="request_id"):
            await anext(engine.stream("the dog", PARAMS, request_id="same"))
        await first.aclose()
        gate.open()
        wait_until(lambda: engine._loop.num_open == 0)
        assert [output async for output in engine.stream("the dog", PARAMS, request_id="same")]

    gate = Gate(1)
    with engine_with(gate) as engine, gate:
        asyncio.run(run(engine))


def test_a_full_queue_refuses_and_recovers() -> None:
    gate = Gate(1)
    with engine_with(gate, max_rows=1, max_queued=1) as engine, gate:
        streams = [engine.stream_blocking("the cat", LONG) for _ in range(2)]
        next(streams[0])
        second = threading.Thread(target=lambda: list(streams[1]))
        second.start()
        wait_until(lambda: engine._loop.num_open == 2)
        with pytest.raises(EngineBusyError, match="2"):
            next(engine.stream_blocking("the dog", PARAMS))
        streams[0].close()  # type: ignore[attr-defined]
        gate.open()
        second.join()
        assert engine.generate(["the dog"], PARAMS)[0].finish_reason is FinishReason.LENGTH


def test_a_reserved_place_is_kept_from_others_whether_a_request_is_in_it_or_not() -> None:
    with make_engine(max_rows=1, max_queued=2) as engine:

        async def reserved() -> list[RequestOutput]:
            return [output async for output in engine.stream("the cat", PARAMS, reserved=True)]

        assert engine.reserve(2) == 2
        others = engine.reserve(5)
        assert others == 1, "of three places two were taken"
        with pytest.raises(EngineBusyError, match="3"):
            engine.reserve(1)
        for _ in range(2):  # one after another in the same place
            with pytest.raises(EngineBusyError):
                engine.generate(["the dog"], PARAMS)
            assert asyncio.run(reserved())[-1].finish_reason is FinishReason.LENGTH
        engine.release(others)
        assert engine.generate(["the dog"], PARAMS)[0].finish_reason is FinishReason.LENGTH
        engine.release(2)
        assert engine.reserve(5) == 3
        engine.release(3)


def test_a_request_in_a_reserved_place_counts_once() -> None:
    gate = Gate(1)
    with engine_with(gate, max_rows=1, max_queued=2) as engine, gate:

        async def hold() -> None:
            assert engine.reserve(1) == 1
            stream = engine.stream("the cat", LONG, reserved=True)
            await anext(stream)
            assert engine.reserve(5) == 2, "the place that is used, and two that are free"
            engine.release(2)
            gate.open()
            await stream.aclose()
            engine.release(1)

        asyncio.run(hold())
        wait_until(lambda: engine._loop.num_open == 0)
        assert engine.reserve(5) == 3


def test_more_prompts_than_the_queue_holds_are_all_answered() -> None:
    with make_engine(max_rows=2, max_queued=3) as engine:
        answers = engine.generate(random_prompts(17, 5), PARAMS)
    assert [answer.finish_reason for answer in answers] == [FinishReason.LENGTH] * 17


def test_leaving_a_batch_early_aborts_the_rest_of_it() -> None:
    gate = Gate(PARAMS.max_tokens)
    with engine_with(gate) as engine, gate:
        for index, _ in engine.generate_as_completed(random_prompts(6, 5), [PARAMS, *[LONG] * 5]):
            assert index == 0
            break
        gate.open()
        wait_until(lambda: engine.stats().num_finished == 6)
        assert engine.stats().num_output_tokens <= 6 * (PARAMS.max_tokens + 1), "of one step that was in flight"
        assert engine.stats().blocks_owned == 0


def test_a_program_that_forgets_to_close_the_engine_still_ends() -> None:
    program = "from tests.factories import make_engine; e = make_engine(); next(e.stream_blocking('the cat'))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, capture_output=True)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_an_abort_in_any_phase_frees_the_blocks_and_is_the_only_end(phase: str) -> None:
    steps = {"queued": 0, "prefill": 2, "decode": 5}[phase]  # 20 tokens of prompt, 8 a step
    core = make_parts(max_batch_tokens=8).core
    core.add(make_request(range(2, 22), request_id="victim", max_tokens=100, ignore_eos=True))
    outputs = [output for _ in range(steps) for output in core.step()]
    assert len(outputs) == (3 if phase == "decode" else 0)
    last = core.abort("victim")
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert core.abort("victim") is None
    assert not core.has_work
    core.check_idle()


def test_an_abort_from_outside_ends_a_running_request() -> None:
    gate = Gate(1)
    with engine_with(gate) as engine, gate:
        stream = engine.stream_blocking("the cat", LONG, request_id="victim")
        next(stream)
        assert engine.abort("victim")
        gate.open()
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        assert not engine.abort("victim")
        assert engine.stats().blocks_owned == 0


def test_leaving_a_stream_early_aborts_the_request() -> None:
    async def run(engine: Engine) -> None:
        async for _ in engine.stream("the cat", LONG):
            break

    gate = Gate(1)
    with engine_with(gate) as engine, gate:
        asyncio.run(run(engine))
        gate.open()
        wait_until(lambda: engine.stats().num_finished == 1)
        assert engine.stats().num_output_tokens == 2, "of one step that was in flight"
        assert engine.stats().blocks_owned == 0


def test_cancelling_a_streaming_task_aborts_the_request() -> None:
    async def run(engine: Engine) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.stream("the cat", LONG):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()  # a token comes here once the next step is in flight
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gate = Gate(1)
    with engine_with(gate) as engine, gate:
        asyncio.run(run(engine))
        gate.open()
        wait_until(lambda: engine.stats().num_finished == 1)
        assert engine.stats().num_output_tokens == 2, "of one step that was in flight"
        assert engine.stats().blocks_owned == 0


def test_a_request_that_breaks_its_batch_fails_alone() -> None:
    good = random_prompts(3, 9)
    with make_engine() as plain:
        expected = plain.generate(good, PARAMS)
    with engine_with(breaking_on_poison) as engine:
        *answers, bad = engine.generate([*good, [POISON]], PARAMS)
        assert not engine.stats().dead
    assert [a.text for a in answers] == [e.text for e in expected]
    assert bad.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, EngineError)


def test_rows_with_non_finite_logits_fail_and_their_mates_do_not() -> None:
    parts = make_parts()
    adapter = parts.runner.adapter
    head = adapter.head

    def broken_head(normed: torch.Tensor) -> torch.Tensor:
        logits = head(normed)
        if logits.shape[0] == 3:
            logits[1] = float("nan")
        return logits

    adapter.head = broken_head  # type: ignore[method-assign]
    prompts = random_prompts(3, 9)
    with make_engine() as plain:
        expected = plain.generate(prompts, PARAMS)
    with Engine.from_parts(parts) as engine:
        first, bad, last = engine.generate(prompts, PARAMS)
    assert bad.finish_reason is FinishReason.ERROR
    assert "numerical_error" in str(bad.error)
    assert [first.text, last.text] == [expected[0].text, expected[2].text]


def test_a_failing_detokeniser_ends_only_its_request() -> None:
    parts = make_parts()
    real = parts.tokenizer.stream
    parts.tokenizer.stream = lambda prompt_ids, stop, **options: (  # type: ignore[method-assign]
        _Failing() if POISON in prompt_ids else real(prompt_ids, stop, **options)
    )
    with Engine.from_parts(parts) as engine:
        good, bad = engine.generate([[5, 6], [POISON]], PARAMS)
        assert engine.stats().blocks_owned == 0
    assert good.finish_reason is FinishReason.LENGTH
    assert bad.finish_reason is FinishReason.ERROR


class _Failing:
    stopped = False

    def push(self, token_id: int) -> str:
        raise ZeroDivisionError("detokeniser")

    def finish(self) -> str:
        return ""


class Death(BaseException):
    """Something no fence catches."""


def dying(after_steps: int) -> Callable[[Run], Run]:
    def wrap(run: Run) -> Run:
        steps = iter(range(10**9))

        def die(batch: ScheduledBatch) -> StepResult:
            if next(steps) >= after_steps:
                raise Death("the device is gone")
            return run(batch)

        return die

    return wrap


def test_when_the_loop_dies_every_open_request_ends_with_an_error() -> None:
    engine = engine_with(dying(after_steps=3), max_rows=2)
    answers = engine.generate(random_prompts(6, 9), LONG)
    assert [answer.finish_reason for answer in answers] == [FinishReason.ERROR] * 6
    assert all(isinstance(answer.error, EngineDeadError) and "gone" in str(answer.error) for answer in answers)
    assert engine.stats().dead
    engine.close()


def test_a_dead_engine_refuses_new_requests_and_says_why() -> None:
    engine = engine_with(dying(after_steps=0))
    engine.generate(["the cat"], PARAMS)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.generate(["the dog"], PARAMS)


def test_any_number_of_bad_requests_one_after_another_leaves_the_engine_alive() -> None:
    with engine_with(breaking_on_poison) as engine:
        for _ in range(6):
            assert engine.generate([[POISON]], PARAMS)[0].finish_reason is FinishReason.ERROR
        assert engine.generate(["the cat"], PARAMS)[0].finish_reason is FinishReason.LENGTH
        assert engine.stats().blocks_owned == 0


def test_steps_that_always_fail_are_the_engines_fault() -> None:
    def wrap(run: Run) -> Run:
        def broken(batch: ScheduledBatch) -> StepResult:
            raise RuntimeError("every step")

        return broken

    engine = engine_with(wrap, max_rows=1)
    answers = engine.generate(random_prompts(5, 9), PARAMS)
    assert all(answer.finish_reason is FinishReason.ERROR for answer in answers)
    wait_until(lambda: engine.stats().dead)


def test_closing_ends_open_requests_and_refuses_new_ones() -> None:
    gate = Gate(1)
    engine = engine_with(gate)
    stream = engine.stream_blocking("the cat", LONG)
    next(stream)
    gate.close_engine(engine)
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate(["the dog"], PARAMS)


def test_a_leaked_block_is_found_when_the_engine_is_idle() -> None:
    engine = make_engine()
    engine.generate(["the cat"], PARAMS)
    blocks = engine._parts.core.scheduler.blocks
    blocks.allocate(BlockTable(), 5)
    engine.generate(["the dog"], PARAMS)
    wait_until(lambda: engine.stats().dead)


def test_a_request_whose_event_loop_was_closed_is_aborted() -> None:
    gate = Gate(1)
    with engine_with(gate) as engine, gate:
        loop = asyncio.new_event_loop()
        stream = engine.stream("the cat", LONG)
        loop.run_until_complete(anext(stream))
        loop.close()
        gate.open()
        wait_until(lambda: engine.stats().num_finished == 1)
        assert engine.stats().num_output_tokens == 3, "the second found no reader while the third was in flight"
        assert engine.stats().blocks_owned == 0
        del stream


def test_a_request_that_cannot_be_queued_ends_with_the_error() -> None:
    parts = make_parts()
    add, queue = parts.core.scheduler.add, []

    def broken(*args: Any) -> Any:
        queue.append(args)
        if len(queue) == 1:
            raise RuntimeError("no row")
        return add(*args)

    parts.core.scheduler.add = broken  # type: ignore[method-assign]
    with Engine.from_parts(parts) as engine:
        [failed] = engine.generate(["the cat"], PARAMS)
        assert failed.finish_reason is FinishReason.ERROR
        assert "no row" in str(failed.error)
        assert len(engine.generate(["the cat"], PARAMS)[0].tokens) == 8


def test_every_step_is_a_sign_of_life() -> None:
    gate, long_s = Gate(1), 1000.0
    with engine_with(gate) as engine, gate:
        stream = engine.stream_blocking("the cat", PARAMS)
        next(stream)
        engine._loop.last_beat -= long_s
        assert engine.stats().last_step_age_s >= long_s
        gate.open()
        assert list(stream)[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats().last_step_age_s < long_s

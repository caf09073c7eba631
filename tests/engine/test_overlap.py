"""The outputs of a step are emitted while the next one runs: in order, once, and at the latest when no step follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.runners import RunnerOf, StepOf
from tests.factories import make_parts, random_prompts
from tide_core.batch import ScheduledBatch, StepResult, StepTiming
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Engine
from tide_core.engine.sinks import ThreadSink
from tide_core.outputs.text import TextStream
from tide_core.request import FinishReason, Request, RequestOutput, SamplingParams


def request(name: str, *, max_tokens: int = 4, **params: Any) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return Request(name, tuple(random_prompts(1, 5)[0]), settings, seed=0)


@pytest.fixture
def parts() -> Parts:
    return make_parts(kernels="reference")


class Recording(RunnerOf):
    """Records when steps start and end."""

    def __init__(self, parts: Parts, events: list[Any]) -> None:
        super().__init__(parts.runner.run)
        self.events = events

    def start(self, batch: ScheduledBatch) -> StepOf:
        self.events.append("run")

        def run(batch: ScheduledBatch) -> StepResult:
            result = self.run(batch)
            self.events.append("ran")
            return result

        return StepOf(run, batch)


def test_a_step_is_emitted_when_the_next_one_has_started_and_not_before(parts: Parts) -> None:
    core, events = parts.core, list[Any]()
    core._runner = Recording(parts, events)
    core.add(request("a"))
    for _ in range(3):
        core.advance(lambda outputs: events.append([output.request_id for output in outputs]))
    assert events == ["run", [], "ran", "run", ["a"], "ran", "run", ["a"], "ran"]
    [left] = core.emit()
    assert len(left.tokens) == 1
    assert core.emit() == []


def test_the_end_of_the_last_request_is_work_and_comes_without_another_step(parts: Parts) -> None:
    core, emitted = parts.core, list[RequestOutput]()
    core.add(request("a", max_tokens=2))
    core.advance(emitted.extend)
    core.advance(emitted.extend)
    assert not core.scheduler.has_work
    assert core.has_work
    core.advance(emitted.extend)
    assert not core.has_work
    assert [output.finish_reason for output in emitted] == [None, FinishReason.LENGTH]
    assert emitted[-1].usage is not None
    assert emitted[-1].usage.output_tokens == 2


def test_an_abort_returns_the_pending_tokens(parts: Parts) -> None:
    core, emitted = parts.core, list[RequestOutput]()
    core.add(request("a"))
    core.advance(emitted.extend)
    core.advance(emitted.extend)
    last = core.abort("a")
    assert last is not None
    assert (len(emitted), len(last.tokens), last.finish_reason) == (1, 1, FinishReason.ABORT)
    assert not core.has_work
    assert core.emit() == []
    core.check_idle()


def test_a_text_that_fails_while_its_row_runs_ends_once_and_gives_its_blocks_back(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, emitted = parts.core, list[RequestOutput]()
    core.add(request("bad"))
    core.add(request("good"))
    [bad, _] = [state.text for state in core._open.values()]
    push = TextStream.push

    def failing(self: TextStream, token_id: int) -> str:
        if self is bad:
            raise UnicodeError("no text")
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", failing)
    while core.has_work:
        core.advance(emitted.extend)
    ends = {output.request_id: output for output in emitted if output.finished}
    assert sum(output.finished for output in emitted) == 2
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert "no text" in str(ends["bad"].error)
    assert sum(len(output.tokens) for output in emitted if output.request_id == "good") == 4
    core.check_idle()


def test_a_row_whose_text_fails_keeps_its_blocks_while_it_runs(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on undisturbed: nothing is run twice."""
    core, runs = parts.core, list[int]()

    def counted(batch: ScheduledBatch) -> StepResult:
        runs.append(len(batch.rows))
        return parts.runner.run(batch)

    core._runner = RunnerOf(counted)
    core.add(request("bad"))
    core.add(request("good"))
    [bad, _] = [state.text for state in core._open.values()]
    push = TextStream.push

    def failing(self: TextStream, token_id: int) -> str:
        if self is bad:
            raise UnicodeError("no text")
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", failing)
    while core.has_work:
        core.advance(lambda outputs: None)
    assert runs == [2, 2, 1, 1]
    core.check_idle()


def test_an_end_that_was_reached_is_emitted_though_the_engine_dies(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, calls = parts.core.scheduler.schedule, list[int]()

    def dying(**given: Any) -> Any:
        calls.append(1)
        if len(calls) > 4:
            raise MemoryError("no more")
        return schedule(**given)

    monkeypatch.setattr(parts.core.scheduler, "schedule", dying)
    with Engine.from_parts(parts) as engine:
        sink = ThreadSink()
        both = [request(name, max_tokens=max_tokens) for name, max_tokens in (("short", 4), ("long", 40))]
        engine._loop.submit(both, sink, parts.core)
        ends = dict[str, RequestOutput]()
        while len(ends) < 2:
            output = sink.get()
            if output.finished:
                ends[output.request_id] = output
    assert ends["short"].finish_reason is FinishReason.LENGTH
    assert ends["long"].finish_reason is FinishReason.ERROR


def test_a_stop_string_is_seen_before_the_next_step_is_made(parts: Parts) -> None:
    core = parts.core
    core.add(request("plain", max_tokens=12))
    whole = ""
    while core.has_work:
        whole += "".join(token.text for output in core.step() for token in output.tokens)
    stop = whole[3:5]
    core.add(request("stopped", max_tokens=12, stop=(stop,)))
    emitted = list[RequestOutput]()
    while core.has_work:
        core.advance(emitted.extend)
    text = "".join(token.text for output in emitted for token in output.tokens)
    assert text == whole[: whole.index(stop)]
    assert emitted[-1].finish_reason is FinishReason.STOP
    assert emitted[-1].usage is not None
    assert emitted[-1].usage.output_tokens == sum(len(output.tokens) for output in emitted)


def test_a_failure_to_deliver_is_not_taken_for_one_of_the_step(parts: Parts) -> None:
    core = parts.core
    core.add(request("a"))
    core.advance(lambda outputs: None)

    def broken(outputs: list[RequestOutput]) -> None:
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        core.advance(broken)


def test_an_engine_that_is_closed_emits_the_ends_that_were_reached(parts: Parts) -> None:
    with Engine.from_parts(parts) as engine:
        [answer] = engine.generate(random_prompts(1, 5), SamplingParams(max_tokens=1, ignore_eos=True))
    assert answer.finish_reason is FinishReason.LENGTH


class Observer:
    """A planner that only records."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float, int]] = []

    def observe(self, drafts: Any) -> None:
        pass

    def observe_row(self, *what: Any) -> None:
        pass

    def observe_host(self, *what: Any) -> None:
        self.seen.append(what)


def test_the_planner_observes_the_host_s_time_of_steps_that_overlap_with_the_device(parts: Parts) -> None:
    core, planner = parts.core, Observer()
    core._planner = planner
    for timing in (None, StepTiming(1e-9, 2)):
        core._runner = RunnerOf(lambda batch, timing=timing: replace(parts.runner.run(batch), timing=timing))
        core.add(request(f"r{timing}", max_tokens=3))
        core.add(request(f"s{timing}", max_tokens=3))
        while core.scheduler.has_work:
            core.advance(lambda outputs: None)
    assert [(rows, tokens, steps) for rows, tokens, _, steps in planner.seen] == [(2, 2, 2)] * 3
    assert all(0.0 < seconds < 60.0 for _, _, seconds, _ in planner.seen)

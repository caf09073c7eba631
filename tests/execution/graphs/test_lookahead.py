"""Cycles that are begun before the one before them was read: on the CPU, with the CUDA kernels' twin."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.engine.exit_engines import FixedDepth, all_ids, exit_parts, fixed_depths, poisoned
from tests.factories import make_request, random_prompts
from tests.kernels.twin import twin_kernels
from tide_core.batch import DraftCounts, RowResult, RowStep
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.execution.graphs import cycle as graph_cycle
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.cycle_graph import HostBuffer
from tide_core.execution.graphs.cycle_output import CycleOutput
from tide_core.execution.graphs.cycle_shape import RowPlace
from tide_core.execution.graphs.in_flight import InFlightStep, join
from tide_core.execution.graphs.launch_depth import MAX_STEPS, LaunchDepths
from tide_core.execution.graphs.prompts import PATIENCE, GraphPrompts
from tide_core.exits.accept import Settler
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, FinishReason, RequestOutput, SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3)}
HARDER = 0.3
"""Exits that are right now and then."""
REALLY_DONE = GraphPrompts._is_done


@pytest.fixture(params=[1])
def legs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cycles of a flight, in engines made from now on."""
    monkeypatch.setattr(graph_cycle, "LaunchDepths", lambda: fixed_depths(request.param))
    return cast(int, request.param)


ONE_LEG_OR_MORE = pytest.mark.parametrize("legs", [1, 2, 4], indirect=True)


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Engines made from now on run cycles in one go; how many were launched, of them ahead, and read; and how often a
    row had to wait."""
    count: Counter[str] = Counter()
    fly, results, start = GraphCycles._launch, InFlightStep.results, in_flight.Launched.results

    def launched(self: GraphCycles, rows: Sequence[RowPlace], legs: int = 1) -> InFlightStep:
        flight = fly(self, rows, legs)
        count["launched"] += 1
        count["ahead"] += any(row.previous >= 0 for row in rows)
        count["cycles"] += flight.num_cycles
        return flight

    def read(self: InFlightStep, *given: Any) -> list[RowResult]:
        count["read"] += 1
        return results(self, *given)

    def waited(self: in_flight.Launched) -> list[RowResult]:
        found = start(self)
        count["waited"] += sum(result is in_flight.NOT_READY for result in found)
        return found

    monkeypatch.setattr(GraphCycles, "_launch", launched)
    monkeypatch.setattr(InFlightStep, "results", read)
    monkeypatch.setattr(in_flight.Launched, "results", waited)
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: twin_kernels())
    return count


def answers(parts: Parts, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    with poisoned(parts) as engine:
        found = engine.generate(prompts, params)
    parts.core.check_idle()
    return all_ids(found)


def without_running_ahead(**settings: Any) -> Parts:
    parts = exit_parts(**settings)
    parts.runner.lookahead_steps = lambda: 0
    return parts


@ONE_LEG_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_answers_are_those_of_full_depth_and_nearly_every_cycle_is_begun_ahead(
    mode: str, num_rows: int, flights: Counter[str], legs: int
) -> None:
    prompts, params = random_prompts(num_rows, 11), SamplingParams(max_tokens=40, ignore_eos=True, mode=mode)
    expected = answers(without_running_ahead(share=HARDER), prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert not flights["ahead"]
    flights.clear()
    assert answers(exit_parts(share=HARDER), prompts, params) == expected
    assert flights["ahead"] >= flights["launched"] - 6
    assert flights["launched"] == flights["read"], "that all texts may end by their length is known beforehand"
    has_branches = mode == "verified" and num_rows == 1
    assert (flights["cycles"] > flights["launched"]) == (legs > 1 and not has_branches)


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_cycles_that_are_read_together_are_fewer_steps_and_count_the_same(mode: str, flights: Counter[str]) -> None:
    prompts, params = random_prompts(5, 11), SamplingParams(max_tokens=40, ignore_eos=True, mode=mode)
    found = []
    for legs in (1, 3):
        parts = exit_parts(share=HARDER)
        assert parts.runner.cycles is not None
        parts.runner.cycles.depths = fixed_depths(legs)
        with poisoned(parts) as engine:
            said = engine.generate(prompts, params)
        tokens = [[(token.token_id, token.exit_layer, token.score) for token in one.tokens[:30]] for one in said]
        usages = [one.usage for one in said if one.usage is not None]
        layers_run, stats = sum(usage.layers_run for usage in usages), parts.core.exits
        assert (stats.layers_run, stats.total_tokens) == (layers_run, 5 * 40)
        assert stats.deep_passes == sum(usage.deep_passes for usage in usages)
        found.append((tokens, all_ids(said), stats.deep_passes, parts.core.counters.num_steps))
    (*one_by_one, passes, num_steps), (*together, passes_together, fewer_steps) = found
    assert together == one_by_one, "at the end there may be other drafts"
    assert passes_together == pytest.approx(passes, rel=0.2)
    assert fewer_steps < num_steps / 2


def test_the_pace_hears_of_flights_that_follow_one_another_alone(
    flights: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flight that was launched ahead for a text that has ended is never read; what comes next follows nothing."""
    pauses, heard = 0.3, list[tuple[float, float]]()

    class Hearing(FixedDepth):
        def note(self, legs: int, ran_s: float, waited_s: float, took_s: float) -> None:
            heard.append((ran_s, took_s))

    parts = exit_parts(share=HARDER)
    assert parts.runner.cycles is not None
    parts.runner.cycles.depths = LaunchDepths(Hearing)
    monkeypatch.setattr(HostBuffer, "device_s", lambda side: 0.125)  # there is no device that could tell
    monkeypatch.setattr(GraphCycles, "runs_ahead", property(lambda cycles: cycles._in_flight is not None))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with poisoned(parts) as engine:
        [answer] = engine.generate(random_prompts(1, 11), params)
        ended = SamplingParams(max_tokens=40, ignore_eos=True, stop_ids=(answer.tokens[9].token_id,))
        for _ in range(3):
            engine.generate(random_prompts(1, 11), ended)
            assert parts.runner.cycles._in_flight is not None, "one was launched that nobody reads"
            time.sleep(pauses)
    assert len(heard) > 10
    assert {ran_s for ran_s, _ in heard} == {0.125}
    assert max(took_s for _, took_s in heard) < pauses


@pytest.mark.parametrize(("num_rows", "most"), [(5, MAX_STEPS), (1, 1)])
def test_plans_count_on_the_legs_that_there_may_be_and_with_branches_there_is_one(
    num_rows: int, most: int, flights: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, told = exit_parts(share=HARDER), list[tuple[int, int, float, int]]()
    monkeypatch.setattr(GraphCycles, "runs_ahead", property(lambda cycles: cycles._in_flight is not None))
    parts.core._on_host = lambda *what: told.append(what)
    with poisoned(parts) as engine:
        engine.generate(random_prompts(num_rows, 11), SamplingParams(max_tokens=40, ignore_eos=True))
    told = told[: len(told) // 2]  # rows that end draft fewer tokens than others, and have no branches
    assert len(told) > 3
    assert {most_cycles for *_, most_cycles in told} == {most}


@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_rows_on_standby_follow_sooner_and_say_the_same(mode: str, max_rows: int, flights: Counter[str]) -> None:
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(9, 40))]
    params = [SamplingParams(max_tokens=3 + 5 * i % 11, mode=mode, ignore_eos=True) for i in range(9)]
    found = []
    for keeps in (False, True):
        parts = exit_parts(share=HARDER, max_rows=max_rows)
        assert parts.core.scheduler.prefills_ahead
        parts.core.scheduler.prefills_ahead = keeps
        found.append((answers(parts, prompts, params), parts.core.counters.num_steps))
    (expected, num_without), (ids, num_steps) = found
    assert ids == expected
    assert num_steps < num_without


@ONE_LEG_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
def test_rows_come_and_go_while_others_in_flight(mode: str, flights: Counter[str], legs: int) -> None:
    """Texts that end by a token, which nobody knows beforehand, or by their length; a new row waits for the cycle that
    is on its way, and joins the next."""
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(9, 40))]
    ends = [ids[7] for ids in answers(without_running_ahead(share=HARDER), prompts, SamplingParams(max_tokens=8))]
    params = [
        SamplingParams(max_tokens=9 + 4 * i, mode=mode, ignore_eos=True, stop_ids=(ends[i],) if i % 2 else ())
        for i in range(9)
    ]
    expected = [
        answers(without_running_ahead(share=HARDER), [p], [one])[0] for p, one in zip(prompts, params, strict=True)
    ]
    flights.clear()
    assert answers(exit_parts(share=HARDER, max_rows=3), prompts, params) == expected
    assert flights["ahead"] > 10
    assert flights["waited"] > 2
    assert flights["launched"] > flights["read"] - flights["waited"]


@ONE_LEG_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("num_blocks", [9, 12, 16])
def test_rows_that_lose_their_blocks_meanwhile_lose_nothing_else(
    mode: str, num_blocks: int, flights: Counter[str], legs: int
) -> None:
    """The pool is full: blocks that were given beforehand are taken back, and rows give way."""
    prompts, params = random_prompts(4, 21), SamplingParams(max_tokens=50, ignore_eos=True, mode=mode)
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    flights.clear()
    parts = exit_parts(share=HARDER)
    blocks = parts.core.scheduler.blocks
    others = blocks.new_table()
    with poisoned(parts) as engine:
        blocks.allocate(others, (blocks.num_available - num_blocks) * blocks.block_size)
        found = engine.generate(prompts, params)
        assert blocks.num_available == num_blocks
        blocks.free(others)
    assert all_ids(found) == expected
    assert parts.core.scheduler.num_preemptions
    assert flights["ahead"] > 5


@ONE_LEG_OR_MORE
def test_a_request_that_is_aborted_on_its_way_harms_nobody(flights: Counter[str], legs: int) -> None:
    prompts, params = random_prompts(3, 11), {"max_tokens": 90, "ignore_eos": True}
    expected = answers(without_running_ahead(share=HARDER), prompts, SamplingParams(**params))
    parts = exit_parts(share=HARDER)
    with poisoned(parts) as engine:
        core = parts.core
        with engine._loop.step_lock:
            said: list[RequestOutput] = []
            for r, prompt in enumerate(prompts):
                core.add(engine.make_request(prompt, SamplingParams(**params), request_id=f"r{r}"))
            for step in range(100):
                if step == 4:
                    assert parts.runner.cycles is not None
                    assert parts.runner.cycles._in_flight is not None
                    said.append(core.abort("r1"))  # type: ignore[arg-type]
                    core.add(engine.make_request(prompts[1], SamplingParams(**params), request_id="again"))
                core.advance(said.extend)
                if not core.has_work:
                    break
    for name, ids in (("r0", expected[0]), ("r2", expected[2]), ("again", expected[1])):
        mine = [output for output in said if output.request_id == name]
        assert [token.token_id for output in mine for token in output.tokens] == ids
        assert mine[-1].finish_reason is FinishReason.LENGTH


@ONE_LEG_OR_MORE
def test_a_step_that_fails_leaves_nothing_on_its_way(
    flights: Counter[str], legs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(3, 11), SamplingParams(max_tokens=30, ignore_eos=True)
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    parts = exit_parts(share=HARDER)
    results, calls = InFlightStep.results, []

    def fails_once(self: InFlightStep, *given: Any) -> list[RowResult]:
        calls.append(self)
        if len(calls) == 5:
            raise RuntimeError("a read that fails")
        return results(self, *given)

    monkeypatch.setattr(InFlightStep, "results", fails_once)
    assert answers(parts, prompts, params) == expected
    assert len(calls) > 8


@pytest.mark.parametrize(
    "params",
    [{"threshold": 0.3}, {"mode": "bounded", "epsilon": 0.05}, {"temperature": 0.8, "seed": 1}],
    ids=str,
)
def test_where_the_host_decides_what_a_row_goes_on_with_nothing_is_begun_ahead(
    params: dict[str, Any], flights: Counter[str]
) -> None:
    answers(exit_parts(artefact=BLOCK), random_prompts(2, 11), SamplingParams(max_tokens=20, ignore_eos=True, **params))
    assert flights["launched"] == flights["read"] > 3
    assert not flights["ahead"]


def test_a_row_that_draws_joins_others_and_all_go_on_without_running_ahead(flights: Counter[str]) -> None:
    prompts = random_prompts(3, 11)
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8 if r == 2 else 0.0, seed=5) for r in range(3)
    ]
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    flights.clear()
    assert answers(exit_parts(share=HARDER), prompts, params) == expected


@ONE_LEG_OR_MORE
@pytest.mark.parametrize("longest", [64, None])
def test_nothing_is_begun_behind_the_last_position_there_is(
    longest: int | None, flights: Counter[str], legs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model, or of the engine where that is told of fewer: its tables end there."""
    settings = {} if longest is None else {"max_model_len": longest}
    parts = exit_parts(**settings)
    prompts = random_prompts(4, parts.max_model_len - 20)
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [len(answer.tokens) for answer in answers] == [20] * 4
    assert flights["ahead"] > 2
    assert not caplog.records, "no step has failed"


@pytest.fixture
def slow_prompts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Prompts that are done when somebody has asked for the third time."""
    count: Counter[str] = Counter()

    def is_done(self: GraphPrompts) -> bool:
        count["asked"] += 1
        return count["asked"] % 3 == 0

    launch = GraphPrompts._launch

    def launched(self: GraphPrompts, rows: Any) -> Any:
        count["launched"] += 1
        return launch(self, rows)

    monkeypatch.setattr(GraphPrompts, "_is_done", is_done)
    monkeypatch.setattr(GraphPrompts, "_launch", launched)
    return count


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_rows_that_talk_go_on_while_a_prompt_is_on_its_way(
    mode: str, flights: Counter[str], slow_prompts: Counter[str]
) -> None:
    """And the prompt is run once, for all that."""
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(7, 40))]
    params = [SamplingParams(max_tokens=9 + 4 * i, mode=mode, ignore_eos=True) for i in range(7)]
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    assert not slow_prompts["asked"]
    slow_prompts.clear()
    assert answers(exit_parts(share=HARDER, max_rows=3), prompts, params) == expected
    assert slow_prompts["asked"] >= 3 * 3
    assert slow_prompts["launched"] == 4, "four together, one of them on standby, then one by one"


def test_a_prompt_gains_what_it_was_begun_with_however_much_of_it_is_asked_for_meanwhile(
    flights: Counter[str], slow_prompts: Counter[str]
) -> None:
    """A prompt longer than the budget, whose share changes with the drafts of others."""
    prompts = [*random_prompts(3, 8), random_prompts(1, 70)[0]]
    params = [*(SamplingParams(max_tokens=50 + 7 * i, ignore_eos=True) for i in range(3)), SamplingParams(max_tokens=4)]
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    slow_prompts.clear()
    parts = exit_parts(share=HARDER, max_batch_tokens=32, prefix_caching=False)
    plans = itertools.cycle((1, 2, 3))
    parts.core.scheduler.plan_drafts = lambda *rows: next(plans)
    assert answers(parts, prompts, params) == expected
    assert slow_prompts["launched"] <= 7
    assert parts.core.counters.num_prompt_tokens == sum(map(len, prompts))


def test_those_who_talk_wait_for_a_prompt_that_is_never_done(
    flights: Counter[str], slow_prompts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    is_done = REALLY_DONE

    def stream_is_busy(self: GraphPrompts) -> bool:
        asked.append(1)
        stream, self._stream = self._stream, cast(Any, SimpleNamespace(query=lambda: False))
        try:
            return is_done(self)
        finally:
            self._stream = stream

    monkeypatch.setattr(GraphPrompts, "_is_done", stream_is_busy)
    prompts = random_prompts(2, 8)
    parts = exit_parts(share=HARDER)
    with poisoned(parts) as engine, engine._loop.step_lock:
        core, said = parts.core, list[RequestOutput]()
        core.add(engine.make_request(prompts[0], SamplingParams(max_tokens=100, ignore_eos=True), request_id="talks"))
        core.advance(said.extend)
        core.add(engine.make_request(prompts[1], SamplingParams(max_tokens=3, ignore_eos=True), request_id="prompt"))
        for _ in range(PATIENCE + 8):
            core.advance(said.extend)
    assert len(asked) == PATIENCE + 1
    assert any(output.request_id == "prompt" for output in said)


def test_the_planner_hears_what_a_cycle_was_allowed_when_it_was_begun(flights: Counter[str]) -> None:
    """A plan counts for the cycle behind the one on its way."""
    parts = exit_parts(share=HARDER, prefix_caching=False)
    plans = itertools.cycle((0, 2))
    parts.core.scheduler.plan_drafts = lambda *rows: next(plans)
    heard: list[tuple[int, int]] = []
    parts.core._on_drafts = lambda seen: heard.extend((counts.allowed, counts.accepted + 1) for counts, _ in seen)
    answers(parts, random_prompts(1, 8), SamplingParams(max_tokens=40, ignore_eos=True))
    assert {2} <= {allowed for allowed, _ in heard} <= {1, 2}, "fewer at the end"
    assert all(tokens <= allowed + 1 for allowed, tokens in heard)
    assert any(tokens > 1 for _, tokens in heard)


def test_a_row_that_only_waits_has_not_been_started(flights: Counter[str], slow_prompts: Counter[str]) -> None:
    parts = exit_parts(share=HARDER, prefix_caching=False)
    with poisoned(parts) as engine, engine._loop.step_lock:
        core, params = parts.core, SamplingParams(max_tokens=30, ignore_eos=True)
        core.add(engine.make_request(random_prompts(1, 8)[0], params, request_id="talks"))
        core.advance(lambda outputs: None)
        core.add(engine.make_request(random_prompts(1, 9)[0], params, request_id="waits"))
        core.advance(lambda outputs: None)
        assert core._open["talks"].started_at is not None
        assert core._open["waits"].started_at is None


def test_nothing_stays_on_its_way_when_the_last_request_is_aborted(
    flights: Counter[str], slow_prompts: Counter[str]
) -> None:
    parts = exit_parts(share=HARDER)
    runner = parts.runner
    assert runner.cycles is not None
    assert runner.prompts is not None
    with poisoned(parts) as engine, engine._loop.step_lock:
        core, params = parts.core, SamplingParams(max_tokens=30, ignore_eos=True)
        core.add(engine.make_request(random_prompts(1, 8)[0], params, request_id="talks"))
        core.advance(lambda outputs: None)
        core.add(engine.make_request(random_prompts(1, 9)[0], params, request_id="prompt"))
        core.advance(lambda outputs: None)
        assert runner.cycles._in_flight is not None
        assert runner.prompts.in_flight
        core.abort("talks")
        core.abort("prompt")
        assert runner.cycles._in_flight is None
        assert not runner.prompts.in_flight


def test_a_prompt_that_is_aborted_on_its_way_harms_nobody(flights: Counter[str], slow_prompts: Counter[str]) -> None:
    prompts, params = random_prompts(3, 11), SamplingParams(max_tokens=12, ignore_eos=True)
    expected = answers(without_running_ahead(share=HARDER), prompts, params)
    parts = exit_parts(share=HARDER, prefix_caching=False)
    core, said = parts.core, list[RequestOutput]()
    with poisoned(parts) as engine, engine._loop.step_lock:
        core.add(engine.make_request(prompts[0], params, request_id="r0"))
        core.advance(said.extend)
        core.add(engine.make_request(prompts[1], params, request_id="gone"))
        core.advance(said.extend)
        assert parts.runner.prompts is not None
        assert parts.runner.prompts.in_flight
        said.append(core.abort("gone"))  # type: ignore[arg-type]
        core.add(engine.make_request(prompts[2], params, request_id="r2"))
        while core.has_work:
            core.advance(said.extend)
    for name, ids in (("r0", expected[0]), ("r2", expected[2])):
        mine = [output for output in said if output.request_id == name]
        assert [token.token_id for output in mine for token in output.tokens] == ids


def begun_ahead(step: RowStep, *, token: int, position: int) -> InFlightStep:
    """A cycle begun behind one that leaves the row of this step so."""
    side: Any = None
    flight = InFlightStep([RowPlace(step, 2, list(step.table.block_ids), previous=0)], 1, side, [0], Settler(1, 4))
    flight.learn_starts(CycleOutput([], [], [[token], [position]], [], []))
    return flight


def test_a_row_that_goes_on_as_the_device_ran_it_is_found() -> None:
    now = RowStep(make_request(), BlockTable([21], [4, 7, 9]), (5,), (3, 5), True)
    flight = begun_ahead(now, token=5, position=21)
    assert flight.find([now]) == {0: 0}
    now.table.block_ids.append(12)  # more is no harm
    assert flight.find([now]) == {0: 0}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (6,)},
        {"token_ids": (5, 6)},
        {"request": make_request(request_id="another")},
        {"policy": ExitPolicy("verified", (0.5,), (0.9,))},
        {"table": BlockTable([21], [4, 7, 9])},
    ],
    ids=str,
)
def test_a_row_that_is_no_longer_what_the_device_ran_is_not_found(change: dict[str, Any]) -> None:
    then = RowStep(make_request(), BlockTable([21], [4, 7, 9]), (5,), (3, 5), True)
    assert begun_ahead(then, token=5, position=21).find([replace(then, **change)]) == {}


@pytest.mark.parametrize("blocks", [[4, 7], [4, 7, 10], []], ids=str)
def test_a_row_whose_blocks_were_taken_from_it_is_not_found(blocks: list[int]) -> None:
    """It may have others in their place; what the cycle wrote lies where somebody else will write."""
    row = RowStep(make_request(), BlockTable([21], [4, 7, 9]), (5,), (3, 5), True)
    flight = begun_ahead(row, token=5, position=21)
    row.table.block_ids[:] = blocks
    assert flight.find([row]) == {}


def test_a_row_that_stands_elsewhere_than_the_device_thinks_is_not_found() -> None:
    row = RowStep(make_request(), BlockTable([21], [4, 7, 9]), (5,), (3, 5), True)
    flight = begun_ahead(row, token=5, position=21)
    row.table.lengths[0] = 20
    assert flight.find([row]) == {}


def leg(*token_ids: int, accepted: int | None = None, error: str | None = None) -> RowResult:
    accepted = len(token_ids) - 1 if accepted is None else accepted
    exit_layers, scores = (1,) * len(token_ids), (0.5,) * len(token_ids)
    return RowResult(token_ids, exit_layers, scores, accepted + 1, 6, (DraftCounts(2, accepted, 0, 2),), error)


def going_on(**params: Any) -> RowStep:
    return RowStep(make_request(**params), BlockTable([21], [4, 7, 9]), (5,), (3, 5), True)


def went_on(step: RowStep, legs: Sequence[RowResult]) -> list[tuple[int, int]]:
    """Where the device goes on behind each leg, if host and device have seen the same."""
    positions = itertools.accumulate([one.num_valid for one in legs], initial=step.table.num_valid)
    return [(one.token_ids[-1] if one.token_ids else 0, at) for one, at in zip(legs, list(positions)[1:], strict=True)]


def test_legs_give_a_row_all_their_tokens_as_one_result() -> None:
    step, legs = going_on(max_tokens=30), [leg(7), leg(8, 9), leg(10)]
    joined = join(step, legs, went_on(step, legs))
    assert joined.token_ids == (7, 8, 9, 10)
    assert (joined.num_valid, joined.layers_run, joined.error) == (4, 18, None)
    assert [counts.accepted for counts in joined.counts] == [0, 1, 0]
    assert len(joined.tokens) == 4


@pytest.mark.parametrize(
    ("params", "legs", "num"),
    [
        ({"max_tokens": 30, "stop_ids": (9,)}, [leg(7), leg(8, 9), leg(10)], 2),
        ({"max_tokens": 5}, [leg(7), leg(8, 9), leg(10)], 2),
        ({"max_tokens": 4}, [leg(7), leg(8, 9), leg(10)], 2),
        ({"max_tokens": 30}, [leg(7), leg(error="numerical_error", accepted=-1), leg(10)], 1),
        ({"max_tokens": 30}, [leg(error="numerical_error", accepted=-1), leg(9), leg(10)], 1),
    ],
    ids=["a token ends it", "its length ends it", "its length ends it midway", "one fails", "the first fails"],
)
def test_legs_behind_the_end_of_a_text_or_behind_a_failure_are_not_a_rows(
    params: dict[str, Any], legs: list[RowResult], num: int
) -> None:
    step = going_on(**params)
    joined = join(step, legs, went_on(step, legs))
    assert joined.token_ids == tuple(token_id for one in legs[:num] for token_id in one.token_ids)
    assert len(joined.counts) == num
    assert joined.error == legs[0].error


@pytest.mark.parametrize("device", [(8, 24), (9, 25), (9, 23)], ids=str)
def test_legs_behind_one_that_the_device_has_seen_otherwise_are_not_a_rows(device: tuple[int, int]) -> None:
    """A score that is no number ends drafts on the host; the device does not look at scores."""
    step, legs = going_on(max_tokens=30), [leg(7), leg(8, 9), leg(10)]
    heard = went_on(step, legs)
    assert heard[1] == (9, 24)
    assert join(step, legs, [heard[0], device, heard[2]]).token_ids == (7, 8, 9)


@pytest.mark.parametrize("spoiled", [False, True])
def test_legs_come_to_the_same_whether_the_device_or_the_host_knows_how_many_drafts_are_right(spoiled: bool) -> None:
    """In flights of rows with other numbers of drafts, ends and contracts; or with a number that is none."""
    random, num_legs, num_sound = Random(0), 3, 0
    for _ in range(40):
        drafts = sorted([random.randint(0, 3) for _ in range(5)], reverse=True)
        steps = [
            replace(
                going_on(max_tokens=40, stop_ids=(3,) if random.random() < 0.3 else (), request_id=str(row)),
                table=BlockTable([20 + row], [4, 7, 9]),
                policy=ExitPolicy("verified", (0.2,), (math.inf,), None if random.random() < 0.8 else 0.02),
            )
            for row in range(5)
        ]
        begins = [0, *itertools.accumulate([count + 1 for count in drafts[:-1]])]
        positions, legs = [20 + row for row in range(5)], []
        for _ in range(num_legs):
            drafted = [[random.randint(1, 3) for _ in range(5)] for _ in range(drafts[0])]
            following = tuple(random.choice((1, 1, 1, 2, 3)) for _ in range(sum(drafts) + 5))
            last = []
            for row, count in enumerate(drafts):
                right = [drafted[k][row] == following[begins[row] + k] for k in range(count)]
                kept = right.index(False) if False in right else count
                positions[row] += kept + 1
                last.append(following[begins[row] + kept])
            scores = [[random.random() for _ in range(5)] for _ in range(drafts[0])]
            legs.append(CycleOutput(drafted, following, [last, list(positions)], scores, [1.0] * len(following)))
        if spoiled:
            legs[1].best[random.randrange(len(legs[1].best))] = math.nan
        side: Any = SimpleNamespace(read=lambda legs=legs: legs)
        places = [RowPlace(step, count, [4, 7]) for step, count in zip(steps, drafts, strict=True)]
        flight = InFlightStep(places, 1, side, begins, Settler(1, 4), num_legs)
        wanted = {row: row for row in range(5)}
        by_row = zip(*[flight._leg(said, wanted, steps) for said in legs], strict=True)
        by_device = zip(*[zip(*said.going_on, strict=True) for said in legs], strict=True)
        expected = [join(*of_row) for of_row in zip(steps, by_row, by_device, strict=True)]
        assert flight.results(wanted, steps) == expected
        num_sound += len(flight._sound_legs(legs, wanted, steps))
    assert num_sound == 0 if spoiled else num_sound > 100


@ONE_LEG_OR_MORE
def test_scores_that_are_no_numbers_change_no_token(flights: Counter[str], legs: int) -> None:
    prompts, params = random_prompts(5, 11), SamplingParams(max_tokens=30, ignore_eos=True)
    expected = answers(exit_parts(), prompts, params)
    parts = exit_parts()
    assert parts.runner.exits is not None
    with torch.no_grad():
        parts.runner.exits._scorers[0].weights.out.fill_(float("nan"))
    assert answers(parts, prompts, params) == expected
    assert parts.core.exits.non_finite_scores


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_legs_behind_a_stop_string_are_not_counted(mode: str, flights: Counter[str]) -> None:
    """No more than those behind an end that ids or their number tell."""
    prompts = random_prompts(5, 11)
    found = []
    for legs in (1, 4):
        parts = exit_parts(share=HARDER)
        assert parts.runner.cycles is not None
        parts.runner.cycles.depths = fixed_depths(legs)
        with poisoned(parts) as engine:
            whole = engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True, mode=mode))
            # A text that each answer says somewhere in its middle.
            stops = ["".join(token.text for token in one.tokens)[20:24] for one in whole]
            params = [SamplingParams(max_tokens=60, ignore_eos=True, mode=mode, stop=(stop,)) for stop in stops]
            said = engine.generate(prompts, params)
        assert {one.finish_reason for one in said} == {FinishReason.STOP}
        usages = [one.usage for one in said if one.usage is not None]
        found.append((all_ids(said), [(usage.deep_passes, usage.num_drafts) for usage in usages]))
    assert found[0] == found[1]

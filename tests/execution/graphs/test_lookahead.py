"""Lookahead steps, launched before the step before them was read: on the CPU, with the CUDA kernels' twin."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.engine.exit_engines import FixedDepth, all_ids, exit_parts, fixed_depths, poisoned
from tests.factories import make_request, random_prompts
from tests.kernels.twin import engine_kernels
from tide_core.batch import RowResult, RowStep
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import cycle as graph_cycle
from tide_core.execution.graphs import in_flight
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.cycle_graph import HostBuffer
from tide_core.execution.graphs.cycle_output import CycleOutput
from tide_core.execution.graphs.cycle_shape import RowPlace
from tide_core.execution.graphs.in_flight import InFlightStep, Layers
from tide_core.execution.graphs.launch_depth import MAX_STEPS, LaunchDepths
from tide_core.execution.graphs.prompts import PATIENCE, GraphPrompts
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, FinishReason, RequestOutput, SamplingParams

BLOCK = {"kind": "block", "taps": (2, 3)}
HARDER = 0.3
"""Exits that are right now and then."""
REALLY_DONE = GraphPrompts._is_done


@pytest.fixture(params=[1])
def steps_per_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of engines made from now on."""
    monkeypatch.setattr(graph_cycle, "LaunchDepths", lambda: fixed_depths(request.param))
    return cast(int, request.param)


ONE_STEP_OR_MORE = pytest.mark.parametrize("steps_per_launch", [1, 4], indirect=True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Engines made from now on run cycles as graphs. How many were launched, how many of these as lookahead, how many
    were read; and how often a row had to wait."""
    count: Counter[str] = Counter()
    launch, results, start = GraphCycles._launch, InFlightStep.results, in_flight.Launched.results

    def launched(self: GraphCycles, rows: Sequence[RowPlace], steps: int = 1) -> InFlightStep:
        step = launch(self, rows, steps)
        count["launched"] += 1
        count["lookahead"] += any(row.previous >= 0 for row in rows)
        count["cycles"] += step.num_cycles
        return step

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
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return count


def answers(parts: Parts, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    with poisoned(parts) as engine:
        found = engine.generate(prompts, params)
    parts.core.check_idle()
    return all_ids(found)


def without_lookahead(**settings: Any) -> Parts:
    parts = exit_parts(**settings)
    parts.runner.lookahead_steps = lambda: 0
    return parts


@functools.cache
def full_depth(num_rows: int, num_ids: int, max_tokens: int) -> list[list[int]]:
    """Answers to random prompts without lookahead, made once: every mode and every number of steps must give them."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return answers(without_lookahead(share=HARDER), random_prompts(num_rows, num_ids), params)


@ONE_STEP_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_answers_are_those_of_full_depth_and_nearly_every_step_is_launched_ahead(
    mode: str, num_rows: int, launches: Counter[str], steps_per_launch: int
) -> None:
    prompts, params = random_prompts(num_rows, 11), SamplingParams(max_tokens=40, ignore_eos=True, mode=mode)
    expected = full_depth(num_rows, 11, 40)
    assert not launches["lookahead"]
    launches.clear()
    assert answers(exit_parts(share=HARDER), prompts, params) == expected
    assert launches["lookahead"] >= launches["launched"] - 6
    assert launches["launched"] == launches["read"], "that all texts may end by their length is known beforehand"
    has_branches = mode == "verified" and num_rows == 1
    assert (launches["cycles"] > launches["launched"]) == (steps_per_launch > 1 and not has_branches)


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_cycles_that_are_read_together_are_fewer_steps_and_count_the_same(mode: str, launches: Counter[str]) -> None:
    prompts, params = random_prompts(5, 11), SamplingParams(max_tokens=40, ignore_eos=True, mode=mode)
    found = []
    for steps_per_launch in (1, 3):
        parts = exit_parts(share=HARDER)
        assert parts.runner.cycles is not None
        parts.runner.cycles.depths = fixed_depths(steps_per_launch)
        with poisoned(parts) as engine:
            outputs = engine.generate(prompts, params)
        tokens = [[(token.token_id, token.exit_layer) for token in one.tokens[:30]] for one in outputs]
        scores = [token.score or 0.0 for one in outputs for token in one.tokens[:30]]
        usages = [one.usage for one in outputs if one.usage is not None]
        layers_run, stats = sum(usage.layers_run for usage in usages), parts.core.exits
        assert (stats.layers_run, stats.total_tokens) == (layers_run, 5 * 40)
        assert stats.deep_passes == sum(usage.deep_passes for usage in usages)
        found.append((tokens, all_ids(outputs), scores, stats.deep_passes, parts.core.counters.num_steps))
    (*one_by_one, scores, passes, num_steps), (*together, scores_together, passes_together, fewer_steps) = found
    assert together == one_by_one, "at the end there may be other drafts"
    assert scores_together == pytest.approx(scores, abs=1e-4), "the twin's arithmetic depends on the rows of a pass"
    assert passes_together == pytest.approx(passes, rel=0.2)
    assert fewer_steps < num_steps / 2


def test_the_launch_depth_observes_only_launches_that_follow_one_another(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookahead step for a text that has ended is never read; the launch after it follows nothing.

    Every look at the clock takes a second, and every launch has two: one that follows another took two seconds."""
    clock_s, observed = 0.0, list[tuple[float, float]]()

    def perf_counter() -> float:
        nonlocal clock_s
        clock_s += 1.0
        return clock_s

    class Recording(FixedDepth):
        def observe(self, steps: int, device_s: float, wait_s: float, period_s: float) -> None:
            observed.append((device_s, period_s))

    monkeypatch.setattr(graph_cycle, "time", SimpleNamespace(perf_counter=perf_counter))
    parts = exit_parts(share=HARDER)
    assert parts.runner.cycles is not None
    parts.runner.cycles.depths = LaunchDepths(Recording)
    monkeypatch.setattr(HostBuffer, "device_s", lambda host: 0.125)  # there is no device that has a clock
    monkeypatch.setattr(GraphCycles, "_overlaps", property(lambda cycles: cycles._in_flight is not None))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with poisoned(parts) as engine:
        [answer] = engine.generate(random_prompts(1, 11), params)
        ended = SamplingParams(max_tokens=40, ignore_eos=True, stop_ids=(answer.tokens[9].token_id,))
        for _ in range(3):
            engine.generate(random_prompts(1, 11), ended)
            assert parts.runner.cycles._in_flight is not None, "one was launched that nobody reads"
            clock_s += 1000.0
    assert len(observed) > 10
    assert set(observed) == {(0.125, 2.0)}


@pytest.mark.parametrize(("num_rows", "most"), [(5, MAX_STEPS), (1, 1)])
def test_plans_expect_the_most_steps_per_launch_and_one_with_branches(
    num_rows: int, most: int, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, observed = exit_parts(share=HARDER), list[tuple[int, int, float, int]]()
    monkeypatch.setattr(GraphCycles, "_overlaps", property(lambda cycles: cycles._in_flight is not None))
    parts.core._planner = SimpleNamespace(
        observe=lambda drafts: None,
        observe_row=lambda *what: None,
        observe_host=lambda *what: observed.append(what),
    )
    with poisoned(parts) as engine:
        engine.generate(random_prompts(num_rows, 11), SamplingParams(max_tokens=40, ignore_eos=True))
    observed = observed[: len(observed) // 2]  # rows that end draft fewer tokens than others, and have no branches
    assert len(observed) > 3
    assert {most_cycles for *_, most_cycles in observed} == {most}


@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_prompts_that_are_prefilled_ahead_take_fewer_steps_and_give_the_same_tokens(
    mode: str, max_rows: int, launches: Counter[str]
) -> None:
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(9, 40))]
    params = [SamplingParams(max_tokens=3 + 5 * i % 11, mode=mode, ignore_eos=True) for i in range(9)]
    found = []
    for prefills_ahead in (False, True):
        parts = exit_parts(share=HARDER, max_rows=max_rows)
        assert parts.core.scheduler.prefills_ahead
        parts.core.scheduler.prefills_ahead = prefills_ahead
        found.append((answers(parts, prompts, params), parts.core.counters.num_steps))
    (expected, num_without), (ids, num_steps) = found
    assert ids == expected
    assert num_steps < num_without


@functools.cache
def nine_that_end() -> tuple[list[list[int]], list[dict[str, Any]], list[list[int]]]:
    """Prompts, how each text ends, and the tokens that full depth gives each alone."""
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(9, 40))]
    ends = [ids[7] for ids in answers(without_lookahead(share=HARDER), prompts, SamplingParams(max_tokens=8))]
    params = [{"max_tokens": 9 + 4 * i, "ignore_eos": True, "stop_ids": (ends[i],) if i % 2 else ()} for i in range(9)]
    with poisoned(without_lookahead(share=HARDER)) as engine:
        alone = [
            engine.generate([p], SamplingParams(mode="full", **one))[0] for p, one in zip(prompts, params, strict=True)
        ]
    return prompts, params, all_ids(alone)


@ONE_STEP_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
def test_rows_come_and_go_while_a_step_is_in_flight(mode: str, launches: Counter[str], steps_per_launch: int) -> None:
    """Texts that end by a token, which nobody knows beforehand, or by their length; a new row waits for the step in
    flight, and joins the next."""
    prompts, ends, expected = nine_that_end()
    launches.clear()
    params = [SamplingParams(mode=mode, **one) for one in ends]
    assert answers(exit_parts(share=HARDER, max_rows=3), prompts, params) == expected
    assert launches["lookahead"] > 10
    assert launches["waited"] > 2
    assert launches["launched"] > launches["read"] - launches["waited"]


@ONE_STEP_OR_MORE
@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize("num_blocks", [9, 16])
def test_rows_that_lose_their_blocks_meanwhile_lose_nothing_else(
    mode: str, num_blocks: int, launches: Counter[str], steps_per_launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is full: blocks that were given beforehand are taken back, and rows give way."""
    prompts, params = random_prompts(4, 21), SamplingParams(max_tokens=50, ignore_eos=True, mode=mode)
    expected = full_depth(4, 21, 50)
    launches.clear()
    parts = exit_parts(share=HARDER)
    scheduler, blocks = parts.core.scheduler, parts.core.scheduler.blocks
    others = BlockTable()
    blocks.allocate(others, (blocks.num_available - num_blocks) * blocks.block_size)

    def check_with_others() -> None:
        blocks.check_integrity([others, *(row.table for row in (*scheduler.running, *scheduler.waiting))])

    monkeypatch.setattr(parts.core, "check_idle", check_with_others)  # the loop calls it whenever it is idle
    with poisoned(parts) as engine:
        found = engine.generate(prompts, params)
    assert blocks.num_available == num_blocks
    assert all_ids(found) == expected
    assert parts.core.scheduler.num_preemptions
    assert launches["lookahead"] > 5


@ONE_STEP_OR_MORE
def test_a_request_that_is_aborted_in_flight_changes_no_other(launches: Counter[str], steps_per_launch: int) -> None:
    prompts, params = random_prompts(3, 11), {"max_tokens": 90, "ignore_eos": True}
    expected = full_depth(3, 11, 90)
    parts = exit_parts(share=HARDER)
    with poisoned(parts) as engine:
        core = parts.core
        with engine._loop.step_lock:
            outputs: list[RequestOutput] = []
            for r, prompt in enumerate(prompts):
                core.add(engine.make_request(prompt, SamplingParams(**params), request_id=f"r{r}"))
            for step in range(100):
                if step == 4:
                    assert parts.runner.cycles is not None
                    assert parts.runner.cycles._in_flight is not None
                    outputs.append(core.abort("r1"))  # type: ignore[arg-type]
                    core.add(engine.make_request(prompts[1], SamplingParams(**params), request_id="again"))
                core.advance(outputs.extend)
                if not core.has_work:
                    break
    for name, ids in (("r0", expected[0]), ("r2", expected[2]), ("again", expected[1])):
        mine = [output for output in outputs if output.request_id == name]
        assert [token.token_id for output in mine for token in output.tokens] == ids
        assert mine[-1].finish_reason is FinishReason.LENGTH


@ONE_STEP_OR_MORE
def test_a_step_that_fails_leaves_nothing_in_flight(
    launches: Counter[str], steps_per_launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = random_prompts(3, 11), SamplingParams(max_tokens=30, ignore_eos=True)
    expected = full_depth(3, 11, 30)
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


KINDS: list[dict[str, Any]] = [
    {"threshold": 0.6},
    {"mode": "bounded", "epsilon": 0.3, "margin": 1.0},
    {"mode": "bounded", "epsilon": 0.3, "margin": 1.0, "logprobs": 2, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.3, "logprobs": 2},
    {"logprobs": 3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {7: 4.0, 9: -100.0}},
    {"min_tokens": 12, "stop_ids": tuple(range(2, 120))},
]


USUAL: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@functools.cache
def four_of_a_kind(kind: int | None) -> list[Completion]:
    """Four rows of one of KINDS, or of none, without lookahead. What a row gets depends on no other."""
    params = SamplingParams(**{**USUAL, **({} if kind is None else KINDS[kind])})
    with poisoned(without_lookahead(share=HARDER)) as engine:
        return engine.generate(random_prompts(4, 11), [params] * 4)


# Every kind with each number of rows and each number of steps, the two paired one way for every other kind.
@pytest.mark.parametrize(
    ("params", "num_special", "steps_per_launch"),
    [
        (params, num_special, steps)
        for number, params in enumerate(KINDS)
        for num_special, steps in ([(1, 1), (3, 4)], [(1, 4), (3, 1)])[number % 2]
    ],
    ids=str,
    indirect=["steps_per_launch"],
)
def test_rows_of_every_kind_are_launched_ahead_and_so_are_those_next_to_them(
    params: dict[str, Any],
    num_special: int,
    launches: Counter[str],
    steps_per_launch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A threshold of its own, a bound, a temperature, log-probabilities, penalties, a bias, fewest tokens."""
    special, usual = four_of_a_kind(KINDS.index(params)), four_of_a_kind(None)
    expected = [*special[:num_special], *usual[num_special:]]
    wishes = [SamplingParams(**{**USUAL, **(params if row < num_special else {})}) for row in range(4)]
    parts = exit_parts(share=HARDER)
    launches.clear()
    with poisoned(parts) as engine:
        launched_ahead = engine.generate(random_prompts(4, 11), wishes)
    parts.core.check_idle()
    assert all_ids(launched_ahead) == all_ids(expected)
    assert [token.logprob for one in launched_ahead for token in one.tokens] == pytest.approx(
        [token.logprob for one in expected for token in one.tokens], abs=1e-4
    )
    assert launches["lookahead"] >= launches["launched"] - 8


@ONE_STEP_OR_MORE
@pytest.mark.parametrize("longest", [64, None])
def test_no_step_is_launched_after_the_last_position(
    longest: int | None, launches: Counter[str], steps_per_launch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model, or of the engine where its settings have fewer: its tables end there."""
    settings = {} if longest is None else {"max_model_len": longest}
    parts = exit_parts(**settings)
    prompts = random_prompts(4, parts.max_model_len - 20)
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [len(answer.tokens) for answer in answers] == [20] * 4
    assert launches["lookahead"] > 2
    assert not caplog.records, "no step has failed"


@pytest.fixture
def slow_prompts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Prompts that are done when somebody has asked for the third time."""
    count: Counter[str] = Counter()

    def is_done(self: GraphPrompts) -> bool:
        count["asked"] += 1
        return count["asked"] % 3 == 0

    run = GraphPrompts._run

    def launched(self: GraphPrompts, rows: Any) -> Any:
        count["launched"] += 1
        return run(self, rows)

    monkeypatch.setattr(GraphPrompts, "_is_done", is_done)
    monkeypatch.setattr(GraphPrompts, "_run", launched)
    return count


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_rows_decode_while_a_prompt_is_in_flight(mode: str, launches: Counter[str], slow_prompts: Counter[str]) -> None:
    """And the prompt is run only once."""
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(7, 40))]
    params = [SamplingParams(max_tokens=9 + 4 * i, mode=mode, ignore_eos=True) for i in range(7)]
    expected = answers(without_lookahead(share=HARDER), prompts, params)
    assert not slow_prompts["asked"]
    slow_prompts.clear()
    assert answers(exit_parts(share=HARDER, max_rows=3), prompts, params) == expected
    assert slow_prompts["asked"] >= 3 * 3
    assert slow_prompts["launched"] == 4, "four together, one of them prefilled ahead, then one by one"


def test_a_prompt_gets_the_tokens_it_was_launched_with_however_many_are_scheduled_meanwhile(
    launches: Counter[str], slow_prompts: Counter[str]
) -> None:
    """A prompt longer than the budget, whose share changes with the drafts of others."""
    prompts = [*random_prompts(3, 8), random_prompts(1, 70)[0]]
    params = [*(SamplingParams(max_tokens=50 + 7 * i, ignore_eos=True) for i in range(3)), SamplingParams(max_tokens=4)]
    expected = answers(without_lookahead(share=HARDER), prompts, params)
    slow_prompts.clear()
    parts = exit_parts(share=HARDER, max_batch_tokens=32, prefix_caching=False)
    plans = itertools.cycle((1, 2, 3))
    parts.core.scheduler.plan_drafts = lambda *rows: next(plans)
    assert answers(parts, prompts, params) == expected
    assert slow_prompts["launched"] <= 7
    assert parts.core.counters.num_prompt_tokens == sum(map(len, prompts))


def test_rows_that_decode_wait_for_a_prompt_that_is_never_done(
    launches: Counter[str], slow_prompts: Counter[str], monkeypatch: pytest.MonkeyPatch
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
        core, outputs = parts.core, list[RequestOutput]()
        core.add(engine.make_request(prompts[0], SamplingParams(max_tokens=100, ignore_eos=True), request_id="decodes"))
        core.advance(outputs.extend)
        core.add(engine.make_request(prompts[1], SamplingParams(max_tokens=3, ignore_eos=True), request_id="prompt"))
        for _ in range(PATIENCE + 8):
            core.advance(outputs.extend)
    assert len(asked) == PATIENCE + 1
    assert any(output.request_id == "prompt" for output in outputs)


def test_the_planner_observes_the_drafts_a_cycle_was_launched_with(launches: Counter[str]) -> None:
    """A plan is for the cycle after the one in flight."""
    parts = exit_parts(share=HARDER, prefix_caching=False)
    plans = itertools.cycle((0, 2))
    parts.core.scheduler.plan_drafts = lambda *rows: next(plans)
    observed: list[tuple[int, int]] = []

    def observe(seen: Any) -> None:
        observed.extend((counts.allowed, counts.accepted + 1) for counts, _ in seen)

    parts.core._planner = SimpleNamespace(
        observe=observe, observe_row=lambda *what: None, observe_host=lambda *what: None
    )
    answers(parts, random_prompts(1, 8), SamplingParams(max_tokens=40, ignore_eos=True))
    assert {2} <= {allowed for allowed, _ in observed} <= {1, 2}, "fewer at the end"
    assert all(tokens <= allowed + 1 for allowed, tokens in observed)
    assert any(tokens > 1 for _, tokens in observed)


def test_a_row_that_only_waits_has_not_been_started(launches: Counter[str], slow_prompts: Counter[str]) -> None:
    parts = exit_parts(share=HARDER, prefix_caching=False)
    with poisoned(parts) as engine, engine._loop.step_lock:
        core, params = parts.core, SamplingParams(max_tokens=30, ignore_eos=True)
        core.add(engine.make_request(random_prompts(1, 8)[0], params, request_id="decodes"))
        core.advance(lambda outputs: None)
        core.add(engine.make_request(random_prompts(1, 9)[0], params, request_id="waits"))
        core.advance(lambda outputs: None)
        assert core._open["decodes"].started_at is not None
        assert core._open["waits"].started_at is None


def test_a_prompt_that_is_aborted_in_flight_changes_no_other(
    launches: Counter[str], slow_prompts: Counter[str]
) -> None:
    prompts, params = random_prompts(3, 11), SamplingParams(max_tokens=12, ignore_eos=True)
    expected = answers(without_lookahead(share=HARDER), prompts, params)
    parts = exit_parts(share=HARDER, prefix_caching=False)
    core, outputs = parts.core, list[RequestOutput]()
    with poisoned(parts) as engine, engine._loop.step_lock:
        core.add(engine.make_request(prompts[0], params, request_id="r0"))
        core.advance(outputs.extend)
        core.add(engine.make_request(prompts[1], params, request_id="gone"))
        core.advance(outputs.extend)
        assert parts.runner.prompts is not None
        assert parts.runner.prompts.in_flight
        outputs.append(core.abort("gone"))  # type: ignore[arg-type]
        core.add(engine.make_request(prompts[2], params, request_id="r2"))
        while core.has_work:
            core.advance(outputs.extend)
    for name, ids in (("r0", expected[0]), ("r2", expected[2])):
        mine = [output for output in outputs if output.request_id == name]
        assert [token.token_id for output in mine for token in output.tokens] == ids


def lookahead_step(row: RowStep, *, token: int, position: int) -> InFlightStep:
    """A cycle after one that leaves the row at this token and position."""
    host: Any = None
    step = InFlightStep([RowPlace(row, 2, list(row.table.block_ids), previous=0)], 1, host, [0], Layers(1, 4), 2)
    step.learn_starts(CycleOutput([], (), [[token], [position]], [], [], np.empty(0)))
    return step


def test_a_row_that_continues_as_the_device_ran_it_is_found() -> None:
    now = RowStep(make_request(), BlockTable(21, [4, 7, 9]), (5,), (3, 5), True)
    step = lookahead_step(now, token=5, position=21)
    assert step.find([now]) == {0: 0}
    now.table.block_ids.append(12)  # more blocks change nothing
    assert step.find([now]) == {0: 0}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (6,)},
        {"token_ids": (5, 6)},
        {"request": make_request(request_id="another")},
        {"table": BlockTable(21, [4, 7, 9])},
    ],
    ids=str,
)
def test_a_row_that_is_no_longer_what_the_device_ran_is_not_found(change: dict[str, Any]) -> None:
    then = RowStep(make_request(), BlockTable(21, [4, 7, 9]), (5,), (3, 5), True)
    assert lookahead_step(then, token=5, position=21).find([then._replace(**change)]) == {}


@pytest.mark.parametrize("blocks", [[4, 7], [4, 7, 10], []], ids=str)
def test_a_row_whose_blocks_were_taken_from_it_is_not_found(blocks: list[int]) -> None:
    """It may have others in their place; what the cycle wrote lies where somebody else will write."""
    row = RowStep(make_request(), BlockTable(21, [4, 7, 9]), (5,), (3, 5), True)
    step = lookahead_step(row, token=5, position=21)
    row.table.block_ids[:] = blocks
    assert step.find([row]) == {}


def test_a_row_at_another_position_than_on_the_device_is_not_found() -> None:
    row = RowStep(make_request(), BlockTable(21, [4, 7, 9]), (5,), (3, 5), True)
    step = lookahead_step(row, token=5, position=21)
    row.table.length = 20
    assert step.find([row]) == {}


def make_step(**params: Any) -> RowStep:
    return RowStep(make_request(**params), BlockTable(21, [4, 7, 9]), (5,), (3, 5), True)


@pytest.mark.parametrize("spoiled", [False, True])
def test_results_are_the_same_token_by_token_and_by_the_fast_way(spoiled: bool) -> None:
    """In launches of rows with other numbers of drafts and contracts; or with a number that is not finite."""
    random, num_cycles, num_usual = Random(0), 3, 0
    for _ in range(40):
        drafts = sorted([random.randint(0, 3) for _ in range(5)], reverse=True)
        steps = [
            make_step(max_tokens=40, request_id=str(row))._replace(
                table=BlockTable(20 + row, [4, 7, 9]), policy=ExitPolicy("verified", (0.2,))
            )
            for row in range(5)
        ]
        begins = [0, *itertools.accumulate([count + 1 for count in drafts[:-1]])]
        positions, outputs = [20 + row for row in range(5)], []
        for _ in range(num_cycles):
            drafted = [[random.randint(1, 3) for _ in range(5)] for _ in range(drafts[0])]
            following = tuple(random.choice((1, 1, 1, 2, 3)) for _ in range(sum(drafts) + 5))
            last = []
            for row, count in enumerate(drafts):
                right = [drafted[k][row] == following[begins[row] + k] for k in range(count)]
                kept = right.index(False) if False in right else count
                positions[row] += kept + 1
                last.append(following[begins[row] + kept])
            scores = [[random.random() for _ in range(5)] for _ in range(drafts[0])]
            numbers = [last, list(positions)], scores, [1.0] * len(following), np.empty(0)
            outputs.append(CycleOutput(drafted, following, *numbers))
        if spoiled:
            outputs[1].best[random.randrange(len(outputs[1].best))] = math.nan
        host: Any = SimpleNamespace(read=lambda outputs=outputs: outputs)
        places = [RowPlace(step, count, [4, 7]) for step, count in zip(steps, drafts, strict=True)]
        launch = InFlightStep(places, 1, host, begins, Layers(1, 4), 2, num_cycles=num_cycles)
        results = launch.results({row: row for row in range(5)}, steps)
        by_place = [launch._by_place(output) for output in outputs]
        for row, (step, result) in enumerate(zip(steps, results, strict=True)):
            assert result == launch._any_result(step, row, outputs, by_place)
            assert result.num_valid == len(result.token_ids)
            num_usual += len(result.counts) == num_cycles
    assert num_usual < 190 if spoiled else num_usual == 200


@ONE_STEP_OR_MORE
def test_scores_that_are_not_finite_change_no_token(launches: Counter[str], steps_per_launch: int) -> None:
    prompts, params = random_prompts(5, 11), SamplingParams(max_tokens=30, ignore_eos=True)
    expected = answers(exit_parts(), prompts, params)
    parts = exit_parts()
    assert parts.runner.exits is not None
    with torch.no_grad():
        parts.runner.exits._scorers[0].weights.out.fill_(float("nan"))
    assert answers(parts, prompts, params) == expected
    assert parts.core.exits.non_finite_scores


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_steps_after_a_stop_string_are_not_counted(mode: str, launches: Counter[str]) -> None:
    """Nor are those after an end by a token or by the length."""
    prompts = random_prompts(5, 11)
    found = []
    for steps_per_launch in (1, 4):
        parts = exit_parts(share=HARDER)
        assert parts.runner.cycles is not None
        parts.runner.cycles.depths = fixed_depths(steps_per_launch)
        with poisoned(parts) as engine:
            whole = engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True, mode=mode))
            # A text in the middle of each answer.
            stops = ["".join(token.text for token in one.tokens)[20:24] for one in whole]
            params = [SamplingParams(max_tokens=60, ignore_eos=True, mode=mode, stop=(stop,)) for stop in stops]
            outputs = engine.generate(prompts, params)
        assert {one.finish_reason for one in outputs} == {FinishReason.STOP}
        usages = [one.usage for one in outputs if one.usage is not None]
        found.append((all_ids(outputs), [(usage.deep_passes, usage.num_drafts) for usage in usages]))
    assert found[0] == found[1]

"""Cycles of a model without trained exits, with acceptance replayed from another model.

A trace of the demo model has, for each cycle of each row, the number of drafts and the number of them that full depth
accepted. The large model runs its own cycles with as many drafts, makes and verifies all of them, and takes the number
of accepted drafts from the trace. The time of a cycle is measured; its yield is replayed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

from benchmarks.common.report import Measures
from benchmarks.common.runs import Bench, greedy
from benchmarks.common.timing import run_step
from benchmarks.gpu.parts import Session
from benchmarks.gpu.replay_cycles import Cycle, ReplayedCycles
from tide_core.batch import DraftCounts, RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.engine.assemble import Parts
from tide_core.engine.core import EngineCore
from tide_core.execution.cost_measure import measure
from tide_core.exits.cost import DraftPlanner
from tide_core.request import NO_EXITS, ExitPolicy, Request, SamplingParams

Run = Callable[[ScheduledBatch], StepResult]
USUAL_DRAFTS = 4
RECORDED = 24
"""Prompts of a trace."""
SEED = 0


class Replay:
    """The runner of an engine; the acceptance of each row's cycle is the next one of a trace."""

    def __init__(self, run: Run, trace: Sequence[Cycle]) -> None:
        self._run, self._trace = run, itertools.cycle(trace)
        self.cycles: list[Cycle] = []

    def __call__(self, batch: ScheduledBatch) -> StepResult:
        result = self._run(batch)
        return StepResult(tuple(self._row(step, row) for step, row in zip(batch.rows, result.rows, strict=True)))

    def _row(self, step: RowStep, got: RowResult) -> RowResult:
        [counts] = got.counts
        if got.error is not None or not counts.drafted:
            return got
        accepted = min(next(self._trace)[1], counts.drafted)
        self.cycles.append((counts.drafted, accepted))
        # Token ids do not matter; a cycle outputs one token more than it accepts.
        tokens = (*got.tokens, *[got.tokens[-1]] * accepted)[: accepted + 1]
        counts = counts._replace(accepted=accepted)
        return RowResult.of(tokens, len(step.token_ids) + accepted, got.layers_run, (counts,))


def replay(session: Session) -> Measures:
    """The large model in mode verified against full depth, with the number of drafts that is best by its own costs."""
    found, parts = Measures(), session.subject.exits
    for rows in session.sizes.replays:
        planned = best_drafts(session, rows)
        drafts = planned or min(USUAL_DRAFTS, session.bench.planner.max_drafts)
        trace = record(session.bench, drafts, session.sizes.tokens, rows)
        cycles = parts.runner.cycles
        replayed = None if cycles is None else ReplayedCycles(cycles, trace)
        turns = [_rates(session, parts, rows, drafts, trace, replayed) for _ in range(1 + session.sizes.turns)]
        rates = turns[1:]  # the first turn captures graphs
        full, verified = ([pair[i] for pair in rates] for i in (0, 1))
        ratio = statistics.median(b / a for a, b in rates)
        mean = sum(accepted for _, accepted in trace) / len(trace)
        found.figures[f"batch {rows}"] = {
            "drafts": drafts,
            "planned_drafts": planned,
            "num_cycles_in_trace": len(trace),
            "accepted_per_cycle": mean,
            "full_tokens_per_s": full,
            "verified_tokens_per_s": verified,
        }
        rate = f"{statistics.median(verified):.0f} against {statistics.median(full):.0f} tokens/s"
        found.add(f"replay_{rows}", ratio, f"replayed: {rate}, {drafts} drafts of which {mean:.2f} are accepted")
    return found


def best_drafts(session: Session, rows: int) -> int:
    """The planner's number of drafts by the large model's costs and the demo model's acceptance; may be 0."""
    bench, parts = session.bench, session.subject.exits
    most = bench.planner.max_drafts
    table = measure(
        parts.runner,
        parts.core.scheduler.blocks,
        max_rows=rows,
        max_drafts=most,
        context=session.subject.shape.context,
        max_positions=parts.max_model_len,
    )
    acceptance = copy.deepcopy(bench.planner.calibrated)
    assert acceptance is not None
    for drafted, accepted in record(bench, most, session.sizes.tokens, rows):
        acceptance.observe([(DraftCounts(drafted, accepted, allowed=most), 1)])
    return DraftPlanner(most, acceptance, table).plan(rows, rows).drafts


def record(bench: Bench, drafts: int, tokens: int, rows: int) -> list[Cycle]:
    """The cycles with `drafts` drafts of some prompts on the demo model, with `rows` rows in a step: a row that runs
    nearly alone has branches, so acceptance depends on the number of rows."""
    trace: list[Cycle] = []

    def note(step: RowStep, result: RowResult) -> None:
        if step.num_drafts == drafts and result.token_ids:
            trace.extend((each.drafted, each.accepted) for each in result.counts)

    core, runner = bench.parts.core, bench.parts.runner
    watch = mock.patch.object(core, "_runner", RunnerOf(observed(runner.run, note), runner.lookahead_steps))
    with bench.fixed_drafts(drafts), bench.at_most(rows), watch:
        bench.run(bench.spread(RECORDED), greedy("verified", tokens))
    if not trace:
        raise RuntimeError(f"no cycle of {drafts} drafts in answers of {tokens} tokens")
    random.Random(SEED).shuffle(trace)  # noqa: S311 - a replay may end before the trace ends: mix the prompts
    return trace


@dataclass(frozen=True)
class RunnerOf:
    """A runner around a function. Its steps run as a whole when they are waited for."""

    run: Run
    lookahead_steps: Callable[[], int]

    def start(self, batch: ScheduledBatch) -> _StepOf:
        return _StepOf(self.run, batch)


@dataclass(frozen=True)
class _StepOf:
    run: Run
    batch: ScheduledBatch

    def wait(self) -> StepResult:
        return self.run(self.batch)


def observed(run: Run, observe: Callable[[RowStep, RowResult], object]) -> Run:
    """`run`, which also passes the result of every row to `observe`."""

    def run_and_observe(batch: ScheduledBatch) -> StepResult:
        result = run(batch)
        for step, got in zip(batch.rows, result.rows, strict=True):
            observe(step, got)
        return result

    return run_and_observe


def runner_of(parts: Parts) -> Run:
    return functools.partial(run_step, parts)


def core_of(parts: Parts, run: Run) -> EngineCore:
    """A core with `run` in place of the runner, over the scheduler of parts that no engine uses: an engine's thread
    would step the rows of this core."""
    num_layers = parts.runner.adapter.num_layers
    runner = RunnerOf(run, parts.runner.lookahead_steps)
    return EngineCore(parts.core.scheduler, runner, parts.tokenizer, namespace="benchmark", num_layers=num_layers)


def _rates(
    session: Session, parts: Parts, rows: int, drafts: int, trace: Sequence[Cycle], replayed: ReplayedCycles | None
) -> tuple[float, float]:
    """Tokens per second of full depth and of replayed cycles."""
    assert parts.planner is not None
    parts.planner.max_drafts = drafts  # without a cost table every plan is this one
    verified = ExitPolicy("verified", (0.0,))
    prompt, run = session.subject.shape.context - session.sizes.tokens // 2, runner_of(parts)
    sizes = rows, prompt, session.sizes.tokens
    full = decode_rate(core_of(parts, run), NO_EXITS, *sizes)
    if replayed is None:
        return full, decode_rate(core_of(parts, Replay(run, trace)), verified, *sizes)
    with replayed.on():
        return full, decode_rate(core_of(parts, run), verified, *sizes)


def decode_rate(core: EngineCore, policy: ExitPolicy, rows: int, prompt: int, tokens: int) -> float:
    """Tokens per second of all rows, from the time when each has its first token to the time when one has ended."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for row in range(rows):
        ids = tuple((7 * row + i) % 200 + 1 for i in range(prompt))
        core.add(Request(f"row {row}", ids, params, seed=0, policy=policy))
    waiting = {f"row {row}" for row in range(rows)}
    while waiting:
        for output in core.step():
            waiting.discard(output.request_id)
    count, began, ended = 0, time.perf_counter(), None
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise output.error
            if ended is None:
                count += len(output.tokens)
            if output.finished and ended is None:
                ended = time.perf_counter()
    return count / ((ended or time.perf_counter()) - began)

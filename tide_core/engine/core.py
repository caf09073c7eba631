"""The engine without threads: requests in, `advance` until none is left, outputs out.

A step is schedule, run, commit. A commit records ids and lengths, which is all that the next schedule needs; the texts
of a step are made and emitted while the device runs the next one.

A fault of one row ends that row alone. A fault of a whole batch runs its rows again one by one, so that only the rows
that cause it end with an error. If all of them fail, one token of no request decides: if that fails too, the engine is
broken and raises.

Answers of mode fast are judged by full depth when nothing else is to be run (`judge.py`). Neither clients nor counters
see such a row.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tide_core.batch import DraftCounts, RowResult, RowStep, Runner, RunningStep, ScheduledBatch, StepResult
from tide_core.engine.judge import Judge
from tide_core.engine.scheduler import Scheduler
from tide_core.errors import EngineError, RequestError
from tide_core.exits.audit import DEFAULT_DELTA
from tide_core.exits.cost import ROWS_APART, RowAcceptance
from tide_core.kv.block_manager import BlockTable
from tide_core.outputs.exit_stats import ExitStats
from tide_core.outputs.request_state import RequestState, StepOutput
from tide_core.outputs.step_stats import ALL_VERIFIED, DraftStats, PendingStats, StepRecord
from tide_core.outputs.tokenizer import Tokenizer
from tide_core.request import FinishReason, Request, RequestOutput, SamplingParams
from tide_core.row import Row

logger = logging.getLogger("tide")


@dataclass(slots=True)
class Counters:
    num_finished: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    max_blocks_owned: int = 0


class Planner(Protocol):
    """What the core reports to the draft planner."""

    def observe(self, drafts: DraftStats) -> None: ...

    def observe_row(self, mine: RowAcceptance, cycles: Sequence[DraftCounts]) -> None: ...

    def observe_host(self, num_rows: int, num_tokens: int, seconds: float, steps_per_launch: int) -> None: ...


class EngineCore:
    """Scheduler, runner and texts of one engine; used by one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        namespace: str,
        num_layers: int,
        planner: Planner | None = None,
        prompt_exits: bool = False,
        audit_share: float = 0.0,
        audit_delta: float = DEFAULT_DELTA,
    ) -> None:
        """`prompt_exits`: prompt tokens of requests that skip layers may skip some, too. `audit_share`, `audit_delta`:
        of the judge."""
        self.scheduler = scheduler
        self.counters = Counters()
        self.exits = ExitStats(num_layers)
        self.judge = Judge(scheduler, share=audit_share, delta=audit_delta)
        self._num_layers = num_layers
        self._stats = PendingStats(num_layers)
        self._planner = planner
        self._runner = runner
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._prompt_exits = prompt_exits
        self._open: dict[str, RequestState] = {}
        self._pending: list[StepOutput] = []
        self._running_rows: list[Row] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending) or self.judge.has_work

    def take_over_counts(self, other: EngineCore) -> None:
        """Continue the counts of the core before this one."""
        self.counters, self.exits = other.counters, other.exits
        self.judge.take_over_counts(other.judge)
        self.scheduler.num_preemptions = other.scheduler.num_preemptions

    def add(self, request: Request) -> None:
        """Queue a checked request. Its id must not be in use."""
        if request.request_id in self._open:
            raise RequestError("request_id", request.request_id, "an id that no open request has")
        params = request.params
        text = self._tokenizer.stream(
            request.prompt_ids,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        row = self.scheduler.add(request, self._cache_namespace(request))
        self._open[request.request_id] = RequestState(row, text, request.end_ids, time.monotonic())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any phase; None if it is not open."""
        state = self._open.get(request_id)
        if state is None:
            return None
        mine = [output for output in self._pending if output.state is state]
        self._pending = [output for output in self._pending if output.state is not state]
        outputs = [self._make_output(output) for output in mine]
        tokens = tuple(token for output in outputs for token in output.tokens)
        prompt = tuple(token for output in outputs for token in output.prompt_logprobs) or state.take_prompt_logprobs()
        self._flush_stats()
        if request_id in self._open:  # else its text could not be made
            self._close(state)
        usage = state.usage(time.monotonic())
        return RequestOutput(request_id, tokens, FinishReason.ABORT, usage, prompt_logprobs=prompt)

    def step(self) -> list[RequestOutput]:
        """One step of all rows that fit in it, and all its outputs. For tests and benchmarks."""
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend)
        return outputs + self.emit()

    def advance(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        """One step of all rows that fit in it. The outputs of the step before are delivered while it runs; its own are
        pending afterwards."""
        self.judge.start()
        if not self.scheduler.has_work:
            deliver(self.emit())
            return
        scheduled_at = time.monotonic()
        rows, batch = self.scheduler.schedule(lookahead=self._runner.lookahead_steps())
        self.counters.num_steps += 1
        self.counters.max_blocks_owned = max(self.counters.max_blocks_owned, self.scheduler.blocks.num_owned)
        began_at = time.monotonic()
        self._running_rows = rows
        try:
            running = self._start(batch)  # a GPU works from here on
            try:
                deliver(self.emit())
            finally:
                result = self._wait(running, batch)
        finally:
            self._running_rows = []
        num_before = self.counters.num_output_tokens
        for row, step, row_result in zip(rows, batch.rows, result.rows, strict=True):
            self._commit(row, step, row_result, began_at)
        if result.timing is not None and self._planner is not None:
            host_s = time.monotonic() - scheduled_at - result.timing.wait_s
            num_tokens = self.counters.num_output_tokens - num_before
            self._planner.observe_host(len(rows), num_tokens, host_s, result.timing.max_steps_per_launch)

    def emit(self) -> list[RequestOutput]:
        """The pending outputs, with their texts."""
        pending, self._pending = self._pending, []
        outputs = [self._make_output(output) for output in pending if not output.state.ended_early]
        self._flush_stats()
        return outputs

    def check_idle(self) -> None:
        """With no request open, every block must be free."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self.scheduler.blocks.num_owned:
            raise EngineError(f"KV pool: {self.scheduler.blocks.num_owned} blocks are owned by no request")

    def _start(self, batch: ScheduledBatch) -> RunningStep | None:
        """None if it cannot be started; `_wait` then runs the rows one by one."""
        try:
            return self._runner.start(batch)
        except Exception:
            logger.exception("a step of %d rows could not be started; running them one by one", len(batch.rows))
            return None

    def _wait(self, running: RunningStep | None, batch: ScheduledBatch) -> StepResult:
        """The result of a step; if it failed, its rows run one by one and those that fail again get an error."""
        if running is not None:
            try:
                return running.wait()
            except Exception:
                logger.exception("a step of %d rows failed; running them one by one", len(batch.rows))
        result = StepResult(tuple(self._run_alone(row) for row in batch.rows))
        judging = self.scheduler.judging
        failed = [row.error is not None for row in result.rows]
        if all(failed) and not (len(failed) == 1 and judging is not None and batch.rows[0].table is judging.table):
            self._probe()
        return result

    def _run_alone(self, step: RowStep) -> RowResult:
        try:
            return self._runner.start(ScheduledBatch((step,))).wait().rows[0]
        except Exception as error:
            return RowResult(error=f"{type(error).__name__}: {error}")

    def _probe(self) -> None:
        """Run one token that belongs to no request; raises if the engine cannot even do that."""
        blocks = self.scheduler.blocks
        table = BlockTable()
        if not blocks.can_allocate(table, 1):
            return
        blocks.allocate(table, 1)
        probe = RowStep(Request("probe", (0,), SamplingParams(max_tokens=1), seed=0), table, (0,), (), samples=True)
        try:
            self._runner.start(ScheduledBatch((probe,))).wait()
        except Exception as error:
            raise EngineError(f"the engine cannot run a single token: {type(error).__name__}: {error}") from error
        finally:
            blocks.free(table)

    def _commit(self, row: Row, step: RowStep, result: RowResult, began_at: float) -> None:
        """Record the new ids and length of a row: all that the next schedule depends on."""
        if row is self.scheduler.judging:
            self.judge.commit(row, result)
            return
        state = self._open[row.request.request_id]
        if state.ended_early:  # its text failed while this step ran
            self._close(state)
            return
        if not result.num_valid and result.error is None:
            return  # still in flight
        if state.started_at is None:
            state.started_at = began_at
        if result.error is not None:
            self._fail(state, step, EngineError(result.error))
            return
        if result.prompt_logprobs:
            state.add_prompt_logprobs(step.prompt_targets.start, result.prompt_logprobs)
        # A chunk of a prompt may have been launched with another length than this step asks for.
        ran = result.num_valid if len(step.token_ids) > 1 else 1
        self.counters.num_prompt_tokens += ran - bool(row.output_ids)
        if not result.token_ids:
            self.scheduler.advance(row, result.num_valid, ())
            return
        if state.first_token_at is None:
            state.first_token_at = time.monotonic()
        try:
            self._commit_tokens(state, step, result)
        except Exception as error:  # the text of a row with stop strings, or an exit layer that does not exist
            logger.exception("text of one request failed")
            self._fail(state, step, EngineError(f"{type(error).__name__}: {error}"))

    def _commit_tokens(self, state: RequestState, step: RowStep, result: RowResult) -> None:
        """Tokens after the end of the text are dropped, together with the drafts they were."""
        row, policy = state.row, step.policy
        num, reason = state.cut(result.token_ids)
        tokens = None
        if row.request.params.stop:
            tokens, stopped = state.token_outputs_until_stop(result.tokens[:num], policy.mode, reason is not None)
            num, reason = len(tokens), FinishReason.STOP if stopped else reason
        if num < len(result.token_ids):
            result = result.first(num)
        self.counters.num_output_tokens += num
        row.num_differing += result.num_differing
        self.scheduler.advance(row, result.num_valid, result.token_ids)
        self._pending.append(StepOutput(state, step, result, tokens, reason))
        if reason is not None:
            self._close(state)

    def _make_output(self, output: StepOutput) -> RequestOutput:
        """A pending output with its text."""
        state, step, result, tokens, reason = output.state, output.step, output.result, output.tokens, output.reason
        request_id = step.request.request_id
        try:
            if result is not None:
                self._record(state, step, result)
                if tokens is None and reason is None:
                    emitted = state.token_outputs(result, step.policy.mode)
                    return RequestOutput(request_id, emitted, prompt_logprobs=state.take_prompt_logprobs())
                if tokens is None:
                    tokens, _ = state.token_outputs_until_stop(result.tokens, step.policy.mode, True)
        except Exception as error:
            return self._fail_output(state, error)
        if reason is not None:
            self.judge.offer(state.row, reason)
        emitted = () if tokens is None else tuple(tokens)
        prompt = state.take_prompt_logprobs()
        if reason is None:
            return RequestOutput(request_id, emitted, prompt_logprobs=prompt)
        return RequestOutput(request_id, emitted, reason, state.usage(time.monotonic()), output.error, prompt)

    def _fail_output(self, state: RequestState, error: Exception) -> RequestOutput:
        """The last output of a request whose text cannot be made."""
        logger.exception("text of one request failed")
        request_id = state.row.request.request_id
        if request_id in self._open and state.row not in self._running_rows:  # a row that runs keeps its blocks
            self._close(state)
        state.ended_early = True
        failure = EngineError(f"{type(error).__name__}: {error}")
        usage, prompt = state.usage(time.monotonic()), state.take_prompt_logprobs()
        return RequestOutput(request_id, (), FinishReason.ERROR, usage, failure, prompt)

    def _record(self, state: RequestState, step: RowStep, result: RowResult) -> None:
        """Count what was emitted and what ran for it."""
        # A prompt's layers are not the output's; its last token ran all of them for the first output token.
        layers_run = result.layers_run if len(step.token_ids) == 1 else self._num_layers
        audits = tuple([note.audit for note in result.notes]) if result.notes else ALL_VERIFIED
        record = StepRecord(result.exit_layers, audits, layers_run, result.counts, step.request.informs_planner)
        self._stats.add(record, state.steps)
        if self._planner is not None and self.scheduler.num_running <= ROWS_APART:
            self._planner.observe_row(state.row.acceptance, result.counts)

    def _flush_stats(self) -> None:
        drafts = self._stats.flush(self.exits)
        if drafts and self._planner is not None:
            self._planner.observe(drafts)

    def _fail(self, state: RequestState, step: RowStep, error: Exception) -> None:
        """End a request with an error; its last output follows those that are pending."""
        self._close(state)
        self._pending.append(StepOutput(state, step, reason=FinishReason.ERROR, error=error))

    def _close(self, state: RequestState) -> None:
        """Free all that the request holds."""
        self.scheduler.remove(state.row)
        del self._open[state.row.request.request_id]
        self.counters.num_finished += 1

    def _cache_namespace(self, request: Request) -> bytes | None:
        """KV is shared only between requests of one model, one kind of policy and one salt.

        Exit state exists only for requests that may exit. KV of skipped layers is never shared, not even with the row
        itself after a preemption: it depends on where other tokens left. So a row that skips layers shares its prompt
        (`Row.num_shareable`), unless prompt tokens may exit. A prompt whose log-probabilities are asked for must run
        whole."""
        policy = request.policy
        if (policy.skips_layers and self._prompt_exits) or request.params.prompt_logprobs is not None:
            return None
        parts = (self._namespace, "exits" if policy.may_exit else "full", request.cache_salt)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

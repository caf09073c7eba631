"""The engine without threads: requests in, `step()` until nothing is left, outputs out.

A step is schedule, run, commit. Whatever goes wrong with one row ends that row alone; what goes wrong with a whole
batch is tried again row by row, so that only the rows that cause it end with an error. If all of them fail, one token
of no request decides whose fault it is: if that fails too, the engine is broken and says so.

Every token that left early and was compared with full depth goes into the audit book. When the bound of mode bounded
breaks, its rows go on in mode verified.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.engine.audit import AuditBook
from tide_core.engine.exit_stats import ExitStats
from tide_core.engine.policy import without_exits
from tide_core.engine.scheduler import Row, Scheduler
from tide_core.engine.tokenizer import TextStream, Tokenizer
from tide_core.errors import EngineError, RequestError
from tide_core.quick import quick
from tide_core.request import Audit, FinishReason, Request, RequestOutput, SamplingParams, TokenOutput, Usage

logger = logging.getLogger("tide")

make_token, make_output = quick(TokenOutput), quick(RequestOutput)


@dataclass(slots=True, eq=False)
class Progress:
    """What the core keeps of a request beside its row: text, times, and what its usage will say."""

    row: Row
    text: TextStream
    end_ids: frozenset[int]
    """Ids that end the text and are no part of it."""
    arrived_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    exits: dict[int, int] = field(default_factory=dict)
    """Output tokens by exit layer."""
    layers_run: int = 0
    deep_passes: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Counters:
    num_finished: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    max_blocks_owned: int = 0


class EngineCore:
    """Scheduler, runner and texts of one engine; used by one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        run: Callable[[ScheduledBatch], StepResult],
        tokenizer: Tokenizer,
        *,
        namespace: str,
        num_layers: int,
        on_result: Callable[[RowStep, RowResult], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self.exits = ExitStats(num_layers)
        self.audits = AuditBook()
        self._num_layers = num_layers
        self._on_result = on_result
        self._run = run
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._clock = clock
        self._open: dict[str, Progress] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def count_on(self, other: EngineCore) -> None:
        """Go on with the counts of the core before this one; what its audits found says nothing about these exits."""
        self.counters, self.exits = other.counters, other.exits
        self.scheduler.num_preemptions = other.scheduler.num_preemptions

    def add(self, request: Request) -> None:
        """Queue a checked request. Its id must not be in use."""
        if request.request_id in self._open:
            raise RequestError("request_id", request.request_id, "an id that no open request has")
        text = self._tokenizer.stream(request.prompt_ids, request.params.stop)
        epsilon = request.policy.epsilon
        is_broken = epsilon is not None and self.audits.ledger(f"bounded:{epsilon:g}", epsilon).broken
        row = self.scheduler.add(request, self._cache_namespace(request))
        if is_broken:
            row.use(without_exits(row.policy))
        params = request.params
        end_ids = frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, *request.eos_ids))
        self._open[request.request_id] = Progress(row, text, end_ids, self._clock())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any phase; None if it is not open."""
        progress = self._open.get(request_id)
        return None if progress is None else self._finish(progress, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """One step of all rows that fit in it."""
        rows, batch = self.scheduler.schedule()
        began_at = self._begin()
        result = self._run_fenced(batch)
        committed = [
            self._commit(row, step, got, began_at) for row, step, got in zip(rows, batch.rows, result.rows, strict=True)
        ]
        return [output for output in committed if output is not None]

    def check_idle(self) -> None:
        """With no request open, every block must be back."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self.scheduler.blocks.num_owned:
            raise EngineError(f"KV pool: {self.scheduler.blocks.num_owned} blocks are owned by no request")

    def _begin(self) -> float:
        """Count a step; the time it begins at."""
        self.counters.num_steps += 1
        self.counters.max_blocks_owned = max(self.counters.max_blocks_owned, self.scheduler.blocks.num_owned)
        return self._clock()

    def _run_fenced(self, batch: ScheduledBatch) -> StepResult:
        """Run the batch; if that raises, run its rows one by one and give those that raise again an error."""
        try:
            return self._run(batch)
        except Exception:
            logger.exception("step of %d rows failed; running them one by one", len(batch.rows))
        result = StepResult(tuple(self._run_alone(ScheduledBatch((row,))) for row in batch.rows))
        if all(row.error is not None for row in result.rows):
            self._probe()
        return result

    def _probe(self) -> None:
        """Run one token that belongs to no request; raises if the engine cannot even do that."""
        blocks = self.scheduler.blocks
        table = blocks.new_table()
        if not blocks.can_allocate(table, 1):
            return
        blocks.allocate(table, 1)
        probe = RowStep(Request("probe", (0,), SamplingParams(max_tokens=1), seed=0), table, (0,), (), samples=True)
        try:
            self._run(ScheduledBatch((probe,)))
        except Exception as error:
            raise EngineError(f"the engine cannot run a single token: {type(error).__name__}: {error}") from error
        finally:
            blocks.free(table)

    def _run_alone(self, batch: ScheduledBatch) -> RowResult:
        try:
            return self._run(batch).rows[0]
        except Exception as error:
            return RowResult(error=f"{type(error).__name__}: {error}")

    def _commit(self, row: Row, step: RowStep, result: RowResult, began_at: float) -> RequestOutput | None:
        progress = self._open[row.request.request_id]
        if progress.started_at is None:
            progress.started_at = began_at
        if result.error is not None:
            return self._finish(progress, FinishReason.ERROR, error=EngineError(result.error))
        self.counters.num_prompt_tokens += len(step.token_ids) - bool(row.output_ids)
        if not result.tokens:
            self.scheduler.advance(row, result.num_valid, ())
            return None
        if progress.first_token_at is None:
            progress.first_token_at = self._clock()
        try:
            return self._emit(progress, step, result)
        except Exception as error:
            logger.exception("text of one request failed")
            return self._finish(progress, FinishReason.ERROR, error=EngineError(f"{type(error).__name__}: {error}"))

    def _emit(self, progress: Progress, step: RowStep, result: RowResult) -> RequestOutput:
        """The tokens the row has gained as an output; tokens past the end are dropped with the drafts they were."""
        row, mode = progress.row, step.policy.mode
        num_before = len(row.output_ids)
        outputs: list[TokenOutput] = []
        token_ids: list[int] = []
        reason: FinishReason | None = None
        for token in result.tokens:
            token_id = token.token_id
            token_ids.append(token_id)
            text, reason = self._text(progress, token_id, num_before + len(token_ids))
            outputs.append(
                make_token(
                    token_id,
                    text,
                    token.exit_layer,
                    token.logprob,
                    token.top_logprobs,
                    token.score,
                    token.audit,
                    mode,
                )
            )
            if reason is not None:
                break
        dropped = len(result.tokens) - len(outputs)
        self._account(progress, step, result, outputs)
        self.scheduler.advance(row, result.num_valid - dropped, token_ids)
        if reason is None:
            return make_output(row.request.request_id, tuple(outputs))
        return self._finish(progress, reason, tokens=tuple(outputs))

    def _text(self, progress: Progress, token_id: int, num_output: int) -> tuple[str, FinishReason | None]:
        """The text that output token number `num_output` releases, and the reason if it is the last."""
        stream = progress.text
        ends = token_id in progress.end_ids
        text = "" if ends else stream.push(token_id)
        last = ends or num_output >= progress.row.request.params.max_tokens
        if not (last or stream.stopped):
            return text, None
        if not stream.stopped:
            text += stream.finish()  # what was held back; a stop string may be complete only now
        return text, FinishReason.STOP if ends or stream.stopped else FinishReason.LENGTH

    def _account(self, progress: Progress, step: RowStep, result: RowResult, outputs: list[TokenOutput]) -> None:
        """Count what was emitted and what truly ran for it, and hear what full depth says about it."""
        self.counters.num_output_tokens += len(outputs)
        # A prompt's layers are not the output's; its last token ran all of them for the first output token.
        layers_run = result.layers_run if len(step.token_ids) == 1 else self._num_layers
        counts = result.counts
        accepted = min(counts.accepted, len(outputs))
        self.exits.record(
            [(token.exit_layer, token.audit) for token in outputs],
            layers_run=layers_run,
            deep_passes=1,
            drafts=counts.drafted,
            accepted=accepted,
            non_finite_scores=counts.non_finite,
        )
        for token in outputs:
            progress.exits[token.exit_layer] = progress.exits.get(token.exit_layer, 0) + 1
        progress.layers_run += layers_run
        progress.deep_passes += 1
        progress.num_drafts += counts.drafted
        progress.num_accepted += accepted
        if self._on_result is not None:
            self._on_result(step, result)
        policy = step.policy
        if policy.mode == "bounded" and policy.epsilon is not None:
            ledger = self.audits.ledger(f"bounded:{policy.epsilon:g}", policy.epsilon)
            was_broken = ledger.broken
            ledger.observe(len(outputs), sum(token.audit is Audit.DISAGREED for token in outputs))
            if ledger.broken and not was_broken:
                logger.warning("bound %g is broken: bounded requests go on as verified", policy.epsilon)
                self._fall_back(policy.epsilon)
        elif policy.mode == "fast":
            audited = [token.audit for token in outputs if token.audit in (Audit.AGREED, Audit.DISAGREED)]
            if audited:
                self.audits.ledger("fast").observe(len(audited), audited.count(Audit.DISAGREED))

    def _fall_back(self, epsilon: float) -> None:
        for row in (*self.scheduler.running, *self.scheduler.waiting):
            if row.policy.epsilon == epsilon:
                row.use(without_exits(row.policy))

    def _finish(
        self,
        progress: Progress,
        reason: FinishReason,
        *,
        tokens: tuple[TokenOutput, ...] = (),
        error: Exception | None = None,
    ) -> RequestOutput:
        """Give everything back that the request held and say the last word on it."""
        row = progress.row
        self.scheduler.remove(row)
        del self._open[row.request.request_id]
        self.counters.num_finished += 1
        now = self._clock()
        usage = Usage(
            prompt_tokens=len(row.request.prompt_ids),
            output_tokens=len(row.output_ids),
            cached_tokens=row.cached_tokens,
            num_preemptions=row.num_preemptions,
            layers_run=progress.layers_run,
            deep_passes=progress.deep_passes,
            num_drafts=progress.num_drafts,
            num_accepted=progress.num_accepted,
            exits=progress.exits,
            queue_s=(now if progress.started_at is None else progress.started_at) - progress.arrived_at,
            first_token_s=(now if progress.first_token_at is None else progress.first_token_at) - progress.arrived_at,
            total_s=now - progress.arrived_at,
        )
        return RequestOutput(row.request.request_id, tokens, reason, usage, error)

    def _cache_namespace(self, request: Request) -> bytes | None:
        """KV is shared only between requests of one model, one kind of policy and one salt.

        What exits leave beside the KV is there only for requests that may exit. KV of skipped layers is shared with
        nobody, not even with the row itself after a preemption: it depends on where other tokens left."""
        policy = request.policy
        if policy.skips_layers:
            return None
        parts = (self._namespace, "exits" if policy.may_exit else "full", request.cache_salt)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

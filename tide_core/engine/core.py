"""The engine without threads: requests in, `step()` until nothing is left, outputs out.

A step is schedule, run, commit. Its texts are made and delivered while the device is busy with the step behind it, if
there is one: rows and lengths are all that the next step needs to know.

Whatever goes wrong with one row ends that row alone; what goes wrong with a whole batch is tried again row by row, so
that only the rows that cause it end with an error. If all of them fail, one token of no request decides whose fault it
is: if that fails too, the engine is broken and says so.

Every token that left early and was compared with full depth goes into the audit book. When the bound of mode bounded
breaks, its rows go on in mode verified.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.engine.scheduler import Scheduler
from tide_core.errors import EngineError, RequestError
from tide_core.exits.audit import AuditBook
from tide_core.exits.policy import without_exits
from tide_core.outputs.exit_stats import ExitStats
from tide_core.outputs.request_state import Gain, Progress, make_output
from tide_core.outputs.step_stats import ALL_VERIFIED, Drafts, Tally
from tide_core.outputs.tokenizer import Tokenizer
from tide_core.request import Audit, ExitPolicy, FinishReason, Request, RequestOutput, SamplingParams
from tide_core.row import Row

logger = logging.getLogger("tide")

MAY_BREAK = ("bounded", "fast")
"""Modes whose steps are counted at once: what is found may change the next one. Others wait for the device's time."""


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
        on_drafts: Callable[[Drafts], None] | None = None,
        during: Callable[[Callable[[], None]], None] | None = None,
        waited: Callable[[], tuple[float, int] | None] | None = None,
        on_host: Callable[[int, int, float, int], None] | None = None,
        forget: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_drafts` hears what became of the drafts of a step, and of how many rows.

        `during` is told what the next `run` shall do while the device works; without it that is done before.
        `waited` says how long the last `run` has waited for a device that works meanwhile, and how many cycles it was,
        None where it does not; `on_host` then hears the rows and tokens of the step, how long the host was busy with
        it, and the cycles. `forget` is told when nobody is left who could want what `run` has begun."""
        self.scheduler = scheduler
        self.counters = Counters()
        self.exits = ExitStats(num_layers)
        self.audits = AuditBook()
        self._num_layers = num_layers
        self._tally = Tally(num_layers)
        self._on_drafts = on_drafts
        self._run = run
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._clock = clock
        self._during = during
        self._waited, self._on_host, self._forget = waited, on_host, forget
        self._open: dict[str, Progress] = {}
        self._unsaid: list[Gain] = []
        self._in_flight: list[Row] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._unsaid)

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
            row.policy = without_exits(row.policy)
        self._open[request.request_id] = Progress(row, text, request.end_ids, self._clock())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any phase; None if it is not open."""
        progress = self._open.get(request_id)
        if progress is None:
            return None
        earlier = [gain for gain in self._unsaid if gain.progress is progress]
        self._unsaid = [gain for gain in self._unsaid if gain.progress is not progress]
        tokens = tuple(token for gain in earlier for token in self._say(gain).tokens)
        self._tally.take(self.exits, self._on_drafts)
        if request_id not in self._open:  # its text could not be made
            return RequestOutput(request_id, tokens, FinishReason.ABORT, progress.usage(self._clock()))
        self._close(progress)
        if not self.scheduler.has_work and self._forget is not None:
            self._forget()
        return RequestOutput(request_id, tokens, FinishReason.ABORT, progress.usage(self._clock()))

    def step(self) -> list[RequestOutput]:
        """One step of all rows that fit in it, and all that came of it."""
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend)
        return outputs + self.say()

    def advance(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        """One step of all rows that fit in it. What the step before it gave is delivered meanwhile; what this one gives
        is left to be said."""
        if not self.scheduler.has_work:
            deliver(self.say())
            return
        scheduled_at = self._clock()
        rows, batch = self.scheduler.schedule()
        began_at = self._begin()
        self._in_flight = rows
        try:
            result = self._run_fenced(batch, deliver)
        finally:
            self._in_flight = []
        before = self.counters.num_output_tokens
        for row, step, got in zip(rows, batch.rows, result.rows, strict=True):
            self._commit(row, step, got, began_at)
        if self._waited is not None and self._on_host is not None and (waited := self._waited()) is not None:
            gained = self.counters.num_output_tokens - before
            seconds, most_cycles = waited
            self._on_host(len(rows), gained, self._clock() - scheduled_at - seconds, most_cycles)

    def say(self) -> list[RequestOutput]:
        """What has not been said yet, as outputs."""
        unsaid, self._unsaid = self._unsaid, []
        outputs = [self._say(gain) for gain in unsaid if not gain.progress.is_over]
        self._tally.take(self.exits, self._on_drafts)
        return outputs

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

    def _run_fenced(self, batch: ScheduledBatch, deliver: Callable[[list[RequestOutput]], None]) -> StepResult:
        """Run the batch; if that raises, run its rows one by one and give those that raise again an error."""
        failures: list[BaseException] = []

        def meanwhile() -> None:
            try:
                deliver(self.say())
            except BaseException as failure:  # no fault of the step
                failures.append(failure)

        if self._during is None:
            meanwhile()
        else:
            self._during(meanwhile)
        try:
            result = self._run(batch)
        except Exception:
            logger.exception("step of %d rows failed; running them one by one", len(batch.rows))
            result = self._run_one_by_one(batch)
        if failures:
            raise failures[0]
        return result

    def _run_one_by_one(self, batch: ScheduledBatch) -> StepResult:
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

    def _commit(self, row: Row, step: RowStep, result: RowResult, began_at: float) -> None:
        """Note what a row has gained: its ids and its length, on which the next step depends."""
        progress = self._open[row.request.request_id]
        if progress.is_over:  # its text failed while this step ran
            self._close(progress)
            return
        if not result.num_valid and result.error is None:
            return  # it has only waited
        if progress.started_at is None:
            progress.started_at = began_at
        if result.error is not None:
            self._end(progress, step, FinishReason.ERROR, error=EngineError(result.error))
            return
        # A piece of a prompt may have been begun when another length of it was asked for.
        ran = result.num_valid if len(step.token_ids) > 1 else 1
        self.counters.num_prompt_tokens += ran - bool(row.output_ids)
        if not result.token_ids:
            self.scheduler.advance(row, result.num_valid, ())
            return
        if progress.first_token_at is None:
            progress.first_token_at = self._clock()
        try:
            self._gain(progress, step, result)
        except Exception as error:  # the text of a row with stop strings, or an exit layer that cannot be
            logger.exception("text of one request failed")
            self._end(progress, step, FinishReason.ERROR, error=EngineError(f"{type(error).__name__}: {error}"))

    def _gain(self, progress: Progress, step: RowStep, result: RowResult) -> None:
        """Tokens past the end of the text are dropped with the drafts they were."""
        row, policy = progress.row, step.policy
        num, reason = progress.cut(result.token_ids)
        said = None
        if row.request.params.stop:
            said, stopped = progress.say(result.tokens[:num], policy.mode, reason is not None)
            num, reason = len(said), FinishReason.STOP if stopped else reason
        if num < len(result.token_ids):
            result = result.first(num)
        self.counters.num_output_tokens += num
        is_counted = policy.mode in MAY_BREAK
        if is_counted:
            self._account(progress, step, result)
        self.scheduler.advance(row, result.num_valid, result.token_ids)
        self._unsaid.append(Gain(progress, step, result, said, reason, None, is_counted))
        if reason is not None:
            self._close(progress)

    def _say(self, gain: Gain) -> RequestOutput:
        """A gain as an output, with its text."""
        progress, step, result, reason, said = gain.progress, gain.step, gain.result, gain.reason, gain.said
        request_id = step.request.request_id
        try:
            if result is not None:
                if not gain.is_counted:
                    self._account(progress, step, result)
                if said is None:
                    if reason is None:
                        return make_output(request_id, progress.say_on(result, step.policy.mode))
                    said, _ = progress.say(result.tokens, step.policy.mode, True)
        except Exception as error:
            return self._failed(progress, error)
        tokens = () if said is None else tuple(said)
        if reason is None:
            return make_output(request_id, tokens)
        return RequestOutput(request_id, tokens, reason, progress.usage(self._clock()), gain.error)

    def _failed(self, progress: Progress, error: Exception) -> RequestOutput:
        """The last output of a request whose text cannot be made."""
        logger.exception("text of one request failed")
        request_id = progress.row.request.request_id
        if (
            request_id in self._open and progress.row not in self._in_flight
        ):  # a row that runs keeps its blocks till then
            self._close(progress)
        progress.is_over = True
        failure = EngineError(f"{type(error).__name__}: {error}")
        return RequestOutput(request_id, (), FinishReason.ERROR, progress.usage(self._clock()), failure)

    def _account(self, progress: Progress, step: RowStep, result: RowResult) -> None:
        """Count what was emitted and what truly ran for it."""
        # A prompt's layers are not the output's; its last token ran all of them for the first output token.
        layers_run = result.layers_run if len(step.token_ids) == 1 else self._num_layers
        audits = tuple([note.audit for note in result.notes]) if result.notes else ALL_VERIFIED
        entry = result.exit_layers, audits, layers_run, result.counts, step.request.drafts_as_others
        self._tally.add(entry, progress.entries)
        if step.policy.mode in MAY_BREAK:
            self._tally.take(self.exits, self._on_drafts)
            self._audit(step.policy, len(result.token_ids), audits)

    def _audit(self, policy: ExitPolicy, num_tokens: int, audits: Sequence[Audit]) -> None:
        """Hear what full depth says about tokens that left before it was asked."""
        if policy.mode == "bounded" and policy.epsilon is not None:
            ledger = self.audits.ledger(f"bounded:{policy.epsilon:g}", policy.epsilon)
            was_broken = ledger.broken
            ledger.observe(num_tokens, audits.count(Audit.DISAGREED))
            if ledger.broken and not was_broken:
                logger.warning("bound %g is broken: bounded requests go on as verified", policy.epsilon)
                self._fall_back(policy.epsilon)
        elif policy.mode == "fast":
            agreed, disagreed = audits.count(Audit.AGREED), audits.count(Audit.DISAGREED)
            if agreed or disagreed:
                self.audits.ledger("fast").observe(agreed + disagreed, disagreed)

    def _fall_back(self, epsilon: float) -> None:
        for row in (*self.scheduler.running, *self.scheduler.waiting):
            if row.policy.epsilon == epsilon:
                row.policy = without_exits(row.policy)

    def _end(self, progress: Progress, step: RowStep, reason: FinishReason, *, error: Exception) -> None:
        """The request ends here; its last word comes behind what has not been said yet."""
        self._close(progress)
        self._unsaid.append(Gain(progress, step, reason=reason, error=error))

    def _close(self, progress: Progress) -> None:
        """Give everything back that the request held."""
        self.scheduler.remove(progress.row)
        del self._open[progress.row.request.request_id]
        self.counters.num_finished += 1

    def _cache_namespace(self, request: Request) -> bytes | None:
        """KV is shared only between requests of one model, one kind of policy and one salt.

        What exits leave beside the KV is there only for requests that may exit. KV of skipped layers is shared with
        nobody, not even with the row itself after a preemption: it depends on where other tokens left."""
        policy = request.policy
        if policy.skips_layers:
            return None
        parts = (self._namespace, "exits" if policy.may_exit else "full", request.cache_salt)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

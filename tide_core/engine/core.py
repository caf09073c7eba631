"""The engine without threads: requests in, `step()` until nothing is left, outputs out.

A step is schedule, run, commit. Whatever goes wrong with one row ends that row alone; what goes wrong with a whole
batch is tried again row by row, so that only the rows that cause it end with an error. If all of them fail, one token
of no request decides whose fault it is: if that fails too, the engine is broken and says so.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.engine.scheduler import Row, Scheduler
from tide_core.engine.tokenizer import TextStream, Tokenizer
from tide_core.errors import EngineError, RequestError
from tide_core.request import FinishReason, Request, RequestOutput, SamplingParams, TokenOutput, Usage

logger = logging.getLogger("tide")


@dataclass(slots=True, eq=False)
class Progress:
    """What the core keeps of a request beside its row: text and times."""

    row: Row
    text: TextStream
    arrived_at: float
    started_at: float | None = None
    first_token_at: float | None = None


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._run = run
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._clock = clock
        self._open: dict[str, Progress] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a checked request. Its id must not be in use."""
        if request.request_id in self._open:
            raise RequestError("request_id", request.request_id, "an id that no open request has")
        text = self._tokenizer.stream(request.prompt_ids, request.params.stop)
        row = self.scheduler.add(request, self._cache_namespace(request))
        self._open[request.request_id] = Progress(row, text, self._clock())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any phase; None if it is not open."""
        progress = self._open.get(request_id)
        return None if progress is None else self._finish(progress, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """One step of all rows that fit in it."""
        rows, batch = self.scheduler.schedule()
        self._note_start(rows)
        result = self._run_fenced(batch)
        outputs = [self._commit(row, step, got) for row, step, got in zip(rows, batch.rows, result.rows, strict=True)]
        return [output for output in outputs if output is not None]

    def check_idle(self) -> None:
        """With no request open, every block must be back."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self.scheduler.blocks.num_owned:
            raise EngineError(f"KV pool: {self.scheduler.blocks.num_owned} blocks are owned by no request")

    def _note_start(self, rows: list[Row]) -> None:
        now = self._clock()
        for row in rows:
            progress = self._open[row.request.request_id]
            if progress.started_at is None:
                progress.started_at = now
        self.counters.num_steps += 1
        self.counters.max_blocks_owned = max(self.counters.max_blocks_owned, self.scheduler.blocks.num_owned)

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

    def _commit(self, row: Row, step: RowStep, result: RowResult) -> RequestOutput | None:
        progress = self._open[row.request.request_id]
        if result.error is not None:
            return self._finish(progress, FinishReason.ERROR, error=EngineError(result.error))
        num_tokens = len(step.token_ids)
        self.scheduler.advance(row, num_tokens, result.token_id)
        if result.token_id is None:
            self.counters.num_prompt_tokens += num_tokens
            return None
        self.counters.num_prompt_tokens += num_tokens - 1 if len(row.output_ids) > 1 else num_tokens
        self.counters.num_output_tokens += 1
        if progress.first_token_at is None:
            progress.first_token_at = self._clock()
        try:
            return self._emit(progress, result)
        except Exception as error:
            logger.exception("text of one request failed")
            return self._finish(progress, FinishReason.ERROR, error=EngineError(f"{type(error).__name__}: {error}"))

    def _emit(self, progress: Progress, result: RowResult) -> RequestOutput:
        """The newest token as an output; the last one carries the reason and the counts."""
        request, params = progress.row.request, progress.row.request.params
        token_id = progress.row.output_ids[-1]
        ends = token_id in params.stop_ids or (token_id in request.eos_ids and not params.ignore_eos)
        text = "" if ends else progress.text.push(token_id)
        last = ends or len(progress.row.output_ids) >= params.max_tokens
        if last and not progress.text.stopped:
            text += progress.text.finish()  # what was held back; a stop string may be complete only now
        reason = FinishReason.STOP if ends or progress.text.stopped else FinishReason.LENGTH if last else None
        token = TokenOutput(token_id, text, result.exit_layer, result.logprob, result.top_logprobs)
        if reason is None:
            return RequestOutput(request.request_id, (token,))
        return self._finish(progress, reason, tokens=(token,))

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
            queue_s=(now if progress.started_at is None else progress.started_at) - progress.arrived_at,
            first_token_s=(now if progress.first_token_at is None else progress.first_token_at) - progress.arrived_at,
            total_s=now - progress.arrived_at,
        )
        return RequestOutput(row.request.request_id, tokens, reason, usage, error)

    def _cache_namespace(self, request: Request) -> bytes:
        """KV is shared only between requests of one model, one policy and one salt."""
        parts = (self._namespace, request.params.mode, request.cache_salt)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

"""Answers of mode fast, judged by full depth.

A share of the finished answers is judged: plain greedy ones, chosen by a hash of the request id. An answer is judged by
an internal request of mode full. Its prompt is the prompt of the answer and the answer without its last token; the
likeliest token of each place is full depth's choice there, and the one token that it generates is the choice for the
last place. A token has the same bits alone and in any batch, so these are the choices that mode full would have made
after the same text. The loss of the answer is the share of its tokens that full depth would have chosen otherwise.

Nobody waits for it. Answers are judged one after another, in the order in which they ended, in what the requests leave
free: it starts while nobody waits, and gives way and starts again later. Up to `MAX_WAITING` answers wait, as ids; a
further one is dropped and counted. Whether one is dropped depends on the load and not on its text.

The evidence is kept for each tenant (the cache salt) and contract, in an `AuditProcess`; at most `MAX_PROCESSES` are,
and the one used longest ago goes first, those with an alarm last. Without an alarm a tenant then starts anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tide_core.batch import RowResult
from tide_core.engine.scheduler import Scheduler
from tide_core.exits.artefact.contract import LOSS_CAP
from tide_core.exits.audit import DEFAULT_DELTA, AuditProcess
from tide_core.request import FinishReason, Request, SamplingParams
from tide_core.row import Row
from tide_core.stats import AuditSnapshot, contract_name, tenant_label

logger = logging.getLogger("tide")

MAX_WAITING = 64
MAX_PROCESSES = 1024


class _Answer(NamedTuple):
    tenant: str
    epsilon: float | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class Judge:
    """Used by the engine's thread; `forget`, `is_alarmed` and `snapshots` by any."""

    def __init__(self, scheduler: Scheduler, *, share: float = 0.0, delta: float = DEFAULT_DELTA) -> None:
        """`share` of the answers are judged; `delta`: most probability of ever raising a false alarm, for each tenant
        and contract."""
        self._scheduler, self._share, self._delta = scheduler, share, delta
        self.num_dropped = 0
        """Answers that were chosen to be judged and were not."""
        self.totals: dict[str, tuple[int, float]] = {}
        """Judged answers and the sum of their losses, by contract."""
        self._waiting: deque[_Answer] = deque()  # the first is the one that is judged
        self._row: Row | None = None
        self._choices: list[int] = []
        self._processes: dict[tuple[str, float | None], AuditProcess] = {}  # used longest ago first
        self._alarmed: set[tuple[str, float | None]] = set()
        self._failed = self._closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) and not self._closed

    def offer(self, row: Row, reason: FinishReason) -> None:
        """An answer has ended: judge it later, if it is one of those to judge."""
        request = row.request
        ended = reason in (FinishReason.STOP, FinishReason.LENGTH) and bool(row.output_ids)
        if self._closed or not ended or not is_judged(request, self._share):
            return
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        ids = request.prompt_ids, tuple(row.output_ids)
        self._waiting.append(_Answer(request.cache_salt, request.policy.epsilon, *ids))

    def start(self) -> None:
        """Start to judge the answer that has waited longest, if requests leave enough free."""
        if not self.has_work or (self._row is not None and self._row is self._scheduler.judging):
            return
        self._choices = []
        self._row = self._scheduler.add_judge(_request_of(self._waiting[0]))
        if self._row is None and not self._scheduler.has_work:  # it will not fit later either
            self._drop("the KV pool is too small for it")

    def commit(self, row: Row, result: RowResult) -> None:
        """Record what a step found. Whatever goes wrong ends the judging of this answer alone."""
        error = result.error
        if error is None:
            try:
                self._choices += [token.top_logprobs[0][0] for token in result.prompt_logprobs]
                if not result.token_ids:
                    self._scheduler.advance(row, result.num_valid, ())
                    return
                loss = _loss(self._waiting[0].output_ids, [*self._choices, result.token_ids[0]])
            except Exception as fault:
                error = f"{type(fault).__name__}: {fault}"
        self._scheduler.remove(row)
        if error is not None:
            self._drop(error)
            return
        self._row = None
        self._observe(self._waiting.popleft(), loss)

    def is_alarmed(self, tenant: str, epsilon: float | None) -> bool:
        """Whether the contract was found broken for a tenant."""
        return (tenant, epsilon) in self._alarmed

    def forget(self) -> None:
        """Drop all evidence and all alarms."""
        self._processes, self._alarmed = {}, set()

    def close(self) -> None:
        """Judge no further answer: others exits are in use."""
        self._closed = True

    def take_over_counts(self, other: Judge) -> None:
        """Continue the counts of the judge before this one. Its evidence is about other exits."""
        self.num_dropped, self.totals = other.num_dropped, other.totals.copy()
        other.close()

    def snapshots(self) -> tuple[AuditSnapshot, ...]:
        """Of all tenants and contracts, those with an alarm first, then those with most evidence."""
        found = [process.snapshot(tenant_label(tenant)) for (tenant, _), process in self._processes.copy().items()]
        return tuple(sorted(found, key=lambda audit: (not audit.alarmed, -audit.evidence)))

    def _observe(self, answer: _Answer, loss: float) -> None:
        processes, alarmed = self._processes, self._alarmed  # another thread may replace both
        key = answer.tenant, answer.epsilon
        process = processes.pop(key, None)
        if process is None:
            process = AuditProcess(answer.epsilon, self._delta)
            if len(processes) >= MAX_PROCESSES:
                gone = next((other for other in processes if other not in alarmed), next(iter(processes)))
                del processes[gone]
                alarmed.discard(gone)
        process.observe(loss)
        processes[key] = process
        contract = contract_name(answer.epsilon)
        num, total = self.totals.get(contract, (0, 0.0))
        self.totals[contract] = num + 1, total + min(loss, LOSS_CAP)
        if process.alarmed and key not in alarmed:
            alarmed.add(key)
            audit = process.snapshot(tenant_label(answer.tenant))
            logger.warning(
                "%s of tenant %s is served as verified from now on: the audit of its answers found the contract broken "
                "(evidence %.3g in %d answers, mean loss %.4f)",
                audit.contract,
                audit.tenant,
                audit.evidence,
                audit.num_answers,
                audit.mean_loss,
            )

    def _drop(self, why: str) -> None:
        """Give up on the answer that is judged."""
        self._waiting.popleft()
        self._row = None
        self.num_dropped += 1
        if not self._failed:  # once
            logger.warning("an answer of mode fast could not be judged: %s", why)
        self._failed = True


def is_judged(request: Request, share: float) -> bool:
    """Whether the answer to a request is one of those that are judged, as far as the request decides it."""
    params = request.params
    plain = params.is_greedy and not request.adjusts_logits and request.mask is None
    if not request.policy.skips_layers or not plain:
        return False
    digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def _loss(output_ids: Sequence[int], choices: Sequence[int]) -> float:
    """The share of the tokens that full depth would have chosen otherwise."""
    return sum([ours != theirs for ours, theirs in zip(output_ids, choices, strict=True)]) / len(choices)


def _request_of(answer: _Answer) -> Request:
    """Asks full depth for its choice in the place of each token of an answer."""
    ids: Sequence[int] = (*answer.prompt_ids, *answer.output_ids[:-1])
    params = SamplingParams(max_tokens=1, mode="full", prompt_logprobs=1)
    return Request("judge", tuple(ids), params, seed=0, scores_from=len(answer.prompt_ids))

"""Compare full depth with every contract that the artefact supports: the same prompts, on one engine, interleaved.

A contract is a mode with its budget or threshold. Interleaving spreads the noise of the machine over all contracts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tide_core.engine.engine import Completion, Engine
from tide_core.errors import ConfigError, EngineError, RequestError
from tide_core.evaluation.full_depth import FullDepth, FullDepthScores
from tide_core.evaluation.results import ContractResult
from tide_core.exits.policy import CheckpointPolicy, FastPolicy, resolve_policy
from tide_core.request import DEFAULT_EPSILON, DEFAULT_MARGIN, SamplingParams

FULL = "full"
BUDGETS = (0.02, DEFAULT_EPSILON, 0.1)
"""Shares of tokens that may differ."""


@dataclass(frozen=True, slots=True)
class Contract:
    """A mode with its budget or threshold; the name is for tables."""

    name: str
    mode: str
    epsilon: float | None = None
    threshold: float | None = None
    margin: float | None = None

    def params(self, *, max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
        """Greedy, so that tokens can be compared."""
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            mode=self.mode,
            epsilon=self.epsilon,
            margin=self.margin,
            threshold=self.threshold,
        )


def contracts_of(
    checkpoints: Sequence[CheckpointPolicy],
    num_layers: int,
    thresholds: Sequence[float] = (),
    fast: FastPolicy | None = None,
) -> list[Contract]:
    """Full depth first, then verified, bounded with some budgets, fast as calibrated and at each threshold."""
    if not checkpoints:
        raise ConfigError("artefact", "none", "an artefact with exits: without one there is nothing to compare")
    wanted = [
        Contract(FULL, FULL),
        Contract("verified", "verified"),
        *(Contract(f"bounded {epsilon:g}", "bounded", epsilon=epsilon, margin=DEFAULT_MARGIN) for epsilon in BUDGETS),
        *(Contract(f"fast {epsilon:g}", "fast", epsilon=epsilon) for epsilon in sorted(fast.contracts if fast else ())),
        *([] if fast else [Contract("fast", "fast")]),
        *(Contract(f"fast at {threshold:g}", "fast", threshold=threshold) for threshold in thresholds),
    ]
    return [contract for contract in wanted if _is_supported(contract, checkpoints, num_layers, fast)]


def _is_supported(
    contract: Contract, checkpoints: Sequence[CheckpointPolicy], num_layers: int, fast: FastPolicy | None
) -> bool:
    """Whether all checkpoints are calibrated for the contract."""
    params = contract.params(max_tokens=1)
    try:
        resolve_policy(params, checkpoints, num_layers, fast=fast)
    except RequestError:
        return False
    return True


WARM_UP_TOKENS = 8


@dataclass(slots=True)
class ContractTotals:
    """Sums over the prompts of one contract."""

    contract: Contract
    num_prompts: int = 0
    num_tokens: int = 0
    num_disagreements: int = 0
    num_exact: int = 0
    num_exits: int = 0
    logprob: float = 0.0
    seconds: float = 0.0
    layers_run: int = 0
    deep_passes: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    answers: list[Completion] = field(default_factory=list)
    """Of the current batch."""

    def add(self, answer: Completion, full: Completion, scores: FullDepthScores, num_layers: int) -> None:
        """Add one answer, compared with that of full depth."""
        usage, output_ids = answer.usage, token_ids(answer)
        assert usage is not None
        self.num_prompts += 1
        self.num_tokens += len(output_ids)
        self.num_disagreements += scores.agreed(output_ids).count(False)
        self.num_exact += output_ids == token_ids(full)
        self.num_exits += sum(token.exit_layer < num_layers for token in answer.tokens)
        self.logprob += math.fsum(scores.logprobs)
        self.layers_run += usage.layers_run
        self.deep_passes += usage.deep_passes
        self.num_drafts += usage.num_drafts
        self.num_accepted += usage.num_accepted

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / self.num_tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def result(self, full: ContractTotals, num_layers: int) -> ContractResult:
        tokens = self.num_tokens
        return ContractResult(
            name=self.contract.name,
            mode=self.contract.mode,
            epsilon=self.contract.epsilon,
            threshold=self.contract.threshold,
            num_prompts=self.num_prompts,
            num_tokens=tokens,
            disagreement=self.num_disagreements / tokens,
            exact_match=self.num_exact / self.num_prompts,
            perplexity=self.perplexity,
            perplexity_difference=self.perplexity - full.perplexity,
            layers_per_token=self.layers_run / tokens,
            layers_share=self.layers_run / tokens / num_layers,
            tokens_per_deep_pass=tokens / self.deep_passes,
            acceptance=self.num_accepted / self.num_drafts if self.num_drafts else None,
            exit_rate=self.num_exits / tokens,
            seconds=self.seconds,
            tokens_per_s=self.tokens_per_s,
            speedup=self.tokens_per_s / full.tokens_per_s,
            margin=self.contract.margin,
        )


def evaluate(
    engine: Engine,
    full_depth: FullDepth,
    prompts: Sequence[Sequence[int]],
    contracts: Sequence[Contract],
    *,
    num_layers: int,
    max_tokens: int,
    ignore_eos: bool = False,
    batch_size: int = 1,
    on_done: Callable[[], object] = lambda: None,
) -> list[ContractResult]:
    """All contracts over all prompts, `batch_size` of them at once; the first contract is full depth.

    `on_done` is called after each batch of each contract. Turn prefix caching off, or later contracts reuse the
    prompts of earlier ones."""
    assert contracts[0].name == FULL
    totals = [ContractTotals(contract) for contract in contracts]
    for total in totals:
        _run(engine, total, prompts[:batch_size], max_tokens=min(WARM_UP_TOKENS, max_tokens), ignore_eos=ignore_eos)
        total.seconds = 0.0
    for turn, start in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        for index in range(len(totals)):
            total = totals[(turn + index) % len(totals)]
            _run(engine, total, batch, max_tokens=max_tokens, ignore_eos=ignore_eos)
            on_done()
        for total in totals:
            for prompt_ids, answer, full in zip(batch, total.answers, totals[0].answers, strict=True):
                total.add(answer, full, full_depth.score(prompt_ids, token_ids(answer)), num_layers)
    return [total.result(totals[0], num_layers) for total in totals]


def token_ids(answer: Completion) -> tuple[int, ...]:
    return tuple(token.token_id for token in answer.tokens)


def _run(
    engine: Engine, total: ContractTotals, batch: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool
) -> None:
    params = total.contract.params(max_tokens=max_tokens, ignore_eos=ignore_eos)
    before = time.perf_counter()
    total.answers = engine.generate(list(batch), params)
    total.seconds += time.perf_counter() - before
    for answer in total.answers:
        if answer.error is not None:
            raise EngineError(f"contract {total.contract.name}: {answer.error}")

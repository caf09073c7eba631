"""Every contract over the same prompts on one engine, taking turns, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tide_core.engine.engine import Completion, Engine
from tide_core.errors import EngineError
from tide_core.evaluation.contracts import FULL, Contract
from tide_core.evaluation.full_depth import FullDepth, Judgement
from tide_core.evaluation.results import ContractResult

WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Tally:
    """Sums over the prompts of one contract."""

    contract: Contract
    num_prompts: int = 0
    num_tokens: int = 0
    num_disagreements: int = 0
    num_exact: int = 0
    num_exits: int = 0
    num_fallback_tokens: int = 0
    logprob: float = 0.0
    seconds: float = 0.0
    layers_run: int = 0
    deep_passes: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    answers: list[Completion] = field(default_factory=list)
    """Of the batch that is being measured."""

    def add(self, answer: Completion, full: Completion, judgement: Judgement, num_layers: int) -> None:
        """Count one answer beside that of full depth."""
        usage, output_ids = answer.usage, token_ids(answer)
        assert usage is not None
        self.num_prompts += 1
        self.num_tokens += len(output_ids)
        self.num_disagreements += judgement.agreed(output_ids).count(False)
        self.num_exact += output_ids == token_ids(full)
        self.num_exits += sum(token.exit_layer < num_layers for token in answer.tokens)
        self.num_fallback_tokens += sum(token.mode != self.contract.mode for token in answer.tokens)
        self.logprob += math.fsum(judgement.logprobs)
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

    def result(self, full: Tally, num_layers: int) -> ContractResult:
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
            num_fallback_tokens=self.num_fallback_tokens,
        )


def evaluate(
    engine: Engine,
    judge: FullDepth,
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

    `on_done` is called after each batch of each contract. Prefix caching should be off, or the later of two contracts
    finds the prompt of the earlier one."""
    assert contracts[0].name == FULL
    tallies = [Tally(contract) for contract in contracts]
    for tally in tallies:
        _run(engine, tally, prompts[:batch_size], max_tokens=min(WARM_UP_TOKENS, max_tokens), ignore_eos=ignore_eos)
        tally.seconds = 0.0
    for turn, start in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        for index in range(len(tallies)):
            tally = tallies[(turn + index) % len(tallies)]
            _run(engine, tally, batch, max_tokens=max_tokens, ignore_eos=ignore_eos)
            on_done()
        for tally in tallies:
            for prompt_ids, answer, full in zip(batch, tally.answers, tallies[0].answers, strict=True):
                tally.add(answer, full, judge.judge(prompt_ids, token_ids(answer)), num_layers)
    return [tally.result(tallies[0], num_layers) for tally in tallies]


def token_ids(answer: Completion) -> tuple[int, ...]:
    return tuple(token.token_id for token in answer.tokens)


def _run(engine: Engine, tally: Tally, batch: Sequence[Sequence[int]], *, max_tokens: int, ignore_eos: bool) -> None:
    params = tally.contract.params(max_tokens=max_tokens, ignore_eos=ignore_eos)
    before = time.perf_counter()
    tally.answers = engine.generate(list(batch), params)
    tally.seconds += time.perf_counter() - before
    for answer in tally.answers:
        if answer.error is not None:
            raise EngineError(f"contract {tally.contract.name}: {answer.error}")

"""One engine that runs prompts under several contracts in turns, and the same model run by the library.

A contract is the sampling parameters of a run: its mode, length and settings. Every ratio is taken within one repeat,
so that whatever disturbs the machine disturbs both sides.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.prompts import Prompt, read_texts, spread
from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import RequestError
from tide_core.evaluation.full_depth import FullDepthScores, read_logits
from tide_core.models.loader import load_model
from tide_core.models.resolver import resolve
from tide_core.request import SamplingParams

LOGIT_ROWS = 128
AMPLE_TOKENS = 16384
NO_EXITS_THRESHOLD = 1.5
"""A threshold that no router score reaches."""

Contract = SamplingParams | Sequence[SamplingParams]
"""Of all prompts of a group, or one for each."""


def greedy(mode: str, tokens: int, **more: Any) -> SamplingParams:
    """A contract whose answers all have `tokens` tokens."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, mode=mode, **more)


class TimedBatch(NamedTuple):
    """One batch: the tokens that count, their time, and the answers."""

    num_tokens: int
    seconds: float
    answers: list[Completion]


Work = Callable[[], TimedBatch]


@dataclass
class Runs:
    """One contract over all repeats."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Of each repeat."""
    answers: list[Completion] = field(default_factory=list)
    """Of the last repeat."""

    @property
    def rate(self) -> float:
        return statistics.median(self.tokens_per_s)

    def over(self, other: Runs) -> float:
        """Median over the repeats of the ratio within each."""
        return statistics.median(a / b for a, b in zip(self.tokens_per_s, other.tokens_per_s, strict=True))

    def figures(self) -> dict[str, Any]:
        usage = usage_of(self.answers) if self.answers else {}  # another program keeps its answers
        return {"tokens_per_s": self.rate, "of_each_repeat": self.tokens_per_s, **usage}


STRIDE = 37
"""A prime, so that the answers of a batch go through all lengths."""


def varied(tokens: int, count: int) -> list[int]:
    """Lengths from half of `tokens` to one and a half times `tokens`, shuffled; their mean is `tokens`."""
    return [tokens // 2 + tokens * (index * STRIDE % count) // max(1, count - 1) for index in range(count)]


def take_turns(works: Mapping[str, Sequence[Work]], repeats: int) -> dict[str, Runs]:
    """Run the batches of all names in turns; the name that begins changes with every batch. Every name has as many
    batches. The first batch of each name runs once before, to warm up."""
    names = list(works)
    runs = {name: Runs() for name in names}
    for name in names:
        works[name][0]()
    for repeat in range(repeats):
        batches: dict[str, list[TimedBatch]] = {name: [] for name in names}
        for index in range(len(works[names[0]])):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                batches[name].append(works[name][index]())
        for name, mine in runs.items():
            seconds = sum(batch.seconds for batch in batches[name])
            mine.tokens_per_s.append(sum(batch.num_tokens for batch in batches[name]) / seconds)
            mine.answers = [answer for batch in batches[name] for answer in batch.answers]
    return runs


class Bench:
    """One engine with exits, its prompts, and the library's model."""

    def __init__(self, config: EngineConfig, prompt_file: Path, parts: Parts | None = None) -> None:
        """`parts` are those of a model that was made, not loaded; such a bench has no `library`."""
        self.parts = assemble(config) if parts is None else parts
        self.config = self.parts.config
        if self.parts.planner is None:
            raise SystemExit("benchmark: the engine has no artefact with exits; name one with --artefact")
        self.planner = self.parts.planner
        self.engine = Engine.from_parts(self.parts)
        encode = self.engine.tokenizer.encode_chat
        self.prompts = [
            Prompt(kind, tuple(encode([{"role": "user", "content": text}]))) for kind, text in read_texts(prompt_file)
        ]

    @functools.cached_property
    def library(self) -> Library:
        """Loaded on first use."""
        return Library(self.config)

    @property
    def num_layers(self) -> int:
        return self.parts.runner.adapter.num_layers

    def spread(self, count: int) -> list[Prompt]:
        return spread(self.prompts, count)

    def turns(
        self, groups: Sequence[Sequence[Prompt]], contracts: Mapping[str, Contract], repeats: int
    ) -> dict[str, Runs]:
        """Run each group of prompts as one batch under every contract, in turns."""
        works = {
            name: [functools.partial(self.timed, group, contract) for group in groups]
            for name, contract in contracts.items()
        }
        return take_turns(works, repeats)

    def timed(self, prompts: Sequence[Prompt], params: Contract) -> TimedBatch:
        began = time.perf_counter()
        answers = self.run(prompts, params)
        seconds = time.perf_counter() - began
        return TimedBatch(sum(len(answer.tokens) for answer in answers), seconds, answers)

    def timed_around(
        self, prompt: Prompt, params: SamplingParams, others: Sequence[Prompt], contract: Sequence[SamplingParams]
    ) -> TimedBatch:
        """The `others` while one more row, admitted before them, runs all the time: its tokens do not count, and it is
        aborted after the last of the others."""
        answers: dict[int, Completion] = {}
        began = time.perf_counter()
        ended: Any = self.engine.generate_as_completed(
            [prompt.ids, *(other.ids for other in others)], [params, *contract]
        )
        try:
            for index, answer in ended:
                _check(answer)
                if index == 0:
                    raise RuntimeError(f"the row of {params.max_tokens} tokens ended before the others")
                answers[index] = answer
                if len(answers) == len(others):
                    break
            seconds = time.perf_counter() - began
        finally:
            ended.close()
            self._wait_until_idle()
        in_order = [answers[index] for index in sorted(answers)]
        return TimedBatch(sum(len(answer.tokens) for answer in in_order), seconds, in_order)

    def _wait_until_idle(self) -> None:
        """An abort takes effect after the current step."""
        while (stats := self.engine.stats()).num_running or stats.num_waiting:
            time.sleep(0.001)

    def run(self, prompts: Sequence[Prompt], params: Contract) -> list[Completion]:
        answers = self.engine.generate([prompt.ids for prompt in prompts], params)
        for answer in answers:
            _check(answer)
        return answers

    def run_batched(self, prompts: Sequence[Prompt], params: SamplingParams, batch: int) -> list[Completion]:
        batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        return [answer for group in batches for answer in self.run(group, params)]

    @contextlib.contextmanager
    def fixed_drafts(self, drafts: int | None = None) -> Iterator[int]:
        """The engine drafts a fixed number: `drafts`, or by default as many as the artefact is calibrated for."""
        planner = self.planner
        before = planner.table, planner.max_drafts
        planner.table, planner.max_drafts = None, planner.max_drafts if drafts is None else drafts
        try:
            yield planner.max_drafts
        finally:
            planner.table, planner.max_drafts = before

    @contextlib.contextmanager
    def at_most(self, rows: int) -> Iterator[None]:
        """At most `rows` rows in a step."""
        scheduler = self.parts.core.scheduler
        before, scheduler.max_rows = scheduler.max_rows, rows
        try:
            yield
        finally:
            scheduler.max_rows = before

    @contextlib.contextmanager
    def untied_rows(self) -> Iterator[None]:
        """Rows are independent: no token budget runs out, which would leave fewer drafts next to prompts."""
        scheduler = self.parts.core.scheduler
        before, scheduler.max_batch_tokens = scheduler.max_batch_tokens, AMPLE_TOKENS
        try:
            yield
        finally:
            scheduler.max_batch_tokens = before

    def check(self, params: SamplingParams) -> None:
        """Refuse, before anything is measured, a contract that the artefact cannot serve."""
        try:
            self.engine.make_request(self.prompts[0].ids, params)
        except RequestError as error:
            raise SystemExit(f"benchmark: {error}") from error


class Library:
    """The model as `transformers` runs it: loaded again, without any code of the engine in its forward."""

    def __init__(self, config: EngineConfig) -> None:
        self._model: Any = load_model(
            resolve(config.model), dtype=config.dtype, device=config.device, quantization=config.quantization
        )

    @torch.inference_mode()
    def score(self, prompt: Prompt, output_ids: Sequence[int]) -> FullDepthScores:
        """Score every token of an answer by full depth, given the tokens that were emitted before it."""
        choices: list[int] = []
        logprobs: list[float] = []
        targets = torch.tensor(output_ids, device=self._model.device)
        for start, logits in self._logits([*prompt.ids, *output_ids][:-1], len(output_ids)):
            more = read_logits(logits, targets[start : start + len(logits)])
            choices += more[0]
            logprobs += more[1]
        return FullDepthScores(tuple(choices), tuple(logprobs))

    @torch.inference_mode()
    def gap(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        """Largest logit of all tokens minus the smallest logit of `tokens`."""
        [(_, logits)] = self._logits(context, 1)
        return float(logits[0].max() - logits[0, list(tokens)].min())

    def _logits(self, tokens: Sequence[int], last: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of the `last` positions in chunks: (index of the first, [n, V])."""
        ids = torch.tensor([tokens], device=self._model.device)
        # With `logits_to_keep` the library computes the logits of these positions only.
        logits = self._model(ids, use_cache=False, logits_to_keep=last).logits[0]
        for start in range(0, last, LOGIT_ROWS):
            yield start, logits[start : start + LOGIT_ROWS].float()


def _check(answer: Completion) -> None:
    if answer.error is not None:
        raise SystemExit(f"benchmark: a request failed: {answer.error}")


def output_ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def usage_of(answers: Sequence[Completion]) -> dict[str, Any]:
    """Counts over all answers."""
    usages = [answer.usage for answer in answers if answer.usage is not None]
    tokens = sum(usage.output_tokens for usage in usages)
    drafts = sum(usage.num_drafts for usage in usages)
    passes = sum(usage.deep_passes for usage in usages)
    return {
        "num_tokens": tokens,
        "layers_per_token": sum(usage.layers_run for usage in usages) / tokens,
        "tokens_per_deep_pass": tokens / passes,
        "drafts_per_deep_pass": drafts / passes,
        "acceptance": sum(usage.num_accepted for usage in usages) / drafts if drafts else None,
    }

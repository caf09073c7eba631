"""What the parts of `modes.py` stand on: one engine, prompts, turns, fixed plans, and the library's own forward."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import Bar
from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import RequestError
from tide_core.evaluation.full_depth import FullDepthScores, read_logits
from tide_core.exits.audit import AuditBook
from tide_core.models.loader import load_model
from tide_core.models.resolver import resolve
from tide_core.request import SamplingParams

PROMPT_FILE = Path(__file__).with_name("prompts.jsonl")
LOGIT_ROWS = 128
NEVER_BREAKS = 1e-300
AMPLE_TOKENS = 16384


Contract = SamplingParams | Sequence[SamplingParams]
"""Of all prompts of a group, or of each."""


@dataclass(frozen=True)
class Prompt:
    kind: str
    ids: tuple[int, ...]


@dataclass
class Part:
    """What one part found: figures to keep, lines to read, bars to reach."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)


@dataclass
class Runs:
    """What one contract did in all repeats."""

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
        return {"tokens_per_s": self.rate, "of_each_repeat": self.tokens_per_s, **usage_of(self.answers)}


class Bench:
    """One engine for all parts, its prompts, and the library's model beside it."""

    def __init__(self, config: EngineConfig, prompt_file: Path) -> None:
        self.config = config
        self.parts: Parts = assemble(config)
        if self.parts.planner is None:
            raise SystemExit("benchmark: the engine has no artefact with exits; name one with --artefact")
        self.planner = self.parts.planner
        self.engine = Engine.from_parts(config, self.parts)
        self.prompts = self._read(prompt_file)
        self._library: Library | None = None

    @property
    def library(self) -> Library:
        """Loaded when it is first asked for."""
        if self._library is None:
            self._library = Library(self.config)
        return self._library

    @property
    def num_layers(self) -> int:
        return self.parts.runner.adapter.num_layers

    def spread(self, count: int) -> list[Prompt]:
        """So many prompts, evenly from all of the file; all of them if there are fewer."""
        count = min(count, len(self.prompts))
        return [self.prompts[index * len(self.prompts) // count] for index in range(count)]

    def turns(
        self, groups: Sequence[Sequence[Prompt]], contracts: Mapping[str, Contract], repeats: int
    ) -> dict[str, Runs]:
        """Each group of prompts runs as one batch, in each contract after the other; who begins changes every time."""
        names = list(contracts)
        runs = {name: Runs() for name in names}
        for name in names:  # warm up
            self.run(groups[0], contracts[name])
        for repeat in range(repeats):
            seconds, answers = dict.fromkeys(names, 0.0), {name: list[Completion]() for name in names}
            for index, group in enumerate(groups):
                first = (repeat + index) % len(names)
                for name in names[first:] + names[:first]:
                    before = time.perf_counter()
                    answers[name] += self.run(group, contracts[name])
                    seconds[name] += time.perf_counter() - before
            for name, mine in runs.items():
                mine.tokens_per_s.append(sum(len(answer.tokens) for answer in answers[name]) / seconds[name])
                mine.answers = answers[name]
        return runs

    def run(self, prompts: Sequence[Prompt], params: Contract) -> list[Completion]:
        answers = self.engine.generate([prompt.ids for prompt in prompts], params)
        for answer in answers:
            if answer.error is not None:
                raise SystemExit(f"benchmark: a request failed: {answer.error}")
        return answers

    def run_batched(self, prompts: Sequence[Prompt], params: SamplingParams, batch: int) -> list[Completion]:
        batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        return [answer for one in batches for answer in self.run(one, params)]

    @contextlib.contextmanager
    def fixed_drafts(self, drafts: int | None = None) -> Iterator[int]:
        """As an engine with the setting `drafts`; by default as many as the artefact is calibrated for."""
        planner = self.planner
        before = planner.table, planner.max_drafts
        planner.table, planner.max_drafts = None, planner.max_drafts if drafts is None else drafts
        try:
            yield planner.max_drafts
        finally:
            planner.table, planner.max_drafts = before

    @contextlib.contextmanager
    def at_most(self, rows: int) -> Iterator[None]:
        """No more rows in a step than these."""
        scheduler = self.parts.core.scheduler
        before, scheduler.max_rows = scheduler.max_rows, rows
        try:
            yield
        finally:
            scheduler.max_rows = before

    @contextlib.contextmanager
    def untied_rows(self) -> Iterator[None]:
        """Without the two things by which rows are meant to touch each other: a broken bound makes all of its mode fall
        back, and a step whose token budget is used up by prompts leaves fewer drafts."""
        core = self.parts.core
        before = core.audits, core.scheduler.max_batch_tokens
        core.audits, core.scheduler.max_batch_tokens = AuditBook(delta=NEVER_BREAKS), AMPLE_TOKENS
        try:
            yield
        finally:
            core.audits, core.scheduler.max_batch_tokens = before

    def check(self, params: SamplingParams) -> None:
        """Refuse what the artefact cannot serve before anything is measured."""
        try:
            self.engine.make_request(self.prompts[0].ids, params)
        except RequestError as error:
            raise SystemExit(f"benchmark: {error}") from error

    def _read(self, path: Path) -> list[Prompt]:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        encode = self.engine.tokenizer.encode_chat
        return [
            Prompt(line.get("kind", ""), tuple(encode([{"role": "user", "content": line["prompt"]}]))) for line in lines
        ]


class Library:
    """The model as transformers runs it: loaded again, none of the engine's code in its forward."""

    def __init__(self, config: EngineConfig) -> None:
        self._model: Any = load_model(resolve(config.model), dtype=config.dtype, device=config.device)

    @torch.inference_mode()
    def judge(self, prompt: Prompt, output_ids: Sequence[int]) -> FullDepthScores:
        """What full depth says at each token of an answer, given all before it as it was emitted."""
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
        """By how much the worst of these tokens falls short of the best of all, in logits."""
        [(_, logits)] = self._logits(context, 1)
        return float(logits[0].max() - logits[0, list(tokens)].min())

    @torch.inference_mode()
    def margin(self, context: Sequence[int]) -> float:
        """By how much the best token beats the second, in logits."""
        [(_, logits)] = self._logits(context, 1)
        first, second = logits[0].topk(2).values.tolist()
        return float(first - second)

    def _logits(self, tokens: Sequence[int], last: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Of the last so many positions, some rows at a time: (first of them, [n, V])."""
        ids = torch.tensor([tokens], device=self._model.device)
        # Asked for the last positions alone, the library's forward keeps only their logits.
        logits = self._model(ids, use_cache=False, logits_to_keep=last).logits[0]
        for start in range(0, last, LOGIT_ROWS):
            yield start, logits[start : start + LOGIT_ROWS].float()


def output_ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def usage_of(answers: Sequence[Completion]) -> dict[str, Any]:
    """Counts over all answers."""
    usages = [answer.usage for answer in answers if answer.usage is not None]
    tokens = sum(usage.output_tokens for usage in usages)
    drafts = sum(usage.num_drafts for usage in usages)
    return {
        "num_tokens": tokens,
        "layers_per_token": sum(usage.layers_run for usage in usages) / tokens,
        "tokens_per_deep_pass": tokens / sum(usage.deep_passes for usage in usages),
        "acceptance": sum(usage.num_accepted for usage in usages) / drafts if drafts else None,
    }

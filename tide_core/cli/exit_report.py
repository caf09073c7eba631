"""Report on a run with exits: where tokens left, what ran for them, and how long full depth takes for the same prompts.

A speed-up is always the ratio of two measured rates: the run that the user saw, and one at full depth of the same
prompts on the same engine right after it. Before both, each kind of run generates a few tokens, so that neither pays
for the first touches of memory.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tide_core.cli.output import ExitPaint, tokens_per_s
from tide_core.cli.runs import Put
from tide_core.errors import EngineError
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine, Prompt


class RunStats:
    """Statistics over all answers of a command. Counts every output and passes it on to `put`; the time runs from
    construction to the last output."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._started_at = self._last_at = time.monotonic()
        self._first_token_at: float | None = None
        self._num_answers = 0
        self._failures: list[tuple[int, Exception]] = []
        self.token_ids: defaultdict[int, list[int]] = defaultdict(list)
        """By request."""
        self.exits: Counter[tuple[int, Audit]] = Counter()
        """Tokens by exit layer and audit result."""
        self.usages: list[Usage] = []

    def put(self, request: int, output: RequestOutput) -> None:
        self._last_at = time.monotonic()
        if output.tokens and self._first_token_at is None:
            self._first_token_at = self._last_at
        self.token_ids[request] += [token.token_id for token in output.tokens]
        self.exits.update((token.exit_layer, token.audit) for token in output.tokens)
        if output.finished:
            self._num_answers += 1
        if output.usage is not None:
            self.usages.append(output.usage)
        if output.error is not None:
            self._failures.append((request, output.error))
        self._put(request, output)

    @property
    def num_tokens(self) -> int:
        return self.exits.total()

    @property
    def rate(self) -> float:
        """Tokens per second from the first submission to the last token."""
        return tokens_per_s(self.num_tokens, self._last_at - self._started_at)

    def summary(self) -> str:
        first = "no token" if self._first_token_at is None else f"{self._first_token_at - self._started_at:.2f} s"
        answers = f"{self._num_answers} answers, " if self._num_answers != 1 else ""
        return f"{answers}{self.num_tokens} tokens, {self.rate:.1f} tok/s, first token {first}"

    def raise_failures(self) -> None:
        """Raise the first failed answer as the error of the command."""
        if self._failures:
            request, error = self._failures[0]
            more = f" ({len(self._failures)} of {self._num_answers} answers failed)" if self._num_answers > 1 else ""
            raise EngineError(f"answer {request + 1}: {error}{more}")


WARM_UP_TOKENS = 4

Run = Callable[[SamplingParams, Put], None]
"""Answer all prompts of the command."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with the same prompts at full depth."""

    mode: str
    rate: float
    full_rate: float
    num_answers: int
    num_equal: int | None
    """Answers with the same tokens; None if tokens were sampled, since two runs draw differently."""

    @property
    def speedup(self) -> float | None:
        return self.rate / self.full_rate if self.rate and self.full_rate else None

    def __str__(self) -> str:
        rates = f"{self.mode} {self.rate:.1f} tok/s, full depth {self.full_rate:.1f} tok/s"
        return rates + ("" if self.speedup is None else f": {self.speedup:.2f}x") + f", {self._output()}"

    def _output(self) -> str:
        if self.num_equal is None:
            return "sampled, so outputs are not compared"
        if self.num_equal == self.num_answers:
            return "output identical"
        return (
            "output differs" if self.num_answers == 1 else f"{self.num_equal} of {self.num_answers} outputs identical"
        )

    def fields(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "tokens_per_s": round(self.rate, 3),
            "full_tokens_per_s": round(self.full_rate, 3),
            "speedup": None if self.speedup is None else round(self.speedup, 4),
            "identical": None if self.num_equal is None else self.num_equal == self.num_answers,
        }


def at_full_depth(params: SamplingParams) -> SamplingParams:
    return replace(params, mode="full", epsilon=None, margin=None, threshold=None, min_layers=0)


def warm_up(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Generate a few tokens with exits and a few without.

    The prompt is reversed: it has the same length and leaves nothing in the prefix cache for the real one. Exits run in
    mode verified, so that this text is never judged."""
    ids = engine.make_request(prompt, params).prompt_ids[::-1]
    full = replace(at_full_depth(params), max_tokens=min(params.max_tokens, WARM_UP_TOKENS), min_tokens=0)
    for short in (replace(full, mode="verified"), full):
        for _ in engine.stream_blocking(ids, short):
            pass


def compare(run: Run, params: SamplingParams, mode: str, seen: RunStats) -> Comparison:
    """Run the same prompts at full depth and compare with the run that was `seen`."""
    full = RunStats(_discard)
    run(at_full_depth(params), full.put)
    full.raise_failures()
    equal = sum(seen.token_ids[request] == ids for request, ids in full.token_ids.items())
    return Comparison(mode, seen.rate, full.rate, len(full.token_ids), equal if params.is_greedy else None)


def stats_of(run_stats: RunStats, num_layers: int) -> ExitStats:
    stats = ExitStats(num_layers)
    stats.record(
        run_stats.exits.elements(),
        layers_run=sum(usage.layers_run for usage in run_stats.usages),
        deep_passes=sum(usage.deep_passes for usage in run_stats.usages),
        drafts=sum(usage.num_drafts for usage in run_stats.usages),
        accepted=sum(usage.num_accepted for usage in run_stats.usages),
    )
    return stats


def lines(stats: ExitStats, paint: ExitPaint) -> Iterator[str]:
    """The exit histogram, which is also the legend of the colours, then cost and audits."""
    if not stats.total_tokens:
        return
    shown = [(layer, f"layer {layer}") for layer in stats.exits_per_layer]
    shown.append((stats.num_layers, f"all {stats.num_layers} layers"))
    shares = ((layer, name, stats.tokens_per_layer[layer]) for layer, name in shown)
    yield "exits: " + ", ".join(
        f"{paint.label(layer, name)}: {count} ({count / stats.total_tokens:.1%})" for layer, name, count in shares
    )
    ran = f"{stats.tokens_per_deep_pass:.2f} tokens per deep pass, {stats.layers_per_token:.1f} layers run per token"
    if stats.acceptance is not None:
        ran += f", {stats.accepted} of {stats.drafts} drafts accepted ({stats.acceptance:.1%})"
    yield ran
    yield "audits: " + ", ".join(f"{audit.value} {stats.audits[audit]}" for audit in Audit if stats.audits[audit])


def print_report(*texts: str) -> None:
    """Print to standard error, terminal or not: the user asked for it."""
    if sys.stderr is not None:
        print("".join(f"tide: {text}\n" for text in texts), end="", file=sys.stderr, flush=True)


def _discard(request: int, output: RequestOutput) -> None:
    pass

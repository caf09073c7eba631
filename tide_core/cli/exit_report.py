"""What exits did to a run: where tokens left, what ran for them, and how long full depth takes for the same prompts.

A speed-up is only ever the ratio of two measured rates: the run the user saw, and one at full depth of the same prompts
on the same engine right behind it. Before both, each kind of run is made for a few tokens, so that neither pays for
first touches of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tide_core.cli.paint import ExitPaint
from tide_core.cli.runs import Put
from tide_core.cli.tally import Tally
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine, Prompt

WARM_UP_TOKENS = 4

Run = Callable[[SamplingParams, Put], None]
"""Answer all prompts of the command."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the same prompts at full depth."""

    mode: str
    rate: float
    full_rate: float
    num_answers: int
    num_equal: int | None
    """Answers of the same tokens; None where tokens were drawn, which two runs do differently."""

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
    return replace(params, mode="full", epsilon=None, threshold=None, min_layers=0)


def warm_up(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """A few tokens with exits and a few without.

    The prompt is taken backwards: as long, but nothing of it is in the prefix cache when the real one comes. Exits are
    verified, whatever was asked for, so that this text does not count in the audits of the mode."""
    ids = engine.make_request(prompt, params).prompt_ids[::-1]
    full = replace(at_full_depth(params), max_tokens=min(params.max_tokens, WARM_UP_TOKENS), min_tokens=0)
    for short in (replace(full, mode="verified"), full):
        for _ in engine.stream_blocking(ids, short):
            pass


def compare(run: Run, params: SamplingParams, mode: str, seen: Tally) -> Comparison:
    """Time full depth against the run that was `seen`."""
    full = Tally(_nowhere)
    run(at_full_depth(params), full.put)
    full.raise_failures()
    equal = sum(seen.token_ids[request] == ids for request, ids in full.token_ids.items())
    return Comparison(mode, seen.rate, full.rate, len(full.token_ids), equal if params.is_greedy else None)


def stats_of(tally: Tally, num_layers: int) -> ExitStats:
    stats = ExitStats(num_layers)
    stats.record(
        tally.exits.elements(),
        layers_run=sum(usage.layers_run for usage in tally.usages),
        deep_passes=sum(usage.deep_passes for usage in tally.usages),
        drafts=sum(usage.num_drafts for usage in tally.usages),
        accepted=sum(usage.num_accepted for usage in tally.usages),
    )
    return stats


def lines(stats: ExitStats, paint: ExitPaint) -> Iterator[str]:
    """The exit histogram, which is the legend of the colours too, and what stands behind it."""
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


def tell(*texts: str) -> None:
    """To standard error, terminal or not: it was asked for."""
    if sys.stderr is not None:
        print("".join(f"tide: {text}\n" for text in texts), end="", file=sys.stderr, flush=True)


def _nowhere(request: int, output: RequestOutput) -> None:
    pass

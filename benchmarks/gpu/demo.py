"""The demo model in batches: mode `verified` against `full`, and requests that are not plain greedy against plain ones.

In a batch every row that ends is followed by the next prompt, as under load, and answers have different lengths. With
equal lengths all rows at full depth would end in one step and their prompts would run in one pass, as on no server.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.common.prompts import Prompt, different_kinds
from benchmarks.common.report import Measures
from benchmarks.common.runs import NO_EXITS_THRESHOLD, Bench, Runs, greedy, output_ids, take_turns, varied
from benchmarks.gpu.parts import Session, Sizes
from tide_core.request import SamplingParams

KIND_BATCH = 8
"""Rows in the batches of `kinds` and `mixed`."""
KINDS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "temperature": {"temperature": 0.8, "top_p": 0.95, "seed": 0},
}
"""Requests that need more of the logits than the likeliest token."""


def demo(session: Session) -> Measures:
    found, bench, sizes = Measures(), session.bench, session.sizes
    for size in sizes.batches:
        _modes(found, bench, sizes, size)
    if KIND_BATCH in sizes.batches:
        with bench.at_most(KIND_BATCH):
            _kinds(found, bench, sizes)
            _mixed(found, bench, sizes)
    return found


def batches_of(bench: Bench, sizes: Sizes, rows: int) -> tuple[list[list[Prompt]], list[int]]:
    """Groups of prompts that run with `rows` rows at a time, and the lengths of the answers of a group."""
    if rows == 1:
        return [[prompt] for prompt in different_kinds(bench.prompts, sizes.prompts)], [sizes.tokens]
    group = bench.spread(rows * sizes.rounds)
    return [group], varied(sizes.tokens, len(group))


def _modes(found: Measures, bench: Bench, sizes: Sizes, size: int) -> None:
    """`demo_N`: tokens/s of `verified` over `full`."""
    modes: dict[str, dict[str, Any]] = {name: {"mode": name} for name in ("full", "verified")}
    modes["no exits"] = {"mode": "verified", "threshold": NO_EXITS_THRESHOLD}
    groups, lengths = batches_of(bench, sizes, size)
    contracts = {name: [greedy(tokens=length, **mode) for length in lengths] for name, mode in modes.items()}
    with bench.at_most(size):
        runs = bench.turns(groups, contracts, sizes.turns if size == 1 else sizes.batch_turns)
    full, verified = runs["full"], runs["verified"]
    num_different = _different(full, verified)
    found.figures[f"batch {size}"] = {
        **{name: {**mine.figures(), "over_full": mine.over(full)} for name, mine in runs.items()},
        "num_answers": len(full.answers),
        "num_different": num_different,
        "drafts": bench.planner.plan(size, size).drafts,
    }
    rates = f"{verified.rate:.0f} against {full.rate:.0f} tokens/s"
    found.add(f"demo_{size}", verified.over(full), f"{rates}, {num_different} of {len(full.answers)} answers differ")


def _kinds(found: Measures, bench: Bench, sizes: Sizes) -> None:
    """`demo_8_KIND`: tokens/s with all rows of a kind over tokens/s with all rows plain greedy, mode `verified`."""
    groups, lengths = batches_of(bench, sizes, KIND_BATCH)
    contracts = {name: _contract(lengths, more) for name, more in {"plain": {}, **KINDS}.items()}
    runs = bench.turns(groups, contracts, sizes.batch_turns)
    plain = runs["plain"]
    found.figures["kinds"] = {name: {**mine.figures(), "over_plain": mine.over(plain)} for name, mine in runs.items()}
    for kind in KINDS:
        mine = runs[kind]
        per_pass = [runs_of.figures()["tokens_per_deep_pass"] for runs_of in (mine, plain)]
        passes = mine.over(plain) * per_pass[1] / per_pass[0]
        rates = f"{mine.rate:.0f} against {plain.rate:.0f} tokens/s; {per_pass[0]:.2f} against {per_pass[1]:.2f} tokens"
        found.add(f"demo_{KIND_BATCH}_{kind}", mine.over(plain), f"{rates} per deep pass, {passes:.2f} of the passes/s")


def _mixed(found: Measures, bench: Bench, sizes: Sizes) -> None:
    """`demo_8_mixed`: tokens/s of seven plain rows while the eighth is of a kind, over the same while it is plain too;
    the worst kind. The eighth row runs all the time, and its own tokens do not count."""
    others = bench.spread((KIND_BATCH - 1) * sizes.rounds)
    lengths = varied(sizes.tokens, len(others))
    longest = 2 * (sizes.tokens + sum(lengths) // (KIND_BATCH - 1))
    works = {
        name: [
            functools.partial(
                bench.timed_around, bench.prompts[-1], greedy("verified", longest, **more), others, _contract(lengths)
            )
        ]
        for name, more in {"plain": {}, **KINDS}.items()
    }
    runs = take_turns(works, sizes.batch_turns)
    plain = runs["plain"]
    ratios = {kind: runs[kind].over(plain) for kind in KINDS}
    found.figures["mixed"] = {name: {**mine.figures(), "over_plain": mine.over(plain)} for name, mine in runs.items()}
    worst = min(ratios, key=lambda kind: ratios[kind])
    each = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items())
    shown = f"worst {worst}: {runs[worst].rate:.0f} against {plain.rate:.0f} tokens/s; {each}"
    found.add(f"demo_{KIND_BATCH}_mixed", ratios[worst], shown)


def _contract(lengths: Sequence[int], more: dict[str, Any] | None = None) -> list[SamplingParams]:
    return [greedy("verified", length, **(more or {})) for length in lengths]


def _different(first: Runs, second: Runs) -> int:
    return sum(output_ids(a) != output_ids(b) for a, b in zip(first.answers, second.answers, strict=True))

"""The parts of the benchmark of the modes, each with its bars."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.common.bars import Bar, Part
from benchmarks.common.prompts import Prompt, different_kinds
from benchmarks.common.runs import NO_EXITS_THRESHOLD, Bench, Runs, greedy, output_ids, usage_of
from tide_core.engine.engine import Completion
from tide_core.request import SamplingParams

SPEEDUP = {"cpu": 1.5, "cuda": 1.6}
NOISE = 0.97
"""At most 3 % slower."""
EPSILON, MARGIN = 0.05, 0.2
"""The budget of bounded."""
MOST_LAYERS = 0.7
TIE = 1e-4
"""Two tokens whose logits differ by less are a tie: either token is correct."""
EXITING = ("verified", "bounded", "fast")


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    tokens: int
    repeats: int
    speed_prompts: int
    identity_prompts: int
    identity_tokens: int
    quality_prompts: int
    batch: int
    batches: tuple[int, ...]
    needles: int
    mates: int
    needle_tokens: int


def contracts_for(parts: Sequence[str], tokens: int) -> dict[str, SamplingParams]:
    """The contracts that parts a, c and d time in one run."""
    contracts = {"full": greedy("full", tokens), "verified": greedy("verified", tokens)}
    if "c" in parts:
        contracts |= {
            "bounded": greedy("bounded", tokens, epsilon=EPSILON, margin=MARGIN),
            "fast": greedy("fast", tokens),
        }
    if "d" in parts:
        contracts["no exits"] = greedy("verified", tokens, threshold=NO_EXITS_THRESHOLD)
    return contracts


def speed(bench: Bench, parts: Sequence[str], sizes: Sizes) -> Part:
    """a, c and d: speed, one prompt at a time."""
    prompts = different_kinds(bench.prompts, sizes.speed_prompts)
    runs = bench.turns([[prompt] for prompt in prompts], contracts_for(parts, sizes.tokens), sizes.repeats)
    part = Part("a, c, d by the clock: batch 1")
    full, verified = runs["full"], runs["verified"]
    for name, mine in runs.items():
        part.data[name] = {**mine.figures(), "over_full": mine.over(full)}
        part.lines.append(_speed_line(name, mine, full))
    part.data["prompts"] = [prompt.kind for prompt in prompts]
    part.data["plan"] = _plan(bench, 1)
    part.lines.append(_plan_line(bench, 1))
    if "a" in parts:
        limit = SPEEDUP[bench.parts.runner.cache.device.type]
        part.bars.append(Bar("verified over full, batch 1", verified.over(full), limit))
        _add_differences(part, bench, prompts, full.answers, verified.answers, "verified equals full, batch 1")
    if "c" in parts:
        share = usage_of(runs["fast"].answers)["layers_per_token"] / bench.num_layers
        name = f"bounded({EPSILON:g}, {MARGIN:g}) over verified, batch 1"
        part.bars.append(Bar(name, runs["bounded"].over(verified), NOISE))
        part.bars.append(Bar("layers of fast over all layers", share, MOST_LAYERS, at_least=False))
    if "d" in parts:
        part.bars.append(Bar("no exits allowed over full, batch 1", runs["no exits"].over(full), NOISE))
    return part


def identity(bench: Bench, sizes: Sizes) -> Part:
    """b: many prompts in both modes, with a fixed number of drafts, so that the planner does not switch drafts off."""
    prompts = bench.spread(sizes.identity_prompts)
    part = Part(f"b: verified equals full, {len(prompts)} prompts")
    with bench.fixed_drafts() as drafts:
        contracts = [greedy(mode, sizes.identity_tokens) for mode in ("full", "verified")]
        full, verified = (bench.run_batched(prompts, params, sizes.batch) for params in contracts)
    part.data |= {"num_prompts": len(prompts), "tokens": sizes.identity_tokens, "batch": sizes.batch}
    part.data |= {"drafts": drafts, **usage_of(verified)}
    part.lines.append(f"{usage_of(verified)['tokens_per_deep_pass']:.2f} tokens per deep pass, {drafts} drafts a cycle")
    _add_differences(part, bench, prompts, full, verified, f"verified equals full, {len(prompts)} prompts")
    return part


def quality(bench: Bench, sizes: Sizes) -> Part:
    """c: bounded keeps its budget, and how often fast disagrees with full depth, by the library's forward."""
    prompts = bench.spread(sizes.quality_prompts)
    part = Part(f"c: disagreement with full depth, {len(prompts)} prompts")
    ends = {"max_tokens": sizes.tokens}  # the model ends its answers, as in service
    with bench.fixed_drafts() as drafts:
        answers = {
            "bounded": bench.run_batched(
                prompts, SamplingParams(mode="bounded", epsilon=EPSILON, margin=MARGIN, **ends), sizes.batch
            ),
            "fast": bench.run_batched(prompts, SamplingParams(mode="fast", **ends), sizes.batch),
        }
    for name, mine in answers.items():
        figures = _disagreement(bench, prompts, mine)
        part.data[name] = {**figures, "drafts": drafts, "batch": sizes.batch}
        part.lines.append(
            f"{name:8} {100 * figures['disagreement']:.2f} % by the library's forward; "
            f"{100 * figures['exit_rate']:.1f} % of {figures['num_tokens']} tokens exited early, "
            f"{figures['tokens_per_deep_pass']:.2f} tokens per deep pass"
        )
    budgets = [_budget(bench, prompt, answer) for prompt, answer in zip(prompts, answers["bounded"], strict=True)]
    kept = [gap for budget in budgets for gap in budget.gaps]
    part.data["bounded"] |= {"num_differing": len(kept), "widest_gap": max(kept, default=0.0)}
    part.lines.append(f"bounded: {len(kept)} tokens kept, {max(kept, default=0.0):.3f} nats below at most")
    over = sum(not budget.holds for budget in budgets)
    part.bars.append(Bar(f"answers of bounded({EPSILON:g}) over their budget", float(over), 0.0, at_least=False))
    if bench.config.dtype == "float32":  # the library's own rounding is far wider in a narrower type
        name = f"widest gap that bounded(margin {MARGIN:g}) kept, by the library"
        part.bars.append(Bar(name, max(kept, default=0.0), MARGIN + TIE, at_least=False))
        unmarked = float(sum(budget.num_unmarked for budget in budgets))
        part.bars.append(Bar("tokens of bounded that differ and do not say so", unmarked, 0.0, at_least=False))
    part.data["engine_audits"] = [asdict(audit) for audit in bench.engine.stats().audits]
    return part


class Budget(NamedTuple):
    """What one answer of bounded spent."""

    holds: bool
    """At every moment."""
    gaps: tuple[float, ...]
    """Of the tokens that it kept, by the library."""
    num_unmarked: int
    """Tokens that differ by more than a tie and are not marked."""


def _budget(bench: Bench, prompt: Prompt, answer: Completion) -> Budget:
    output = output_ids(answer)
    agreed = bench.library.score(prompt, output).agreed(output)
    holds, gaps, num_unmarked = True, list[float](), 0
    for at, (token, agrees) in enumerate(zip(answer.tokens, agreed, strict=True)):
        gap = 0.0 if agrees else bench.library.gap([*prompt.ids, *output[:at]], [output[at]])
        if token.gap is not None:
            gaps.append(gap)
            holds &= len(gaps) <= EPSILON * (at + 1)
        else:
            num_unmarked += gap > TIE
    return Budget(holds, tuple(gaps), num_unmarked)


def batches(bench: Bench, sizes: Sizes) -> Part:
    """e: many prompts at once; the planner decides the number of drafts."""
    part = Part("e: batches, verified over full")
    contracts = contracts_for(("a",), sizes.tokens)
    for size in sizes.batches:
        prompts = bench.spread(size)
        before = bench.engine.stats()
        runs = bench.turns([prompts], contracts, sizes.repeats)
        after = bench.engine.stats()
        plans = {
            **_plan(bench, size),
            "num_plans": after.num_plans - before.num_plans,
            "num_full_plans": after.num_full_plans - before.num_full_plans,
        }
        ratio = runs["verified"].over(runs["full"])
        figures = {name: mine.figures() for name, mine in runs.items()}
        part.data[str(size)] = {**figures, "over_full": ratio, "plan": plans}
        part.lines += [f"batch {size}:", *(_speed_line(name, mine, runs["full"]) for name, mine in runs.items())]
        part.lines.append(_plan_line(bench, size))
        part.bars.append(Bar(f"verified over full, batch {size}", ratio, NOISE))
        answers = runs["full"].answers, runs["verified"].answers
        _add_differences(part, bench, prompts, *answers, f"verified equals full, batch {size}")
    return part


def needle(bench: Bench, sizes: Sizes, *, seed: int = 0) -> Part:
    """f: each prompt alone and in a batch with mates of all modes; tokens and exit layers must be equal."""
    part = Part(f"f: {sizes.needles} prompts alone and among 1-{sizes.mates} mates")
    chosen, draw = bench.spread(sizes.needles), random.Random(seed)  # noqa: S311
    found: list[dict[str, Any]] = []
    mates_met = []
    with bench.fixed_drafts() as drafts, bench.untied_rows():
        for index, prompt in enumerate(chosen):
            mode = EXITING[index % len(EXITING)]
            [alone] = bench.run([prompt], greedy(mode, sizes.needle_tokens))
            num_mates = draw.randint(1, sizes.mates)
            mates_met.append(num_mates)
            together = _among(bench, prompt, mode, sizes.needle_tokens, num_mates, draw)
            for what in ("token_id", "exit_layer"):
                pair = [[getattr(token, what) for token in answer.tokens] for answer in (alone, together)]
                if pair[0] != pair[1]:
                    found.append({"prompt": index, "mode": mode, "mates": num_mates, "what": what, "pair": pair})
    for mismatch in found:
        part.lines.append(f"prompt {mismatch['prompt']} among {mismatch['mates']} mates: another {mismatch['what']}")
    part.data |= {"needles": len(chosen), "mates": mates_met, "drafts": drafts, "mismatches": found}
    part.bars.append(Bar("mismatches alone and among mates", float(len(found)), 0.0, at_least=False))
    return part


def _among(bench: Bench, prompt: Prompt, mode: str, tokens: int, num_mates: int, draw: random.Random) -> Completion:
    """The answer to one prompt while its mates run in the same batch, some in each mode."""
    groups: dict[str, list[Prompt]] = {}
    for mate in draw.sample(bench.prompts, min(num_mates, len(bench.prompts))):
        groups.setdefault(draw.choice(("full", *EXITING)), []).append(mate)
    with ThreadPoolExecutor(len(groups) + 1) as pool:
        mates = [pool.submit(bench.run, group, greedy(other, tokens)) for other, group in groups.items()]
        [answer] = pool.submit(bench.run, [prompt], greedy(mode, tokens)).result()
        for future in mates:
            future.result()
    return answer


def _disagreement(bench: Bench, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> dict[str, Any]:
    tokens = disagreements = exits = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        output = output_ids(answer)
        tokens += len(output)
        disagreements += bench.library.score(prompt, output).agreed(output).count(False)
        exits += sum(token.exit_layer < bench.num_layers for token in answer.tokens)
    return {
        "num_tokens": tokens,
        "disagreement": disagreements / tokens,
        "exit_rate": exits / tokens,
        **{key: value for key, value in usage_of(answers).items() if key != "num_tokens"},
    }


def _add_differences(
    part: Part,
    bench: Bench,
    prompts: Sequence[Prompt],
    full: Sequence[Completion],
    other: Sequence[Completion],
    name: str,
) -> None:
    """The first token in which each answer differs from full depth, and by the library's logits whether it is a tie."""
    found = []
    pairs = zip(prompts, map(output_ids, full), map(output_ids, other), strict=True)
    for index, (prompt, one, two) in enumerate(pairs):
        if one == two:
            continue
        at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
        gap = bench.library.gap([*prompt.ids, *one[:at]], [one[at], two[at]])
        found.append({"prompt": index, "position": at, "tokens": [one[at], two[at]], "logit_gap": gap})
        part.lines.append(f"prompt {index} differs at token {at}: {one[at]} and {two[at]}, logits {gap:.2e} apart")
    part.data.setdefault("differences", []).extend(found)
    if not found:
        part.lines.append(f"{name}: all {len(prompts)} answers, token by token")
    if bench.config.dtype == "float32":  # in a narrower type ties are far wider than TIE
        worst = max((difference["logit_gap"] for difference in found), default=0.0)
        part.bars.append(Bar(f"{name}; widest tie", worst, TIE, at_least=False))


def _plan(bench: Bench, rows: int) -> dict[str, Any]:
    """The planner's current decision for `rows` rows."""
    plan = bench.planner.plan(rows, rows)
    return {"drafts": plan.drafts, "predicted_gain": plan.gain}


def _plan_line(bench: Bench, rows: int) -> str:
    plan = bench.planner.plan(rows, rows)
    return f"plan for {rows} rows: {plan.drafts} drafts, predicted gain {plan.gain:.2f}"


def _speed_line(name: str, mine: Runs, full: Runs) -> str:
    usage = usage_of(mine.answers)
    accepted = "-" if usage["acceptance"] is None else f"{usage['acceptance']:.3f}"
    return (
        f"{name:9} {mine.rate:8.1f} tokens/s  {mine.over(full):5.2f} of full  "
        f"{usage['layers_per_token']:6.2f} layers/token  {usage['tokens_per_deep_pass']:5.2f} tokens/deep pass  "
        f"accepted {accepted}"
    )

"""The parts of `gpu.py` that time steps and cycles on the large shape, and the demo model's modes.

A shallow pass cannot be run alone. Cycles of more and of fewer drafts differ by some of them and by little else: up to
8 pending tokens cost the deep pass the same, because the kernels take them together. A deep pass is what a cycle takes
without its shallow ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_shapes import Subject
from benchmarks.gpu_times import cycle_times, profile_cycle, step_time
from benchmarks.mode_parts import ABOVE_ALL, different_kinds, greedy
from benchmarks.mode_runs import Bench, Runs, output_ids
from tide_core.batch import RowStep, ScheduledBatch
from tide_core.config import EngineConfig
from tide_core.request import NO_EXITS, ExitPolicy, Request, SamplingParams

STRIDE = 37
"""Prime, so that the lengths of a batch's answers go through all of theirs."""
FEW, MANY = 4, 7
"""Drafts of the two cycles whose difference is shallow passes; with both, 5 to 8 tokens are pending."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    batches: tuple[int, ...]
    steps: int
    """At full depth, in a row."""
    repeats: int
    tokens: int
    prompts: int
    turns: int
    batch_turns: int
    rounds: int
    """Prompts for each row of a batch."""
    replays: tuple[int, ...]
    calls: int
    """Of an op in a row."""
    rival_tokens: int
    rival_limit_s: float


@dataclass
class Found:
    """What one part has measured: rows of the table by key, and figures behind them."""

    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, value: float | None, shown: str) -> None:
        self.measures[key] = {"value": value, "shown": shown}


@dataclass
class World:
    """What the parts share; the demo's engine is made when it is first wanted."""

    subject: Subject
    sizes: Sizes
    read_bytes_per_s: float
    demo: str
    demo_artefact: str
    prompt_file: Path
    with_profile: bool = False

    @functools.cached_property
    def bench(self) -> Bench:
        config = EngineConfig(
            model=self.demo,
            artefact=self.demo_artefact,
            device=self.subject.device.type,
            dtype=self.subject.dtype,
            kernels=self.subject.kernels,
            prefix_caching=False,  # every turn does all its work
        )
        return Bench(config, self.prompt_file)

    def floor_s(self, num_bytes: int) -> float:
        return num_bytes / self.read_bytes_per_s

    def close(self) -> None:
        if "bench" in self.__dict__:
            self.bench.engine.close()


def step(world: World) -> Found:
    """Whole steps of the engine at full depth, host included, against the time to read the weights."""
    found, subject = Found(), world.subject
    floor = world.floor_s(subject.weight_bytes)
    found.figures |= {"weight_bytes": subject.weight_bytes, "floor_ms": 1e3 * floor}
    context = subject.shape.context
    for rows in world.sizes.batches:
        seconds = step_time(subject.plain, rows, context, world.sizes.steps, max(1, world.sizes.repeats // 6))
        keys_values = rows * context * subject.shape.layers * subject.kv_bytes
        figures = {"ms": 1e3 * seconds, "with_kv_floor_ms": 1e3 * world.floor_s(subject.weight_bytes + keys_values)}
        if world.with_profile:
            figures |= _profile(world, subject.plain, -1, rows)
        found.figures[f"batch {rows}"] = figures
        found.add(f"step_{rows}", seconds / floor, f"{1e3 * seconds:.3f} ms against {1e3 * floor:.3f} ms")
    return found


def cycle(world: World) -> Found:
    """Cycles of one row: what a shallow pass takes, what a deep one, and what it costs not to leave."""
    found, subject = Found(), world.subject
    times = cycle_times(
        subject.exits, [-1, 0, FEW, MANY], 1, subject.shape.context, world.sizes.repeats, more=[refused]
    )
    full, none, few, many, asked = times
    shallow, deep = split(few, many)
    floor = world.floor_s(subject.shallow_bytes)
    found.figures |= {
        f"{name}_ms": 1e3 * seconds
        for name, seconds in {
            "full": full,
            "cycle_of_0": none,
            f"cycle_of_{FEW}": few,
            f"cycle_of_{MANY}": many,
            "router_asked_and_refused": asked,
            "shallow": shallow,
            "deep": deep,
            "shallow_floor": floor,
        }.items()
    }
    found.figures |= {"shallow_bytes": subject.shallow_bytes, "asked_and_refused_over_full": asked / full}
    if world.with_profile:
        found.figures["profiles"] = {count: _profile(world, subject.exits, count, 1) for count in (-1, 0, FEW, MANY)}
    found.add("shallow", shallow / floor, f"{1e3 * shallow:.3f} ms against {1e3 * floor:.3f} ms")
    found.add("deep", deep / none, f"{1e3 * deep:.3f} against {1e3 * none:.3f} ms")
    sizes = 1, subject.shape.context, world.sizes.steps, max(1, world.sizes.repeats // 6)
    drafting = ExitPolicy("verified", (0.0,), (math.inf,))
    plain, kept = (step_time(subject.exits, *sizes, policy=policy) for policy in (NO_EXITS, drafting))
    found.figures |= {"steps_ms": 1e3 * plain, "steps_with_routers_ms": 1e3 * kept}
    shown = f"{1e3 * kept:.3f} against {1e3 * plain:.3f} ms; a router asked in vain: {asked / full:.2f}×"
    found.add("routers", kept / plain, shown)
    return found


def split(few_s: float, many_s: float) -> tuple[float, float]:
    """Seconds of a shallow pass, and of the deep pass that ends the cycle of fewer drafts."""
    shallow = (many_s - few_s) / (MANY - FEW)
    return shallow, few_s - FEW * shallow


def refused(tables: Any) -> ScheduledBatch:
    """Rows whose router is asked once and never says yes."""
    policy = ExitPolicy("verified", (1.0,), (math.inf,))
    request = Request("refused", (0,), SamplingParams(max_tokens=4, ignore_eos=True), seed=0)
    return ScheduledBatch(tuple(RowStep(request, table, (0,), (), True, policy, 1) for table in tables))


def reads(world: World) -> Found:
    """What the host waits for in a cycle, as the profiler sees it."""
    found = Found()
    if world.subject.device.type != "cuda":
        found.add("reads", None, "needs a GPU")
        return found
    of_cycle, of_step = (
        profile_cycle(world.subject.exits, drafts, 1, world.subject.shape.context) for drafts in (FEW, -1)
    )
    found.figures |= {"cycle": vars(of_cycle), "full": vars(of_step)}
    cycles, steps = (f"{one.copies_to_host} copies and {one.waits} waits" for one in (of_cycle, of_step))
    shown = f"{cycles}; a full step: {steps}"
    found.add("reads", of_cycle.host_reads, shown)
    return found


def demo(world: World) -> Found:
    """Modes of the demo model in turns on one engine, as `modes.py` runs them. In a batch a row that ends is followed
    by another, as under load, and answers have different lengths: else all rows at full depth would end in the same
    step, and their prompts come in one pass, which no server sees."""
    found, bench, sizes = Found(), world.bench, world.sizes
    modes: dict[str, dict[str, Any]] = {name: {"mode": name} for name in ("full", "verified")}
    modes["no exits"] = {"mode": "verified", "threshold": ABOVE_ALL}
    for size in sizes.batches:
        one_by_one = [[prompt] for prompt in different_kinds(bench.prompts, sizes.prompts)]
        groups = one_by_one if size == 1 else [bench.spread(size * sizes.rounds)]
        lengths = [sizes.tokens] if size == 1 else varied(sizes.tokens, len(groups[0]))
        contracts = {name: [greedy(tokens=length, **mode) for length in lengths] for name, mode in modes.items()}
        with bench.at_most(size):
            runs = bench.turns(groups, contracts, sizes.turns if size == 1 else sizes.batch_turns)
        full, verified = runs["full"], runs["verified"]
        found.figures[f"batch {size}"] = {
            **{name: {**mine.figures(), "over_full": mine.over(full)} for name, mine in runs.items()},
            "num_answers": len(full.answers),
            "num_different": _different(full, verified),
            "drafts": bench.planner.plan(size, size).drafts,
        }
        shown = f"{verified.rate:.0f} against {full.rate:.0f} tokens/s, {_different(full, verified)} of "
        found.add(f"demo_{size}", verified.over(full), f"{shown}{len(full.answers)} answers differ")
    return found


def varied(tokens: int, count: int) -> list[int]:
    """Lengths from half of `tokens` to one and a half times as many, in no order, `tokens` in the mean."""
    return [tokens // 2 + tokens * (index * STRIDE % count) // max(1, count - 1) for index in range(count)]


def _different(one: Runs, two: Runs) -> int:
    return sum(output_ids(a) != output_ids(b) for a, b in zip(one.answers, two.answers, strict=True))


def _profile(world: World, parts: Any, drafts: int, rows: int) -> Mapping[str, Any]:
    if world.subject.device.type != "cuda":
        return {}
    found = profile_cycle(parts, drafts, rows, world.subject.shape.context)
    return {"busy_ms": 1e3 * found.busy_s, "num_kernels": found.num_kernels}

"""The parts that time steps, cycles and ops of the large shape.

A shallow pass cannot run alone. Its time is the difference of two cycles, one with more drafts than the other: the deep
pass takes the same time for up to 8 pending tokens. A deep pass is a cycle minus its shallow passes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Measures
from benchmarks.common.runs import Bench
from benchmarks.common.shapes import Subject
from benchmarks.common.timing import cycle_times, profile_cycle, step_time
from benchmarks.kernels import measure as kernels
from tide_core.batch import RowStep, ScheduledBatch
from tide_core.config import EngineConfig
from tide_core.request import NO_EXITS, ExitPolicy, Request, SamplingParams

FEW, MANY = 4, 7
"""Drafts of the two cycles that are subtracted; in both, 5 to 8 tokens are pending."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    batches: tuple[int, ...]
    steps: int
    """Steps at full depth that are timed together."""
    repeats: int
    tokens: int
    prompts: int
    turns: int
    batch_turns: int
    rounds: int
    """Prompts for each row of a batch."""
    replays: tuple[int, ...]
    calls: int
    """Calls of an op that are timed together."""
    rival_tokens: int
    rival_limit_s: float


@dataclass
class Session:
    """What the parts share. The engine of the demo model is made on first use."""

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
            prefix_caching=False,  # every turn computes its prompts
            suffix_drafts=False,  # what exits gain; past its end a text repeats itself
        )
        return Bench(config, self.prompt_file)

    def floor_s(self, num_bytes: int) -> float:
        return num_bytes / self.read_bytes_per_s

    def close(self) -> None:
        if "bench" in self.__dict__:
            self.bench.engine.close()


def step(session: Session) -> Measures:
    """Steps of the engine at full depth, with the host's work, against the time to read the weights."""
    found, subject = Measures(), session.subject
    floor = session.floor_s(subject.weight_bytes)
    found.figures |= {"weight_bytes": subject.weight_bytes, "floor_ms": 1e3 * floor}
    context = subject.shape.context
    for rows in session.sizes.batches:
        seconds = step_time(subject.plain, rows, context, session.sizes.steps, max(1, session.sizes.repeats // 6))
        keys_values = rows * context * subject.shape.layers * subject.kv_bytes
        figures = {"ms": 1e3 * seconds, "with_kv_floor_ms": 1e3 * session.floor_s(subject.weight_bytes + keys_values)}
        if session.with_profile:
            figures |= _profile(session, subject.plain, -1, rows)
        found.figures[f"batch {rows}"] = figures
        found.add(f"step_{rows}", seconds / floor, f"{1e3 * seconds:.3f} ms against {1e3 * floor:.3f} ms")
    return found


def cycle(session: Session) -> Measures:
    """Cycles of one row: the time of a shallow pass, of a deep pass, and of exits that are never taken."""
    found, subject = Measures(), session.subject
    times = cycle_times(
        subject.exits, [-1, 0, FEW, MANY], 1, subject.shape.context, session.sizes.repeats, more=[refused]
    )
    full, none, few, many, asked = times
    shallow, deep = split(few, many)
    floor = session.floor_s(subject.shallow_bytes)
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
    if session.with_profile:
        found.figures["profiles"] = {count: _profile(session, subject.exits, count, 1) for count in (-1, 0, FEW, MANY)}
    found.add("shallow", shallow / floor, f"{1e3 * shallow:.3f} ms against {1e3 * floor:.3f} ms")
    found.add("deep", deep / none, f"{1e3 * deep:.3f} against {1e3 * none:.3f} ms")
    sizes = 1, subject.shape.context, session.sizes.steps, max(1, session.sizes.repeats // 6)
    drafting = ExitPolicy("verified", (0.0,))
    plain, kept = (step_time(subject.exits, *sizes, policy=policy) for policy in (NO_EXITS, drafting))
    found.figures |= {"steps_ms": 1e3 * plain, "steps_with_routers_ms": 1e3 * kept}
    shown = f"{1e3 * kept:.3f} against {1e3 * plain:.3f} ms; a router that refuses: {asked / full:.2f}×"
    found.add("routers", kept / plain, shown)
    return found


def split(few_s: float, many_s: float) -> tuple[float, float]:
    """Seconds of a shallow pass, and of the deep pass of the cycle with fewer drafts."""
    shallow = (many_s - few_s) / (MANY - FEW)
    return shallow, few_s - FEW * shallow


def refused(tables: Any) -> ScheduledBatch:
    """Rows that run the router once, with a threshold that no score reaches."""
    policy = ExitPolicy("verified", (1.0,))
    request = Request("refused", (0,), SamplingParams(max_tokens=4, ignore_eos=True), seed=0)
    return ScheduledBatch(tuple(RowStep(request, table, (0,), (), True, policy, 1) for table in tables))


def reads(session: Session) -> Measures:
    """Reads of the device by the host in a cycle, by the profiler."""
    found = Measures()
    if session.subject.device.type != "cuda":
        found.add("reads", None, "needs a GPU")
        return found
    of_cycle, of_step = (
        profile_cycle(session.subject.exits, drafts, 1, session.subject.shape.context) for drafts in (FEW, -1)
    )
    found.figures |= {"cycle": vars(of_cycle), "full": vars(of_step)}
    cycles, steps = (f"{one.copies_to_host} copies and {one.waits} waits" for one in (of_cycle, of_step))
    shown = f"{cycles}; a full step: {steps}"
    found.add("reads", of_cycle.host_reads, shown)
    return found


def ops(session: Session) -> Measures:
    """Rows of the table from the benchmark of the kernels, at the large shape."""
    found, device = Measures(), session.subject.device
    dtype = getattr(torch, session.subject.dtype)
    timed = kernels.measure(
        device,
        dtype,
        kernels=session.subject.kernels,
        ops=("attend", "paged_attention", "router"),
        only_large=True,
        calls=session.sizes.calls,
    )
    found.figures["ops"] = [{**asdict(t), "over_floor": t.over_floor, "speedup": t.speedup} for t in timed]
    if wrong := [f"{t.op} {t.what}" for t in timed if not t.agrees]:
        raise RuntimeError(f"differ from their reference: {', '.join(wrong)}")
    for context in dict.fromkeys(context for context, _ in kernels.CONTEXTS):
        of_context = [t for t in timed if t.op == "attend" and t.what.endswith(f" {context}")]
        if of_context:  # with the most rows: fewer are no more than the cost of a launch
            best = max(of_context, key=lambda t: t.rows)
            shown = f"{best.rows} rows: {best.us:.1f} against {best.floor_us:.1f} us"
            found.add(f"attention_{context}", best.over_floor, shown)
    if routers := [t for t in timed if t.op == "router"]:
        worst = min(routers, key=lambda t: t.speedup)
        shown = f"worst at {worst.rows} rows: {worst.us:.1f} against {worst.reference_us:.1f} us"
        found.add("router", worst.speedup, shown)
    return found


def _profile(session: Session, parts: Any, drafts: int, rows: int) -> Mapping[str, Any]:
    if session.subject.device.type != "cuda":
        return {}
    found = profile_cycle(parts, drafts, rows, session.subject.shape.context)
    return {"busy_ms": 1e3 * found.busy_s, "num_kernels": found.num_kernels}

"""Timing of steps, cycles and ops: by the host's clock where a user waits, by the device's clock for an op alone.

The same functions run on a CPU, so that every benchmark can be tried without a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide_core.batch import ScheduledBatch, StepResult
from tide_core.engine.assemble import Parts
from tide_core.execution.cost_measure import blank_tables, decode_batch
from tide_core.request import NO_EXITS, ExitPolicy, Request, RequestOutput, SamplingParams

WARM_UP = 3
"""Runs that are not timed; the first run of a shape captures its graph."""
IN_A_ROW = 4
"""Steps timed together, as they follow one another in use: work that the device does after a result is read overlaps
with the next step or it does not."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
READ_BYTES, SMALL_READ_BYTES = 2**32, 2**26


@dataclass(frozen=True)
class Profile:
    """The work of one call on the device."""

    busy_s: float
    num_kernels: int
    copies_to_host: int
    waits: int
    """Calls in which the host waits for the device."""

    @property
    def host_reads(self) -> int:
        """Reads of the device by the host: each wait is one, whatever the number of copies. A host that polls instead
        of waiting reads at least once."""
        return self.waits or min(1, self.copies_to_host)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_step(parts: Parts, batch: ScheduledBatch) -> StepResult:
    """One call of the runner, to the end."""
    return parts.runner.run(batch)


def cycle_times(
    parts: Parts, drafts: Sequence[int], rows: int, context: int, repeats: int, *, more: Sequence[Any] = ()
) -> list[float]:
    """Median seconds of calls of the runner: one for each number of `drafts` (-1: a step at full depth), then one for
    each function of `more`, which makes a batch from block tables. All run in turns."""
    runner, blocks, device = parts.runner, parts.core.scheduler.blocks, parts.runner.cache.device
    tables = blank_tables(runner, blocks, rows, context, max(*drafts, 1))
    if tables is None:
        raise RuntimeError(f"the KV pool has no capacity for {rows} rows of {context} tokens")
    try:
        batches = [decode_batch(runner, tables, count) for count in drafts] + [make(tables) for make in more]
        return in_turns([lambda batch=batch: run_step(parts, batch) for batch in batches], repeats, device, IN_A_ROW)  # type: ignore[misc]
    finally:
        for table in tables:
            blocks.free(table)


def step_time(
    parts: Parts, rows: int, context: int, steps: int, repeats: int, *, policy: ExitPolicy = NO_EXITS
) -> float:
    """Median seconds of a step of the whole engine without drafts (schedule, run, commit, emit) while `rows` rows
    decode. `steps` steps are timed together, around a context of `context` positions. For rows whose `policy` allows
    exits the planner plans no drafts."""
    core, device = parts.core, parts.runner.cache.device
    names = [f"step-{row}" for row in range(rows)]
    seconds, plan_drafts = [], core.scheduler.plan_drafts
    core.scheduler.plan_drafts = lambda *rows: 0
    for _ in range(repeats + 1):  # the first one is a warm-up
        params = SamplingParams(max_tokens=2 * steps + WARM_UP, ignore_eos=True)
        for row, name in enumerate(names):
            ids = tuple((7 * row + place) % 250 for place in range(context - WARM_UP - steps // 2))
            core.add(Request(name, ids, params, seed=0, policy=policy))
        emitted = Counter[str]()

        def deliver(outputs: Sequence[RequestOutput], emitted: Counter[str] = emitted) -> None:
            emitted.update(output.request_id for output in outputs for _ in output.tokens)

        while len(emitted) < rows or min(emitted.values()) < WARM_UP - 1:
            core.advance(deliver)
        synchronize(device)
        began, before = time.perf_counter(), emitted.total()
        for _ in range(steps):
            core.advance(deliver)
        seconds.append((time.perf_counter() - began) / steps)
        if emitted.total() - before != rows * steps:
            raise RuntimeError(f"{emitted.total() - before} tokens in {steps} steps of {rows} rows")
        for name in names:
            core.abort(name)
        synchronize(device)
    core.scheduler.plan_drafts = plan_drafts
    return statistics.median(seconds[1:])


def in_turns(
    calls: Sequence[Callable[[], object]], repeats: int, device: torch.device, in_a_row: int = 1
) -> list[float]:
    """Median seconds of each call by the host's clock, `in_a_row` calls timed together; the device is idle before and
    after."""
    seconds: list[list[float]] = [[] for _ in calls]
    for attempt in range(WARM_UP + repeats):
        for call, mine in zip(calls, seconds, strict=True):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(in_a_row):
                call()
            synchronize(device)
            if attempt >= WARM_UP:
                mine.append((time.perf_counter() - began) / in_a_row)
    return [statistics.median(mine) for mine in seconds]


def profile_cycle(parts: Parts, drafts: int, rows: int, context: int) -> Profile:
    """One warm call of the runner under the profiler."""
    runner, blocks = parts.runner, parts.core.scheduler.blocks
    tables = blank_tables(runner, blocks, rows, context, max(drafts, 1))
    if tables is None:
        raise RuntimeError(f"the KV pool has no capacity for {rows} rows of {context} tokens")
    try:
        return profiled(parts, decode_batch(runner, tables, drafts))
    finally:
        for table in tables:
            blocks.free(table)


def profiled(parts: Parts, batch: ScheduledBatch) -> Profile:
    from torch.profiler import ProfilerActivity, profile, record_function

    for _ in range(WARM_UP):
        run_step(parts, batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        with record_function("tide cycle"):
            run_step(parts, batch)
        torch.cuda.synchronize()
    return read_profile(found.events())


def read_profile(events: Iterable[Any]) -> Profile:
    """The profile of the call that was recorded as "tide cycle"."""
    events = list(events)
    cycle = next(e for e in events if e.name == "tide cycle" and not _on_device(e))
    began, ended = cycle.time_range.start, cycle.time_range.end
    work = [e for e in events if _on_device(e) and e.name != "tide cycle"]
    kernels = [e for e in work if not e.name.startswith(("Memcpy", "Memset"))]
    waits = [e for e in events if not _on_device(e) and e.name in WAITS and began <= e.time_range.start <= ended]
    return Profile(
        busy_s=sum(e.time_range.elapsed_us() for e in work) / 1e6,
        num_kernels=len(kernels),
        copies_to_host=sum(e.name.startswith("Memcpy DtoH") for e in work),
        waits=len(waits),
    )


def _on_device(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def per_call_s(call: Callable[[int], object], calls: int, device: torch.device, *, as_graph: bool = True) -> float:
    """Seconds of one of `calls` calls in a row; on a GPU by the device's clock, `as_graph` in one CUDA graph."""
    if device.type != "cuda":
        [seconds] = in_turns([lambda: [call(i) for i in range(calls)]], 5, device)
        return seconds / calls
    work = _graph(call, calls) if as_graph else lambda: [call(i) for i in range(calls)]
    work()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times) / calls


def _graph(call: Callable[[int], object], calls: int) -> Callable[[], object]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first call of a library sets it up
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            call(i)
    return graph.replay


def read_rate(device: torch.device) -> float:
    """Bytes per second at which memory is read: the best of a few reductions."""
    on_gpu = device.type == "cuda"
    numbers = torch.ones(READ_BYTES // 8 if on_gpu else SMALL_READ_BYTES // 8, dtype=torch.int64, device=device)
    floats = numbers.view(torch.float32)
    matrix = numbers.view(torch.bfloat16).view(-1, 2**14)
    vector = torch.ones(2**14, dtype=torch.bfloat16, device=device)
    ways = [numbers.sum, floats.sum, floats.amax] + ([lambda: matrix.mv(vector)] if on_gpu else [])
    best = min(per_call_s(lambda i, way=way: way(), 3, device, as_graph=False) for way in ways)  # type: ignore[misc]
    return numbers.numel() * 8 / best


def flop_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / per_call_s(lambda i: a @ b, 3, device, as_graph=False)

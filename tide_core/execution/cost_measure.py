"""The cost table, measured: real cycles of the real runner over blank rows, a few tries each.

A table is kept in the cache folder under a name made of everything it depends on: host, device, model, artefact, dtype,
threads, kernels. Of tries by the host's clock the quickest is taken, because noise only ever adds. By a device's clock
it is the middle one: there a cycle may come out too short as well, and numbers of drafts are often within two or three
percent of each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from tide_core.batch import RowStep, ScheduledBatch
from tide_core.disk import write_whole
from tide_core.execution.runner import ModelRunner
from tide_core.exits.cost import SUFFIX_SIZES, CostPoint, CostTable
from tide_core.kv.block_manager import BlockManager, BlockTable
from tide_core.request import ExitPolicy, Request, SamplingParams

logger = logging.getLogger("tide")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 128
TRIES, FEW_TRIES = 5, 2
"""As a rule, and once a quarter of the time is over."""
DEVICE_TRIES, FEW_DEVICE_TRIES = 11, 3
"""The same by the clock of a device, where the middle one counts."""
START_UP_S = 10.0
"""A measurement at start-up goes no further up in rows once it has taken this long."""
MAX_SUFFIX_TOKENS, MAX_SUFFIX_GRAPH_TOKENS = 32, 128
"""Tokens of a deep pass up to which suffix drafts are measured: on the plain path, and where cycles are graphs."""
FORMAT = 6


def measure(
    runner: ModelRunner,
    blocks: BlockManager,
    *,
    max_rows: int,
    max_drafts: int,
    context: int = CONTEXT,
    max_positions: int | None = None,
    limit_s: float = START_UP_S,
    suffix_drafts: bool = False,
    lock: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> CostTable:
    """Time steps and cycles for 1, 2, 4, ... rows; with `suffix_drafts` also cycles with suffix drafts. The pool must
    be idle; it is idle again afterwards. `lock` is held for one step or cycle at a time, so that an engine with the
    same model can run its steps in between."""
    points: list[CostPoint] = []
    started = time.perf_counter()
    pool = blocks.num_available * blocks.block_size
    longest = min(pool, max_positions or runner.adapter.max_positions)
    most_drafts = max(max_drafts, *SUFFIX_SIZES) if suffix_drafts else max_drafts
    context = max(0, min(context, longest - most_drafts - 1))
    for rows in sorted({*(rows for rows in ROWS if rows < max_rows), max_rows}):
        sizes = _suffix_sizes(runner, rows) if suffix_drafts else ()
        if not max_drafts and not sizes:
            break
        spent = time.perf_counter() - started
        if points and spent > limit_s:
            break
        tables = blank_tables(runner, blocks, rows, context, max(max_drafts, *sizes) if sizes else max_drafts)
        if tables is None:
            break
        try:
            points.append(_point(runner, tables, max_drafts, sizes, hurried=spent >= limit_s / 4, lock=lock))
        finally:
            for table in tables:
                blocks.free(table)
    return CostTable(tuple(points))


def _suffix_sizes(runner: ModelRunner, rows: int) -> tuple[int, ...]:
    """Numbers of suffix drafts that are measured with so many rows: at least two, or none."""
    most = MAX_SUFFIX_TOKENS if runner.cycles is None else MAX_SUFFIX_GRAPH_TOKENS
    sizes = tuple(size for size in SUFFIX_SIZES if rows * (size + 1) <= most)
    return sizes if len(sizes) > 1 else ()


def _point(
    runner: ModelRunner,
    tables: Sequence[BlockTable],
    max_drafts: int,
    suffix_sizes: Sequence[int],
    *,
    hurried: bool,
    lock: Callable[[], AbstractContextManager[object]],
) -> CostPoint:
    some = sorted({0, min(1, max_drafts), -(-max_drafts // 2), max_drafts})
    if runner.cycles is not None:  # quick, and not on a line: kernels take eight tokens at a time
        some = list(range(max_drafts + 1))
    batches = [decode_batch(runner, tables, drafts) for drafts in (-1, *some)]
    batches += [decode_batch(runner, tables, drafts, suffix_drafts=True) for drafts in suffix_sizes]
    by_device = [_by_device(runner, batch) for batch in batches]
    is_suffix = [False] * (1 + len(some)) + [True] * len(suffix_sizes)
    tries = [
        num_tries(by_device=own, hurried=hurried or is_long) for own, is_long in zip(by_device, is_suffix, strict=True)
    ]
    taken: list[list[float]] = [[] for _ in batches]
    for attempt in range(max(tries) + 1):
        for batch, seconds, most in zip(batches, taken, tries, strict=True):
            if len(seconds) == most:
                continue
            with lock():
                _wait(runner.cache.device)  # what a device does after its results is not part of the next step
                took = _seconds(runner, batch)
            if attempt:  # the first round is a warm-up
                seconds.append(took)
    full, *rest = (typical(seconds, by_device=own) for seconds, own in zip(taken, by_device, strict=True))
    cycles, with_suffix = rest[: len(some)], rest[len(some) :]
    return CostPoint(
        len(tables), full, tuple(zip(some, cycles, strict=True)), tuple(zip(suffix_sizes, with_suffix, strict=True))
    )


def num_tries(*, by_device: bool, hurried: bool) -> int:
    if by_device:
        return FEW_DEVICE_TRIES if hurried else DEVICE_TRIES
    return FEW_TRIES if hurried else TRIES


def typical(seconds: Sequence[float], *, by_device: bool) -> float:
    """Of several tries."""
    return statistics.median(seconds) if by_device else min(seconds)


def _is_one_launch(runner: ModelRunner, batch: ScheduledBatch) -> bool:
    """Whether it is one launch, so that the next one is launched before it is read."""
    rows, cycles = batch.rows, runner.cycles
    return cycles is not None and all(map(cycles.supports, rows)) and len(rows) <= cycles.max_rows(rows[0].num_drafts)


def _by_device(runner: ModelRunner, batch: ScheduledBatch) -> bool:
    return runner.cache.device.type == "cuda" and _is_one_launch(runner, batch)


@torch.inference_mode()
def _seconds(runner: ModelRunner, batch: ScheduledBatch) -> float:
    """Of a step; where the next one is launched before the last is read, from the end of one to the end of the next."""
    rows, cycles = batch.rows, runner.cycles
    if cycles is None or not _is_one_launch(runner, batch):
        before = time.perf_counter()
        runner.run(batch)
        return time.perf_counter() - before
    ends = [_End(runner.cache.device) for _ in range(2)]
    started = []
    for end in ends:
        started.append(cycles.start(rows))
        end.mark()
    for running in started:
        running.results()
    return ends[0].seconds_to(ends[1])


class _End:
    """When what was launched by then ends, by the clock of the device."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._at = 0.0

    def mark(self) -> None:
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds_to(self, later: _End) -> float:
        """Waits for the later one."""
        if self._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


def decode_batch(
    runner: ModelRunner, tables: Sequence[BlockTable], drafts: int, *, suffix_drafts: bool = False
) -> ScheduledBatch:
    """A decode step of all rows: at full depth (-1), or a cycle in which each drafts that many, or has as many suffix
    drafts."""
    count = len(runner.segments) - 1
    policy = ExitPolicy()
    if drafts >= 0:  # every score passes at the first checkpoint; the others are not asked
        never = (float("inf"),) * count
        policy = ExitPolicy("verified", (0.0, *never[1:]))
    # Nothing ends the text, so that every row makes all its drafts.
    params = SamplingParams(max_tokens=2 * max(drafts, 1), ignore_eos=True)
    request = Request("cost", (0,), params, seed=0)
    step = (0,), (), True, policy, max(drafts, 0), (0,) * drafts if suffix_drafts else ()
    return ScheduledBatch(tuple(RowStep(request, table, *step) for table in tables))


def blank_tables(
    runner: ModelRunner, blocks: BlockManager, rows: int, context: int, max_drafts: int
) -> list[BlockTable] | None:
    """Rows of a given context whose pages hold zeros; None if the pool has too few blocks."""
    tables: list[BlockTable] = []
    for _ in range(rows):
        table = BlockTable()
        if not blocks.can_allocate(table, context + max_drafts + 1):
            for other in tables:
                blocks.free(other)
            return None
        blocks.allocate(table, context + max_drafts + 1)
        table.length = context
        tables.append(table)
    runner.cache.blank([block for table in tables for block in table.block_ids])
    return tables


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a timing depends on besides the model."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def cache_path(folder: Path, facts: dict[str, Any]) -> Path:
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return folder / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_table(path: Path) -> CostTable | None:
    """A table written by `write_table`; None where there is none or it cannot be read, which is no loss."""
    try:
        raw = json.loads(path.read_text())
        points = tuple(
            CostPoint(
                int(p["rows"]),
                float(p["full_s"]),
                *(tuple((int(k), float(s)) for k, s in p[name]) for name in ("cycle_s", "suffix_s")),
            )
            for p in raw["points"]
        )
        seconds = [s for point in points for s in (point.full_s, *(s for _, s in (*point.cycle_s, *point.suffix_s)))]
        if not points or not all(0.0 < s < 3600.0 for s in seconds):
            raise ValueError("no points, or times that cannot be")
        places = [[point.rows for point in points], *([drafts for drafts, _ in point.cycle_s] for point in points)]
        suffix_counts = [[drafts for drafts, _ in point.suffix_s] for point in points]
        if not all(places) or not all(counts == sorted(set(counts)) for counts in (*places, *suffix_counts)):
            raise ValueError("rows or drafts that do not rise")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cost table %s cannot be read (%s) and is measured again", path, error)
        return None
    return CostTable(points)


def write_table(path: Path, table: CostTable, facts: dict[str, Any]) -> None:
    """Keep a table for the next start; a folder that cannot be written costs only the time to measure again."""
    points = [
        {"rows": p.rows, "full_s": p.full_s, "cycle_s": [*map(list, p.cycle_s)], "suffix_s": [*map(list, p.suffix_s)]}
        for p in table.points
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"points": points, "facts": facts}, indent=1, default=str).encode())
    except OSError as error:
        logger.warning("cost table cannot be kept in %s: %s", path.parent, error.strerror or error)

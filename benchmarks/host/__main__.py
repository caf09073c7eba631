"""The time of the engine's host code: microseconds per row and step, and per token.

    python -m benchmarks.host              # a table
    python -m benchmarks.host --json       # the same as one JSON object

Core, loop and sinks are those of the engine; a stub in place of the model returns the next tokens of every row at once,
and its own time is subtracted. `cycles` is `thread` with the host code of CUDA graphs, and `cycles-2` the same with two
steps per launch. Each figure is the minimum over the tries: other processes can only add to it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import typer

from benchmarks.host.ready import ReadyRunner
from tide_core.batch import DraftCounts, RowResult, ScheduledBatch, StepResult
from tide_core.engine.core import EngineCore
from tide_core.engine.loop import EngineLoop
from tide_core.engine.scheduler import Scheduler
from tide_core.engine.sinks import AnswerSink, AsyncSink
from tide_core.evaluation.machine import cpu_name
from tide_core.exits.cost import Acceptance, CostPoint, CostTable, DraftPlanner
from tide_core.kv.block_manager import BlockManager
from tide_core.models.loader import load_tokenizer
from tide_core.models.resolver import resolve
from tide_core.outputs.tokenizer import Tokenizer
from tide_core.request import ExitPolicy, Request, SamplingParams

PROMPT_TOKENS = 64
NEW_TOKENS = 256
NUM_LAYERS = 30
BLOCK_SIZE = 16
EXITS = ExitPolicy("verified", draft_thresholds=(0.5,), exit_thresholds=(math.inf,))
TEXT = "The harbour was quiet before dawn. Gulls circled 12 boats, and Zoë said: “naïve, perhaps — but it works!”\n"


class ReadyModel:
    """Returns the next ids of one long text for each row; `seconds` is its own time."""

    def __init__(self, ids: list[int], tokens_per_step: int) -> None:
        self.seconds = 0.0
        self.row_steps = 0
        self._ids = tuple(ids)
        self._drafts = tokens_per_step - 1

    def run(self, batch: ScheduledBatch) -> StepResult:
        start = time.perf_counter()
        rows = tuple(self._row(step.token_ids, step.output_ids, step.num_drafts) for step in batch.rows)
        self.row_steps += len(rows)
        self.seconds += time.perf_counter() - start
        return StepResult(rows)

    def _row(self, token_ids: Any, output_ids: Any, num_drafts: int) -> RowResult:
        made, kept = len(output_ids), min(self._drafts, num_drafts)
        ran, num = len(token_ids) + kept, kept + 1
        counts = (DraftCounts(kept, kept, 0, kept),)
        return RowResult(
            self._ids[made : made + num], (NUM_LAYERS,) * num, (None,) * num, ran, NUM_LAYERS * ran, counts
        )


def table() -> CostTable:
    """Costs by which drafts pay at any load, so that every plan has the same result."""
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    cycles = {rows: tuple((k, 0.001 * (1 + 0.01 * rows) + 0.0001 * k) for k in (0, 1, 2)) for rows in counts}
    return CostTable(tuple(CostPoint(rows, cycles[rows][0][1], cycles[rows]) for rows in counts))


def make_core(tokenizer: Tokenizer, model: ReadyModel | ReadyRunner, num_rows: int, tokens_per_step: int) -> EngineCore:
    blocks = BlockManager(num_rows * -(-(PROMPT_TOKENS + NEW_TOKENS + 48) // BLOCK_SIZE), BLOCK_SIZE, num_segments=2)
    drafts = tokens_per_step - 1
    planner = DraftPlanner(drafts, Acceptance.prior([0.9], drafts), table()) if drafts else None
    scheduler = Scheduler(
        blocks,
        max_rows=num_rows,
        max_batch_tokens=max(2048, PROMPT_TOKENS * num_rows),
        plan_drafts=planner,
        max_drafts=drafts,
        runs_ahead=isinstance(model, ReadyRunner),
        cycles_ahead=model.cycles_ahead if isinstance(model, ReadyRunner) else lambda: 1,
    )
    during = model.during if isinstance(model, ReadyRunner) else None
    on_drafts = None if planner is None else planner.observe
    return EngineCore(
        scheduler, model.run, tokenizer, namespace="host", num_layers=NUM_LAYERS, on_drafts=on_drafts, during=during
    )


def make_requests(tokenizer: Tokenizer, num_rows: int, tokens_per_step: int) -> list[Request]:
    ids = tokenizer.encode(TEXT * 20)
    policy = EXITS if tokens_per_step > 1 else ExitPolicy()
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        Request(str(row), tuple(ids[row : row + PROMPT_TOKENS]), params, 0, policy=policy) for row in range(num_rows)
    ]


def run_core(core: EngineCore, requests: list[Request]) -> int:
    """The core alone."""
    for request in requests:
        core.add(request)
    num_tokens = 0
    while core.has_work:
        num_tokens += sum(len(output.tokens) for output in core.step())
    return num_tokens


def run_thread(core: EngineCore, requests: list[Request]) -> int:
    """The loop, and one thread that waits for all requests, as in `Engine.generate`."""
    loop, sink, num_tokens = EngineLoop(core, max_open=len(requests)), AnswerSink(), 0
    loop.submit(requests, sink, core)
    for _ in requests:
        if (ended := sink.get()) is not None:
            num_tokens += len(ended[1])
    loop.close()
    return num_tokens


def run_async(core: EngineCore, requests: list[Request]) -> int:
    """The loop, and a coroutine for each request, as in the server."""
    loop = EngineLoop(core, max_open=len(requests))

    async def read(request: Request) -> int:
        sink, num_tokens, finished = AsyncSink(asyncio.get_running_loop()), 0, False
        loop.submit([request], sink, core)
        while not finished:
            output = await sink.get()
            num_tokens, finished = num_tokens + len(output.tokens), output.finished
        return num_tokens

    async def read_all() -> int:
        return sum(await asyncio.gather(*map(read, requests)))

    num_tokens = asyncio.run(read_all())
    loop.close()
    return num_tokens


WAYS: dict[str, Callable[[EngineCore, list[Request]], int]] = {
    "core": run_core,
    "thread": run_thread,
    "async": run_async,
    "cycles": run_thread,
    "cycles-2": run_thread,
    "cycles-4": run_thread,
}


def measure(tokenizer: Tokenizer, way: str, num_rows: int, tokens_per_step: int, tries: int) -> dict[str, Any]:
    ids, requests = tokenizer.encode(TEXT * 20), make_requests(tokenizer, num_rows, tokens_per_step)
    least, row_steps = math.inf, 0
    for _ in range(tries):
        model: ReadyRunner | ReadyModel = ReadyModel(ids, tokens_per_step)
        if way.startswith("cycles"):
            model = ReadyRunner(ids, NUM_LAYERS, BLOCK_SIZE, steps_per_launch=int(way.partition("-")[2] or 1))
        core = make_core(tokenizer, model, num_rows, tokens_per_step)
        gc.collect()
        start = time.perf_counter()
        num_tokens = WAYS[way](core, requests)
        seconds = time.perf_counter() - start - model.seconds
        assert num_tokens == num_rows * NEW_TOKENS
        least, row_steps = min(least, seconds), model.row_steps
    return {
        "way": way,
        "rows": num_rows,
        "tokens_per_step": tokens_per_step,
        "us_per_row_step": least / row_steps * 1e6,
        "us_per_token": least / (num_rows * NEW_TOKENS) * 1e6,
    }


def main(
    as_json: bool = typer.Option(False, "--json"),
    tries: int = 5,
    rows: str = "1,8,32,128",
    ways: str = "core,thread,async,cycles,cycles-2,cycles-4",
) -> None:
    """Measure and print; there is no bar."""
    tokenizer = Tokenizer(load_tokenizer(resolve("demo")))
    conditions = {
        "tokenizer": "demo (SmolLM2)",
        "sampling": "greedy",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "block_size": BLOCK_SIZE,
        "tries": tries,
        "python": platform.python_version(),
        "cpu": cpu_name(),
    }
    points = [
        measure(tokenizer, way, int(num_rows), tokens_per_step, tries)
        for way in ways.split(",")
        for tokens_per_step in (1, 2, 3)
        for num_rows in rows.split(",")
    ]
    if as_json:
        print(json.dumps({"conditions": conditions, "results": points}, indent=2))
        return
    for key, value in conditions.items():
        print(f"{key:16} {value}")
    print(f"{'':8}{'tokens/step':>12}{'rows':>6}{'us per row-step':>18}{'us per token':>14}")
    for point in points:
        print(
            f"{point['way']:8}{point['tokens_per_step']:12}{point['rows']:6}"
            f"{point['us_per_row_step']:18.2f}{point['us_per_token']:14.2f}"
        )


if __name__ == "__main__":
    typer.run(main)

"""The measured speed-up of an artefact, on the machine and with the loaded model of its calibration.

In one engine, modes `full` and `verified` alternate on the same prompts, greedy and past the end of text, so that both
emit equally many tokens. Each repeat has its own prompts. They are in the prefix cache before the clock starts, so that
only decoding is timed, as in the prediction. The result is the median of the ratios of all repeats.

A batch size is left out if, by the measured step times, it cannot end in the time left.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_core import __version__
from tide_core.calibration.progress import Progress
from tide_core.calibration.report.data import Measured
from tide_core.calibration.risk.certify import Goal
from tide_core.config import EngineConfig
from tide_core.errors import ConfigError, EngineError
from tide_core.evaluation.certify_fast import certify_fast
from tide_core.evaluation.machine import device_name
from tide_core.identity import ModelIdentity
from tide_core.request import SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.assemble import Parts
    from tide_core.engine.engine import Completion, Engine

MODES = ("full", "verified")
REPEATS = 3
WARM_UP_TOKENS = 4
START_UP_STEPS = 30
"""About the number of steps that the engine's cost table takes for one row."""
KV_MEMORY_GIB = 1.0
FAST_ROWS = {"cuda": 128, "cpu": 16}
"""Answers of mode fast that run together while its contracts are certified."""
SLACK = 1.2
"""Expected time of a batch size over that of its steps alone."""

Prompts = Sequence[Sequence[int]]


def time_exits(
    model: Any,
    tokenizer: Any,
    identity: ModelIdentity,
    artefact: Path,
    prompts: Prompts,
    *,
    batches: Sequence[int],
    new_tokens: int,
    limit_s: float,
    progress: Progress,
    fast: Goal | None = None,
) -> Measured:
    """Mode `verified` against mode `full` at each batch size, smallest first; then the contracts of mode fast are
    certified, if there is a goal. The engine takes over the model."""
    from tide_core.engine.assemble import assemble_loaded
    from tide_core.engine.engine import Engine
    from tide_core.exits.artefact.artefact import load_artefact

    started = time.perf_counter()
    config = _settings(model, prompts, max(batches), new_tokens, fast)
    prompts = [prompt for prompt in prompts if len(prompt) + new_tokens <= (config.max_model_len or 0)]
    run = _Run(prompts, new_tokens, deadline=started + limit_s)
    step_s = _step_seconds(model)
    if (START_UP_STEPS + REPEATS * len(MODES) * new_tokens) * step_s > limit_s:
        too_slow = f"a step takes {step_s:.2g} s, so that nothing could be timed in {limit_s:g} s"
        return Measured({}, _conditions(model, identity, run), too_slow)
    exits = load_artefact(artefact, identity)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()
    parts = assemble_loaded(config, model, tokenizer, name=identity.name, identity=key, artefact=exits)
    run.kernels = parts.kernels.name
    speedups, left_out = {}, []
    with Engine.from_parts(parts) as engine, progress.stage("measure", len(batches), "batch size") as stage:
        for rows in sorted(batches):
            if (reason := run.unsupported_reason(parts, rows)) is not None:
                left_out.append(f"batch {rows} ({reason})")
                stage.update(1)
                continue
            speedups[rows] = run.speedup(engine, rows)
            stage.update(1, batch=rows, speedup=speedups[rows])
        certified = None if fast is None else certify_fast(engine, parts, fast, progress)
    return Measured(speedups, _conditions(model, identity, run), ", ".join(left_out), certified)


@dataclass
class _Run:
    """Prompts, deadline, and the results so far."""

    prompts: Prompts
    new_tokens: int
    deadline: float
    kernels: str = "no"
    prompt_token_s: float | None = None
    """Time of one prompt token in one mode, at the last batch size."""
    num_answers: int = 0
    num_equal: int = 0

    def unsupported_reason(self, parts: Parts, rows: int) -> str | None:
        """Why this batch size cannot be timed; None if it can."""
        pool = parts.core.scheduler.blocks
        longest = max(map(len, self.prompts)) + self.new_tokens
        if rows * -(-longest // pool.block_size) > pool.num_blocks:
            return f"more than {KV_MEMORY_GIB:g} GiB of KV memory"
        assert parts.planner is not None
        table = parts.planner.table
        if table is None or not table.points:
            return "no cost table"
        step_s, left_s = table.full(rows), self.deadline - time.perf_counter()
        num_prompt_tokens = sum(map(len, self._groups(rows)[0]))
        prompts_s = num_prompt_tokens * (step_s / rows if self.prompt_token_s is None else self.prompt_token_s)
        needed_s = SLACK * REPEATS * len(MODES) * (self.new_tokens * step_s + prompts_s)
        return f"it needs {needed_s:.0f} s, {max(left_s, 0.0):.0f} s were left" if needed_s > left_s else None

    def speedup(self, engine: Engine, rows: int) -> float:
        """The median over the repeats; the mode that runs first alternates."""
        ratios, prompt_s, num_prompt_tokens = [], 0.0, 0
        for repeat, group in enumerate(self._groups(rows)):
            for mode in MODES:
                prompt_s += _timed(engine, group, mode, min(WARM_UP_TOKENS, self.new_tokens))[0]
                num_prompt_tokens += sum(map(len, group))
            order = MODES if repeat % 2 == 0 else MODES[::-1]
            timed = {mode: _timed(engine, group, mode, self.new_tokens) for mode in order}
            (full_s, full), (verified_s, verified) = timed["full"], timed["verified"]
            ratios.append(full_s / verified_s)
            self.num_answers += rows
            self.num_equal += sum(_ids(one) == _ids(two) for one, two in zip(full, verified, strict=True))
        self.prompt_token_s = prompt_s / num_prompt_tokens
        return statistics.median(ratios)

    def _groups(self, rows: int) -> list[Prompts]:
        """The prompts of each repeat, evenly spaced in all prompts; with too few of them, some repeat."""
        wanted = REPEATS * rows
        some = [self.prompts[index * len(self.prompts) // wanted] for index in range(wanted)]
        return [some[repeat::REPEATS] for repeat in range(REPEATS)]


def _settings(model: Any, prompts: Prompts, rows: int, new_tokens: int, fast: Goal | None) -> EngineConfig:
    """A small engine: a pool for these rows and the cached prompts of both modes."""
    from tide_core.models.adapter import ModelAdapter

    most = ModelAdapter(model, paged=False).max_positions
    lengths = [len(prompt) for prompt in prompts if len(prompt) + new_tokens <= most]
    if not lengths:
        raise ConfigError("held-out prompts", len(prompts), f"one with at least {new_tokens} tokens left in {most}")
    longest = 3 * max(lengths) + new_tokens
    if fast is not None:
        longest = max(longest, max(map(len, (*fast.prompts, *fast.selection)), default=0) + fast.max_tokens)
        rows = max(rows, FAST_ROWS.get(model.device.type, 1))
    return EngineConfig(
        model="calibrated",
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        max_model_len=min(most, longest),
        kv_memory_gib=KV_MEMORY_GIB,
        max_rows=rows,
        max_batch_tokens=max(512, rows),
        suffix_drafts=False,  # the speed-up of the exits alone; both modes answer the same prompts
        audit_share=0.0,  # every answer of mode fast is judged here
    )


def _step_seconds(model: Any) -> float:
    """Time of one token in the library's forward, to decide whether to start an engine at all."""
    import torch

    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(2):  # the first warms up
            before = time.perf_counter()
            model(ids, use_cache=False).logits.cpu()
            seconds = time.perf_counter() - before
    return seconds


def _timed(engine: Engine, group: Prompts, mode: str, max_tokens: int) -> tuple[float, list[Completion]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, mode=mode)
    before = time.perf_counter()
    answers = engine.generate(list(group), params)
    seconds = time.perf_counter() - before
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"mode {mode}: {answer.error}")
    return seconds, answers


def _ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def _conditions(model: Any, identity: ModelIdentity, run: _Run) -> str:
    import torch

    return (
        f"{device_name(model.device)}, {str(model.dtype).removeprefix('torch.')}, {run.kernels} kernels; "
        f"{identity.name}; mode `verified` over mode `full`, in turns in one engine, greedy, {run.new_tokens} new "
        f"tokens a row, prompts cached before the clock starts, median of {REPEATS}, each on as many held-out prompts "
        f"of its own as the batch has rows ({len(run.prompts)} to take from); {run.num_equal} of {run.num_answers} "
        f"answers equal; tide-serve {__version__}, torch {torch.__version__}"
    )

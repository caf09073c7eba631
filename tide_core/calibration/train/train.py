"""Training: the frozen model runs once over every batch, and all candidates learn from what it did.

A step is fixed by the seed and its number alone: which sequences, which of their positions, which distances. So a run
that was killed goes on from its last saved state as if nothing had happened, and a candidate comes out the same
whatever others are trained beside it.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.train.candidates import Candidate, CandidateSpec, candidates_of, layers_of, make_candidate
from tide_core.calibration.train.capture import CapturedWork, padded_shape
from tide_core.calibration.train.group import ALONE, Group
from tide_core.calibration.train.learner import Learner, Recipe
from tide_core.calibration.train.teacher import Teacher, fast_matmul, fused_norms
from tide_core.disk import write_whole
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter

STATE_NAME = "training.safetensors"
REPORT_EVERY = 50


def fit(
    config: CalibrationConfig,
    adapter: ModelAdapter,
    shards: TokenShards,
    shortlist: Tensor,
    *,
    progress: Progress | None = None,
    resume_dir: Path | None = None,
    on_saved: Callable[[], None] = lambda: None,
    candidates: Sequence[CandidateSpec] | None = None,
    recipe: Recipe | None = None,
    group: Group = ALONE,
) -> list[Candidate]:
    """Train the candidates, by default those of the configuration; with a `resume_dir`, from where it was left off.

    A training that is done has its last state there as well, which is the caller's to remove. In a `group` everyone
    calls this with the same arguments and gets the same candidates; the first one saves states, and `on_saved` hears of
    each."""
    if not shards.num_sequences:
        raise ConfigError("train sequences", 0, "at least one")
    recipe, progress = recipe or Recipe(), progress or SilentProgress()
    specs = list(candidates_of(config, adapter.num_layers) if candidates is None else candidates)
    sizes = {"max_distance": config.max_drafts, "bottleneck": config.router_bottleneck, "seed": config.seed}
    learners = [Learner(make_candidate(adapter, spec, **sizes), spec, config, recipe, group) for spec in specs]
    layers = layers_of([learner.candidate for learner in learners])
    teacher = Teacher(adapter, shortlist)
    saved = SavedState(resume_dir, _run_digest(config, recipe, specs, shards, shortlist))
    first = saved.load(learners)
    saved_at = time.monotonic()
    all_distances = tuple(range(1, config.max_drafts + 1))

    def work(tokens: Tensor, rows: Tensor, weight: Tensor, distances: Sequence[int] = all_distances) -> None:
        states = teacher.run(tokens, layers)
        targets = teacher.targets(states, rows, weight=weight, temperature=recipe.target_temperature)
        group.add_up([targets.mass_sum, targets.weight_sum])
        for learner in learners:
            learner.learn(teacher, states, targets, distances)

    on_cuda = adapter.device.type == "cuda"
    captures = on_cuda and teacher.is_plain and all(learner.can_be_captured for learner in learners)
    captures = captures and group.size == 1
    captured = CapturedWork(work, adapter.device) if captures else None
    with (
        fast_matmul(adapter.device),
        fused_norms(adapter.model, enabled=on_cuda),
        progress.stage("train", config.steps, "step", first) as stage,
    ):
        for step, batch in _batches(config, shards, first):
            seed = (config.seed, step)
            rows = loss_rows(batch, config.loss_positions, recipe.rows_per_step, recipe.prompt_share, seed=seed)
            for learner in learners:
                learner.begin(step)
            if captured is not None:
                captured(*_in_shape(batch, rows, recipe.rows_per_step))
            else:
                distances = loss_distances(config.max_drafts, recipe.distances_per_step, seed=seed)
                shared = (batch.tokens, rows, torch.ones(len(rows))) if group.size == 1 else _share(batch, rows, group)
                tokens, rows, weight = (_move(tensor, adapter.device) for tensor in shared)
                work(tokens, rows, weight, distances)
            for learner in learners:
                learner.end(step)
            done = step + 1
            if done % REPORT_EVERY == 0 or done == config.steps:
                losses = [learner.report() for learner in learners]
                shown = {learner.candidate.name: said.head for learner, said in zip(learners, losses, strict=True)}
                stage.update(1, **shown)
            else:
                stage.update(1)
            due = done % recipe.save_every == 0 or time.monotonic() - saved_at > recipe.save_seconds
            if (due or done == config.steps) and group.rank == 0:
                saved.save(learners, done)
                on_saved()
                saved_at = time.monotonic()
    return [learner.finish() for learner in learners]


def loss_rows(batch: SequenceBatch, most: int, in_all: int, prompt_share: float, *, seed: tuple[int, int]) -> Tensor:
    """Which rows of the flattened batch are in the loss: at most so many of a sequence and in all, each predicting a
    token of its continuation, or with `prompt_share` of its prompt."""
    generator = torch.Generator().manual_seed(_mixed(*seed))
    num_rows, length = batch.tokens.shape
    positions = torch.arange(length)
    predicts = positions < batch.lengths[:, None] - 1
    continues = positions >= batch.prompt_lens[:, None] - 1
    draw = torch.rand((2, num_rows, length), generator=generator)
    wanted = predicts & (continues | (draw[0] < prompt_share))
    order = draw[1].masked_fill(~wanted, 2.0)  # what is not wanted comes last
    chosen = torch.zeros_like(wanted).scatter_(1, order.topk(min(most, length), largest=False).indices, True)
    rows = (chosen & wanted).flatten().nonzero().squeeze(-1)
    if len(rows) <= in_all:
        return rows
    return rows[torch.randperm(len(rows), generator=generator)[:in_all]].sort().values


def _share(batch: SequenceBatch, rows: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, rows of the loss and their weights for one of a group: every so manieth sequence."""
    length = batch.tokens.shape[1]
    sequence, position = rows // length, rows % length
    mine = sequence % group.size == group.rank
    tokens = batch.tokens[group.rank :: group.size]
    if not len(tokens) or not mine.any():  # nothing to learn from here: one row that weighs nothing
        return batch.tokens[:1], torch.zeros(1, dtype=torch.long), torch.zeros(1)
    own = sequence[mine] // group.size * length + position[mine]
    return tokens, own, torch.ones(len(own))


def _in_shape(batch: SequenceBatch, rows: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, rows of the loss and their weights in one of few shapes; what is filled in weighs nothing."""
    num_rows, length = padded_shape(*batch.tokens.shape)
    tokens = torch.zeros(num_rows, length, dtype=torch.long)
    tokens[: len(batch.tokens), : batch.tokens.shape[1]] = batch.tokens
    where = rows // batch.tokens.shape[1] * length + rows % batch.tokens.shape[1]
    filled, weight = torch.zeros(num, dtype=torch.long), torch.zeros(num)
    filled[: len(rows)] = where
    weight[: len(rows)] = 1.0
    return tokens.pin_memory(), filled.pin_memory(), weight.pin_memory()


def loss_distances(most: int, num: int | None, *, seed: tuple[int, int]) -> list[int]:
    """Distances of one step: all, or 1 and a few others."""
    others = range(2, most + 1)
    if num is None or num > len(others):
        return [1, *others]
    return [1, *sorted(random.Random(_mixed(*seed)).sample(others, num - 1))]  # noqa: S311


class SavedState:
    """The state of a training on disk: one file, replaced whole."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self._path = None if folder is None else folder / STATE_NAME
        self._run = run

    def load(self, learners: Sequence[Learner]) -> int:
        """Bring the learners to where they were; returns the first step that is still to do."""
        if self._path is None or not self._path.exists():
            return 0
        try:
            with safe_open(self._path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"training state {self._path}", str(error), "a whole safetensors file") from error
        if metadata.get("run") != self._run:
            expected = "that of a training with these settings and this data; another one needs another folder"
            raise ConfigError(f"training state {self._path}", metadata.get("run"), expected)
        for index, learner in enumerate(learners):
            prefix = f"{index}."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            learner.load(own)
        return int(metadata["step"])

    def save(self, learners: Sequence[Learner], step: int) -> None:
        if self._path is None:
            return
        tensors: dict[str, Tensor] = {}
        for index, learner in enumerate(learners):
            learner.report()  # a state that is not finite must not be kept
            tensors |= {f"{index}.{name}": tensor.cpu().contiguous() for name, tensor in learner.tensors().items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, save(tensors, {"run": self._run, "step": str(step)}))


def _batches(config: CalibrationConfig, shards: TokenShards, first: int) -> Iterator[tuple[int, SequenceBatch]]:
    """The numbered batches of one step each from `first` to the last, epoch after epoch."""
    step = 0
    for epoch in count():
        settings = {"seed": config.seed, "epoch": epoch}
        num = shards.num_batches(config.batch_tokens, **settings)
        if step + num <= first:
            step += num
            continue
        for batch in shards.batches(config.batch_tokens, **settings):
            if step == config.steps:
                return
            if step >= first:
                yield step, batch
            step += 1


def _run_digest(
    config: CalibrationConfig, recipe: Recipe, specs: Sequence[CandidateSpec], shards: TokenShards, shortlist: Tensor
) -> str:
    ids = hashlib.sha256(shortlist.cpu().numpy().astype("<i8").tobytes()).hexdigest()
    parts = [config.digest, asdict(recipe), [spec.name for spec in specs], shards.digest, ids]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _mixed(seed: int, step: int) -> int:
    """A seed of its own for every step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


def _move(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values

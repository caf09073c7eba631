"""Training: the frozen model runs once over every batch, and all candidates learn from its states. In a training that a
clock ends it runs over a sequence once, as far as its states fit the device.

The seed and the step number alone determine a step: its sequences and its positions. So a run that was killed continues
from its last saved state with the same result, and a candidate is the same whatever others are trained with it.

On CUDA a step is a graph, one for each shape of a batch: it launches thousands of small kernels, and the launches would
take longer than the kernels.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.train.candidates import Candidate, CandidateSpec, candidates_of, layers_of, make_candidate
from tide_core.calibration.train.kept_states import KeptStates, tokens_that_fit
from tide_core.calibration.train.learner import DISTANCE_DECAY, EMA_DECAY, Learner, Losses
from tide_core.calibration.train.process_group import SINGLE_PROCESS, ProcessGroup
from tide_core.calibration.train.teacher import States, Teacher, fast_matmul, fused_norms
from tide_core.disk import write_whole
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter

STATE_NAME = "training.safetensors"
REPORT_EVERY = 50
ROWS_PER_STEP = 4096
"""Maximum number of positions in the loss of one step."""
SAVE_EVERY = 500
"""Steps between two saved states."""
SAVE_SECONDS = 60.0
"""Maximum time between two saved states."""
SAVE_SHARE = 0.05
"""Saving takes at most this share of the time: a state that takes long to write is saved less often."""
SAVE_BYTES_PER_S = 200e6
"""Expected of the first save."""
KEPT_FROM = 12
"""Steps after which states are kept: the first ones show how much memory a step needs."""
CLOCK_EVERY = 10
"""Steps between two looks at the clock where there is a limit on the time."""
LENGTH_STEP = 32
ROW_STEP = 4
"""For graphs, batches are padded to multiples of these, so that there are few shapes; padding costs as text does."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens [B, S], rows of the loss [N] in the flattened batch, and their weights [N]: 1, or 0 for padding."""


def fit(
    config: CalibrationConfig,
    adapter: ModelAdapter,
    shards: TokenShards,
    shortlist: Tensor,
    *,
    progress: Progress | None = None,
    resume_dir: Path | None = None,
    on_saved: Callable[[], None] = lambda: None,
    group: ProcessGroup = SINGLE_PROCESS,
    specs: Sequence[CandidateSpec] = (),
    seconds: float | None = None,
) -> Fitted:
    """Train the candidates `specs`, or those of the configuration; with a `resume_dir`, from the last saved state.

    With a limit of `seconds`, the time of earlier starts included, the learning rate falls by the clock as well, and
    training ends when the time is spent. The last state stays in `resume_dir` after the end; the caller removes it. In
    a `group` every process passes the same arguments and gets the same candidates; rank 0 saves states, calls
    `on_saved` after each and watches the clock."""
    if not shards.num_sequences:
        raise ConfigError("train sequences", 0, "at least one")
    progress = progress or SilentProgress()
    specs = specs or candidates_of(config, adapter.num_layers)
    sizes = {"max_distance": config.max_drafts, "bottleneck": config.router_bottleneck, "seed": config.seed}
    learners = [Learner(make_candidate(adapter, spec, **sizes), spec, config, group) for spec in specs]
    layers = layers_of([learner.candidate for learner in learners])
    teacher = Teacher(adapter, shortlist, mixed=True)
    saved = SavedState(resume_dir, _run_digest(config, specs, shards, shortlist))
    first = done = saved.load(learners)
    clock = Clock(seconds, saved.seconds, group, adapter.device)
    steps = Steps(config, teacher, learners, layers, group, keeps=seconds is not None)

    with (
        fast_matmul(adapter.device),
        fused_norms(adapter.model, enabled=adapter.device.type == "cuda"),
        progress.stage("train", config.steps, "step", first) as stage,
    ):
        for step, batch in batches(config, shards, first, config.steps):
            if clock.is_over(step, first):
                break
            rows = loss_rows(batch, config.loss_positions, ROWS_PER_STEP, seed=(config.seed, step))
            for learner in learners:
                learner.begin(step, clock.share)
            if step == first + KEPT_FROM and (num_kept := steps.keep(shards.num_tokens)):
                progress.note(f"train: states of {num_kept} of {shards.num_tokens} tokens stay on the device")
            steps.run(batch, rows)
            for learner in learners:
                learner.end(step)
            done = step + 1
            if done % REPORT_EVERY == 0 or done == config.steps:
                losses = {learner.candidate.name: learner.report() for learner in learners}
                stage.update(1, **{name: each.head for name, each in losses.items()})
                saved.curve.append(CurvePoint.of(done, clock.seconds, losses))
            else:
                stage.update(1)
            if group.rank == 0 and (done == config.steps or saved.is_due(done)):
                saved.save(learners, done, clock.seconds)
                on_saved()
        if done > first and done % REPORT_EVERY and done < config.steps:  # the time is over
            losses = {learner.candidate.name: learner.report() for learner in learners}
            saved.curve.append(CurvePoint.of(done, clock.seconds, losses))
        if done > saved.step and group.rank == 0:
            saved.save(learners, done, clock.seconds)
            on_saved()
    return Fitted([learner.finish() for learner in learners], done, saved.curve)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The trained candidates and the steps they were trained for."""

    candidates: list[Candidate]
    steps: int
    curve: Sequence[CurvePoint] = ()


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """How far training had come."""

    steps: int
    seconds: float
    """Of training, that of earlier starts included."""
    tokens_per_pass: Mapping[str, float]
    """By candidate, over the last steps before."""

    @classmethod
    def of(cls, steps: int, seconds: float, losses: Mapping[str, Losses]) -> CurvePoint:
        return cls(steps, seconds, {name: tokens_per_pass(each.agreement) for name, each in losses.items()})


def tokens_per_pass(agreement: Sequence[float]) -> float:
    """Tokens of a deep pass with a draft at every distance, each right as often as it agrees."""
    return 1.0 + math.fsum(accumulate(agreement, operator.mul))


class Clock:
    """The time that training may take and has taken. In a group all processes read that of rank 0."""

    def __init__(self, limit: float | None, before: float, group: ProcessGroup, device: torch.device) -> None:
        self._limit, self._before, self._group, self._device = limit, before, group, device
        self._started = time.monotonic()
        self.share = 0.0
        """Of the limit, when it was last looked at."""

    @property
    def seconds(self) -> float:
        """Of training, that of earlier starts included."""
        return self._before + time.monotonic() - self._started

    def is_over(self, step: int, first: int) -> bool:
        """Whether training ends before this step; `first` is the first one of this start. Looked at now and then, since
        the device must catch up first; at least `CLOCK_EVERY` steps are done in all."""
        if self._limit is None or (step % CLOCK_EVERY and step != first):
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        shared = torch.zeros((), device=self._device)
        if self._group.rank == 0:
            shared.fill_(self.seconds / self._limit)
        self._group.all_reduce([shared])
        self.share = min(1.0, float(shared))
        return step > 0 and self.share >= 1.0


class Steps:
    """Training steps of all learners on one batch after another.

    With `keeps` the states of sequences stay on the device as far as there is room. States of a sequence differ in
    their last bits from batch to batch, so this is for trainings that a clock ends, which are never quite the same."""

    def __init__(
        self,
        config: CalibrationConfig,
        teacher: Teacher,
        learners: Sequence[Learner],
        layers: Sequence[int],
        group: ProcessGroup,
        *,
        keeps: bool,
    ) -> None:
        self._teacher, self._learners, self._layers, self._group = teacher, learners, layers, group
        self._distances = tuple(range(1, config.max_drafts + 1))
        self._device = teacher.adapter.device
        alone = group.size == 1
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._kept = KeptStates(teacher, layers, config.batch_tokens) if keeps and alone else None
        in_graphs = alone and self._device.type == "cuda" and teacher.is_plain
        what = self._learn_from if self._kept is not None else self._run
        self._graphs = StepGraphs(what, self._device) if in_graphs else None

    def keep(self, num_tokens: int) -> int:
        """Keep states from now on, of so many tokens if there is room for them. Returns of how many."""
        if self._kept is None:
            return 0
        num_kept = tokens_that_fit(self._kept, self._device, num_tokens)
        self._kept.keep(num_kept)
        return num_kept

    def run(self, batch: SequenceBatch, rows: Tensor) -> None:
        padded = self._graphs is not None
        tokens, chosen, weight = _padded(batch, rows, ROWS_PER_STEP) if padded else _share(batch, rows, self._group)
        if self._kept is None:
            self._call(self._graphs or self._run, tokens, chosen, weight)
        elif self._kept.supports(tokens):
            self._call(self._graphs or self._learn_from, chosen, weight, *self._kept.states(batch, tokens))
        else:
            self._call(self._run, tokens, chosen, weight)

    def _call(self, step: Callable[..., None], *given: Tensor) -> None:
        step(*(tensor if step is self._graphs else _move(tensor, self._device) for tensor in given))

    def _run(self, tokens: Tensor, rows: Tensor, weight: Tensor) -> None:
        self._learn(self._teacher.run(tokens, self._layers), rows, weight)

    def _learn_from(self, rows: Tensor, weight: Tensor, *seen: Tensor) -> None:
        assert self._kept is not None
        self._learn(self._kept.complete(seen), rows, weight)

    def _learn(self, states: States, rows: Tensor, weight: Tensor) -> None:
        targets = self._teacher.targets(states, rows, weight=weight)
        self._group.all_reduce([targets.mass_sum, targets.weight_sum])
        for learner in self._learners:
            learner.learn(self._teacher, states, targets, self._distances)


class StepGraphs:
    """Training steps as CUDA graphs by the shapes of their inputs. The first batch of a shape runs without a graph, the
    second is captured, all later ones are replays. Inputs on the device are read where they are, which is the same
    place for all of a shape.

    A step must not wait for the device, and must not allocate anything that outlives it."""

    def __init__(self, run_step: Callable[..., None], device: torch.device) -> None:
        self._run_step = run_step
        self._device = device
        self._seen: set[tuple[torch.Size, ...]] = set()
        self._graphs: dict[tuple[torch.Size, ...], tuple[Any, tuple[Tensor, ...]]] = {}

    def __call__(self, *inputs: Tensor) -> None:
        """Run a step on inputs that are on the CPU or on the device."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._seen:
            self._seen.add(shapes)
            self._run_step(*(tensor.to(self._device) for tensor in inputs))
            return
        if shapes not in self._graphs:
            self._graphs[shapes] = self._capture(inputs)
        graph, buffers = self._graphs[shapes]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            if buffer.data_ptr() != tensor.data_ptr():
                buffer.copy_(tensor, non_blocking=True)
        graph.replay()

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        buffers = tuple(tensor.to(self._device) for tensor in inputs)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._run_step(*buffers)
        return graph, buffers


def loss_rows(batch: SequenceBatch, per_sequence: int, in_all: int, *, seed: tuple[int, int]) -> Tensor:
    """The rows of the flattened batch in the loss: at most `per_sequence` of a sequence and `in_all` together, each of
    which predicts a token of a continuation."""
    generator = torch.Generator().manual_seed(_mixed(*seed))
    num_rows, length = batch.tokens.shape
    positions = torch.arange(length)
    wanted = (positions < batch.lengths[:, None] - 1) & (positions >= batch.prompt_lens[:, None] - 1)
    _, draw = torch.rand(
        (2, num_rows, length), generator=generator
    )  # the first half is unused: artefacts stay the same
    order = draw.masked_fill(~wanted, 2.0)  # rows that are not wanted come last
    chosen = torch.zeros_like(wanted).scatter_(1, order.topk(min(per_sequence, length), largest=False).indices, True)
    rows = (chosen & wanted).flatten().nonzero().squeeze(-1)
    if len(rows) <= in_all:
        return rows
    return rows[torch.randperm(len(rows), generator=generator)[:in_all]].sort().values


def _share(batch: SequenceBatch, rows: Tensor, group: ProcessGroup) -> Batch:
    """The share of one process: the sequences whose number modulo the group size is its rank."""
    length = batch.tokens.shape[1]
    sequence, position = rows // length, rows % length
    mine = sequence % group.size == group.rank
    tokens = batch.tokens[group.rank :: group.size]
    if not len(tokens) or not mine.any():  # no share: one row of weight 0
        return batch.tokens[:1], torch.zeros(1, dtype=torch.long), torch.zeros(1)
    own = sequence[mine] // group.size * length + position[mine]
    return tokens, own, torch.ones(len(own))


def _padded(batch: SequenceBatch, rows: Tensor, num: int) -> Batch:
    """Padded to one of few shapes."""
    num_rows, length = (
        -(-size // step) * step for size, step in zip(batch.tokens.shape, (ROW_STEP, LENGTH_STEP), strict=True)
    )
    tokens = torch.zeros(num_rows, length, dtype=torch.long)
    tokens[: len(batch.tokens), : batch.tokens.shape[1]] = batch.tokens
    where = rows // batch.tokens.shape[1] * length + rows % batch.tokens.shape[1]
    filled, weight = torch.zeros(num, dtype=torch.long), torch.zeros(num)
    filled[: len(rows)] = where
    weight[: len(rows)] = 1.0
    return tokens.pin_memory(), filled.pin_memory(), weight.pin_memory()


class SavedState:
    """The state of a training on disk: one file, replaced atomically."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self._path = None if folder is None else folder / STATE_NAME
        self._run = run
        self._saved_at = time.monotonic()
        self._cost: float | None = None
        """Seconds that a save takes; None before the first."""
        self._num_bytes = 0
        self.step = 0
        """Steps in the last saved state."""
        self.seconds = 0.0
        """Time of training in the state that was loaded."""
        self.curve: list[CurvePoint] = []
        """Of all starts."""

    def load(self, learners: Sequence[Learner]) -> int:
        """Restore the learners; returns the first step that is not done."""
        weights = (tensor for learner in learners for tensor in learner.tensors().values())
        self._num_bytes = sum(tensor.nbytes for tensor in weights)
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
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])
        self.curve = [CurvePoint(**point) for point in json.loads(metadata.get("curve", "[]"))]
        return self.step

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved, by steps, by time and by what saving costs."""
        since = time.monotonic() - self._saved_at
        cost = self._num_bytes / SAVE_BYTES_PER_S if self._cost is None else self._cost
        return (step % SAVE_EVERY == 0 or since > SAVE_SECONDS) and since * SAVE_SHARE >= cost

    def save(self, learners: Sequence[Learner], step: int, seconds: float) -> None:
        self.step = step
        if self._path is None:
            return
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        for index, learner in enumerate(learners):
            learner.check_finite()
            tensors |= {f"{index}.{name}": tensor.cpu().contiguous() for name, tensor in learner.tensors().items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"run": self._run, "step": str(step), "seconds": f"{seconds:.3f}"}
        metadata["curve"] = json.dumps([asdict(point) for point in self.curve])
        write_whole(self._path, save(tensors, metadata))
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - started


def batches(
    config: CalibrationConfig, shards: TokenShards, first: int, steps: int
) -> Iterator[tuple[int, SequenceBatch]]:
    """Numbered batches, one for each step from `first` to the last, epoch after epoch."""
    step = 0
    for epoch in count():
        settings = {"seed": config.seed, "epoch": epoch}
        num = shards.num_batches(config.batch_tokens, **settings)
        if step + num <= first:
            step += num
            continue
        for batch in shards.batches(config.batch_tokens, **settings):
            if step == steps:
                return
            if step >= first:
                yield step, batch
            step += 1


def _run_digest(
    config: CalibrationConfig, specs: Sequence[CandidateSpec], shards: TokenShards, shortlist: Tensor
) -> str:
    ids = hashlib.sha256(shortlist.cpu().numpy().astype("<i8").tobytes()).hexdigest()
    constants = [DISTANCE_DECAY, EMA_DECAY, ROWS_PER_STEP]
    parts = [config.digest, constants, [spec.name for spec in specs], shards.digest, ids]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _mixed(seed: int, step: int) -> int:
    """A seed for one step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


def _move(values: Tensor, device: torch.device) -> Tensor:
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)

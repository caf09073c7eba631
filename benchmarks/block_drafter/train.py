"""Training for a fixed time: a block drafter, or the present exit head with the project's own learner.

Both see the same batches and run the frozen target once for each. The learning rate follows the share of the time that
has passed, so the schedule is complete whatever a step takes. On CUDA the steps of each shape of batch are one graph.

The loss of a block weights each place by its share in the expected number of accepted drafts. Let s_j be a mix of a
constant and the drafter's probability of the right token at place j, and P_i the product of s_1 .. s_i. The weight of
place j is the sum of P_i over i >= j.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.block_drafter.data import Batch
from benchmarks.block_drafter.model import BlockDrafter, block_mask, copy_layers
from benchmarks.block_drafter.variants import TargetShape, Variant
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train.candidates import layers_of, make_candidate
from tide_core.calibration.train.learner import (
    ADAMW_RATE,
    BETAS,
    EMA_DECAY,
    MAX_GRADIENT_NORM,
    MUON_RATE,
    Learner,
    Muon,
)
from tide_core.calibration.train.teacher import States, Teacher, fast_matmul, fused_norms
from tide_core.calibration.train.train import StepGraphs, loss_rows
from tide_core.models.adapter import ModelAdapter

ALPHA = 0.5
"""Constant part of s_j, so that places after an unlikely draft have some weight, too."""
WARMUP = 0.03
"""Share of the time in which the learning rate rises."""
FINAL_RATE = 0.03
SCHEDULE_STEPS = 10_000
"""The project's learner has a schedule in steps: the share of the time is mapped to this many."""
SYNC_EVERY = 10
"""Steps between two synchronisations, at which the clock is read."""
REPORTS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one step."""

    batch_tokens: int = 8192
    blocks: int = 1024
    """Blocks of a batch in the loss."""
    rows: int = 4096
    """Positions of a batch in the loss of an exit head."""
    distances: int = 6
    """Drafts in a row for which an exit head is trained."""
    seed: int = 0


@dataclass(slots=True)
class Trained:
    steps: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    """By time: seconds, steps and the means since the entry before."""


class Trainee(Protocol):
    """A drafter that learns. `run` must not wait for the device."""

    def begin(self, done: float) -> None:
        """Set the learning rate for a share of the time."""

    def inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """The arguments of `run`, on the CPU; their shapes depend on that of the batch alone."""

    def run(self, *inputs: Tensor) -> None: ...

    def end(self, step: int) -> None: ...

    def report(self) -> dict[str, float]:
        """Means since the last report."""

    def finish(self) -> None:
        """Replace the weights by their running means."""


def train(
    trainee: Trainee,
    batches: Iterator[Batch],
    adapter: ModelAdapter,
    seconds: float,
    *,
    is_plain: bool,
    max_steps: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Train for `seconds`, or until `max_steps` if they are reached earlier; the schedule follows the closer limit."""
    on_cuda = adapter.device.type == "cuda"
    graphs: Callable[..., None] = (
        StepGraphs(trainee.run, adapter.device)
        if on_cuda and is_plain
        else lambda *inputs: trainee.run(*(tensor.to(adapter.device) for tensor in inputs))
    )
    found, began = Trained(), clock()
    with fast_matmul(adapter.device), fused_norms(adapter.model, enabled=on_cuda):
        while True:
            if found.steps % SYNC_EVERY == 0:
                if on_cuda:
                    torch.cuda.synchronize(adapter.device)
                found.seconds = clock() - began
            done = max(found.seconds / seconds, found.steps / max_steps if max_steps else 0.0)
            if done >= 1.0:
                break
            trainee.begin(done)
            inputs = trainee.inputs(next(batches), found.steps)
            graphs(*(tensor.pin_memory() if on_cuda else tensor for tensor in inputs))
            trainee.end(found.steps)
            found.steps += 1
            if done >= (len(found.curve) + 1) / REPORTS:
                found.curve.append({"seconds": clock() - began, "steps": found.steps, **trainee.report()})
    found.seconds = clock() - began
    trainee.finish()
    return found


class HeadTrainee:
    """An exit head, by the project's own learner."""

    def __init__(
        self, variant: Variant, adapter: ModelAdapter, teacher: Teacher, config: CalibrationConfig, sizes: Sizes
    ) -> None:
        self._teacher, self._sizes = teacher, sizes
        spec = variant.candidate(TargetShape.of(adapter.config))
        options = {"max_distance": sizes.distances, "bottleneck": config.router_bottleneck, "seed": sizes.seed}
        self.candidate = make_candidate(adapter, spec, **options)
        schedule = {
            "steps": SCHEDULE_STEPS,
            "warmup_steps": round(WARMUP * SCHEDULE_STEPS),
            "final_learning_rate": FINAL_RATE,
        }
        self._learner = Learner(self.candidate, spec, CalibrationConfig.from_mapping(config.to_mapping() | schedule))
        self._layers = layers_of([self.candidate])
        self.num_parameters = self.candidate.head.num_draft_parameters

    def begin(self, done: float) -> None:
        self._learner.begin(round(done * (SCHEDULE_STEPS - 1)))

    def inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        num = min(self._sizes.rows, batch.tokens.numel())
        rows = loss_rows(batch, batch.tokens.shape[1], num, seed=(self._sizes.seed, step))  # type: ignore[arg-type]
        filled, weight = torch.zeros(num, dtype=torch.long), torch.zeros(num)
        filled[: len(rows)] = rows
        weight[: len(rows)] = 1.0
        return batch.tokens, filled, weight

    def run(self, *inputs: Tensor) -> None:
        tokens, rows, weight = inputs
        states = self._teacher.run(tokens, self._layers)
        targets = self._teacher.targets(states, rows, weight=weight)
        self._learner.learn(self._teacher, states, targets, range(1, self._sizes.distances + 1))

    def end(self, step: int) -> None:
        self._learner.end(step)

    def report(self) -> dict[str, float]:
        losses = self._learner.report()
        return {"loss": losses.head, "first": losses.agreement[0]}

    def finish(self) -> None:
        self._learner.finish()


class BlockTrainee:
    """A block drafter."""

    def __init__(self, variant: Variant, adapter: ModelAdapter, teacher: Teacher, sizes: Sizes) -> None:
        self.variant, self._sizes = variant, sizes
        spec = variant.drafter(TargetShape.of(adapter.config))
        with seeded(sizes.seed, variant.name):
            self.drafter = BlockDrafter(spec)
        copy_layers(self.drafter, adapter.layers)
        self.drafter.to(adapter.device)
        self.drafting = Drafting(self.drafter, adapter, teacher)
        self._parameters: list[Tensor] = list(self.drafter.parameters())
        self._mean = [parameter.detach().clone() for parameter in self._parameters]
        usual = MUON_RATE if variant.optimiser == "muon" else ADAMW_RATE
        self._peak_rate = usual if variant.lr is None else variant.lr
        device = adapter.device
        self._rate: Tensor | float = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        self._optimisers = self._make_optimisers()
        self._sums = torch.zeros(3 + spec.places, device=device)
        """Loss, expected accepted drafts, number of steps, and the share of right tokens by place."""
        self.num_parameters = self.drafter.num_parameters

    def begin(self, done: float) -> None:
        rate = self._peak_rate * cosine(done)
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate

    def inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        per_row = max(1, self._sizes.blocks // len(batch.tokens))
        return batch.tokens, random_anchors(batch, per_row, mixed(self._sizes.seed, step)), batch.lengths

    def run(self, *inputs: Tensor) -> None:
        tokens, anchors, lengths = inputs
        device_type, places = tokens.device.type, self.drafter.spec.places
        states = self.drafting.states(tokens)
        with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda", cache_enabled=False):
            features = self.drafting.features(states, tokens, anchors)
        logits = self.drafting.teacher.exit_logits(features.flatten(0, 2))
        rows, following, valid = predicted(tokens, anchors, lengths, places)
        labels = self.drafting.index_of[following]
        known = valid & (labels >= 0)
        if self.variant.target == "text":
            losses = F.cross_entropy(logits, labels.flatten().clamp(min=0), reduction="none").view(labels.shape)
            losses = losses * known
        else:
            every = torch.arange(tokens.numel(), device=tokens.device)
            targets = self.drafting.teacher.targets(states, every)
            flat = rows.flatten()
            losses = F.cross_entropy(logits, targets.distribution.index_select(0, flat), reduction="none")
            losses = (losses * targets.mass.index_select(0, flat)).view(labels.shape) * valid
        with torch.no_grad():
            right = logits.argmax(-1).view(labels.shape) == labels
            log_chance = logits.log_softmax(-1).gather(-1, labels.flatten().clamp(min=0).unsqueeze(-1))
            chances = log_chance.view(labels.shape).exp() * known
            weights = prefix_weights(chances, valid)
        loss = (losses * weights).sum() / weights.sum().clamp(min=1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            num = valid[..., 0].sum().clamp(min=1)
            accepted = (right & valid).cumprod(-1).sum() / num
            by_place = (right & valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
            one = torch.ones((), device=tokens.device)
            self._sums += torch.cat((torch.stack((loss.detach(), accepted, one)), by_place))

    def end(self, step: int) -> None:
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self._mean, self._parameters, 1.0 - decay)

    def report(self) -> dict[str, float]:
        loss, accepted, steps, *places = self._sums.tolist()
        self._sums.zero_()
        if not math.isfinite(loss):
            raise SystemExit(f"benchmark: the loss of {self.variant.name} is not finite; lower its lr")
        steps = max(1.0, steps)
        return {"loss": loss / steps, "accepted": accepted / steps, "first": places[0] / steps}

    def finish(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._mean)
        self.drafter.requires_grad_(False)

    def _make_optimisers(self) -> list[torch.optim.Optimizer]:
        """As the project's learner has them: AdamW for all, or Muon for matrices and AdamW for the rest."""
        named = self.drafter.named_parameters()
        matrices = [p for name, p in named if self.variant.optimiser == "muon" and p.dim() == 2 and name != "masks"]
        others = [p for p in self._parameters if all(p is not matrix for matrix in matrices)]
        fused = self._parameters[0].is_cuda
        rest = torch.optim.AdamW(others, lr=self._rate, betas=BETAS, weight_decay=0.0, fused=fused, capturable=fused)
        return [rest, *([Muon(matrices, lr=self._rate)] if matrices else [])]


class Drafting:
    """A drafter over whole sequences of the frozen target: any number of blocks of each row in one pass."""

    def __init__(self, drafter: BlockDrafter, adapter: ModelAdapter, teacher: Teacher) -> None:
        self.drafter, self.adapter, self.teacher = drafter, adapter, teacher
        spec = drafter.spec
        self._layers = sorted({*spec.taps, *([spec.checkpoint] if spec.checkpoint else [])})
        self.index_of = torch.full((adapter.vocab_size,), -1, device=adapter.device)
        """[V] place in the shortlist, or -1."""
        self.index_of[teacher.shortlist] = torch.arange(len(teacher.shortlist), device=adapter.device)

    def states(self, tokens: Tensor) -> States:
        return self.teacher.run(tokens, self._layers)

    def features(self, states: States, tokens: Tensor, anchors: Tensor) -> Tensor:
        """[B, A, places, D] for blocks at anchors [B, A] of tokens [B, S]."""
        drafter, spec, length = self.drafter, self.drafter.spec, tokens.shape[1]
        context = drafter.fuse(states.normed, [states.at[tap] for tap in spec.taps])
        keys_values = drafter.keys_values(context, torch.arange(length, device=tokens.device))
        newest = self._newest(states, tokens)
        features: Tensor = drafter(
            pick(newest, anchors),
            pick(context[0], (anchors - 1).clamp(min=0)),
            anchors,
            keys_values,
            block_mask(anchors, spec.places, length),
        )
        return features

    def _newest(self, states: States, tokens: Tensor) -> Tensor:
        if self.drafter.spec.checkpoint:
            return states.at[self.drafter.spec.checkpoint]
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens))
        with torch.no_grad():
            return self.adapter.embed(tokens.flatten(), positions).view(*tokens.shape, -1)


def pick(values: Tensor, positions: Tensor) -> Tensor:
    """[B, S, D] at positions [B, A]: [B, A, D]."""
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def predicted(tokens: Tensor, anchors: Tensor, lengths: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets of the places, [B, A, places] each: the row of the flattened batch whose full-depth distribution is the
    target, the token of the text, and whether there is one."""
    num_rows, length = tokens.shape
    positions = anchors.unsqueeze(-1) + torch.arange(places, device=tokens.device)
    valid = positions + 1 < lengths[:, None, None]
    at = positions.clamp(max=length - 1)
    rows = at + torch.arange(num_rows, device=tokens.device)[:, None, None] * length
    following = tokens.flatten()[(rows + 1).clamp(max=tokens.numel() - 1)]
    return rows, following, valid


def prefix_weights(chances: Tensor, valid: Tensor) -> Tensor:
    """[..., places]: weight of each place in the loss, its share in the expected number of accepted drafts."""
    passed = ((1.0 - ALPHA) * chances + ALPHA) * valid
    products = passed.cumprod(-1)
    return products.flip(-1).cumsum(-1).flip(-1)


def random_anchors(batch: Batch, per_row: int, seed: int) -> Tensor:
    """[B, per_row] different random anchors of each row: positions of the answer that have a next token. If a row has
    fewer, the rest are the last position of the batch, which is not valid because no token follows it."""
    num_rows, length = batch.tokens.shape
    positions = torch.arange(length)
    wanted = (positions >= batch.prompt_lens[:, None].clamp(min=1)) & (positions < batch.lengths[:, None] - 1)
    draw = torch.rand((num_rows, length), generator=torch.Generator().manual_seed(seed)).masked_fill(~wanted, 2.0)
    lowest, chosen = draw.topk(min(per_row, length), largest=False)
    anchors = torch.full((num_rows, per_row), length - 1)
    anchors[:, : chosen.shape[1]] = chosen.masked_fill(lowest >= 2.0, length - 1)
    return anchors


def cosine(done: float) -> float:
    """Share of the learning rate: a short rise, then half a cosine."""
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, (done + 1e-3) / WARMUP) * (FINAL_RATE + (1.0 - FINAL_RATE) * fall)


def mixed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random numbers of the block depend on seed and name alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed ^ zlib.crc32(name.encode()))
        yield

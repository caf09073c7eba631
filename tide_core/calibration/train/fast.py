"""Training of the exits of mode fast, behind a trained draft head: heads, routers and skip maps at once.

A head learns the full-depth distribution within the shortlist from the state at its layer and the features of the exit
before it. Features of the draft head are taken at a random distance to the last deep state, as mode fast meets them. A
router learns whether its head's token is the full-depth one.

A skip map learns two things. The states behind its exit: the layers' own norms take their size away, so their
directions count. And what they are for: in a second pass over a part of the batch tokens leave where their scores say,
and those that stay must still have the full-depth distribution (`skipping.py`; only for models whose layers can be
called one by one).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import Progress
from tide_core.calibration.train.candidates import Candidate, feed_forward_width
from tide_core.calibration.train.chain import features_by_distance
from tide_core.calibration.train.learner import BETAS, EMA_DECAY, MAX_GRADIENT_NORM
from tide_core.calibration.train.process_group import SINGLE_PROCESS
from tide_core.calibration.train.skipping import SkippingPass, leaving
from tide_core.calibration.train.teacher import States, Targets, Teacher, fast_matmul, fused_norms
from tide_core.calibration.train.train import REPORT_EVERY, ROWS_PER_STEP, Clock, batches, loss_rows
from tide_core.disk import write_whole
from tide_core.errors import ConfigError, TideError
from tide_core.exits.artefact.fast import FastExits, FastModules, fast_exit, refine
from tide_core.exits.artefact.router import confidence_of
from tide_core.exits.artefact.strict_json import read
from tide_core.models.adapter import ModelAdapter

RATE = 1e-3
"""Learning rate of AdamW."""
WIDEST = 1024
"""Width of a head's SwiGLU, unless set."""
MAP_ROWS = 1024
"""Maximum number of positions of a step whose states skip maps learn: each counts once for every layer."""
KEPT_ROWS = 2048
"""Maximum number of tokens of a step that stay while others leave, and from which skip maps learn."""
SHARES = 0.1, 0.5
"""Least and largest share of an answer's tokens that are sure enough to leave at the first exit, in training."""
SKIPPING_TOKENS = 4096
"""Of a step, tokens in the pass in which some leave."""
SCORED_AT_ONCE = 4096
"""Rows of logits in memory."""


@dataclass(frozen=True, slots=True)
class MapWeights:
    """Of the two losses of the skip maps."""

    states: float = 1.0
    """Of what they predict."""
    kept: float = 1.0
    """Of what tokens that stay make of it."""


EVEN = MapWeights()


@dataclass(frozen=True, slots=True)
class TrainedFast:
    """Trained fast exits, without contracts."""

    record: FastExits
    modules: FastModules
    losses: dict[str, float]
    """Means over the last steps: by exit layer the head's agreement with full depth, and the error of the skip map; and
    of tokens that stay while others leave, how many keep the full-depth token."""


def fast_layers(config: CalibrationConfig, first: int, num_layers: int) -> tuple[int, ...]:
    """The layers of the exits behind the draft head's: as set, or at one third and two thirds of the depth."""
    layers = config.fast_layers
    if layers is None:
        layers = tuple(sorted({round(num_layers / 3), round(2 * num_layers / 3)}))
        return tuple(layer for layer in layers if first < layer < num_layers)
    if any(not first < layer < num_layers for layer in layers):
        expected = f"layers above the draft head's {first} and below the model's {num_layers}"
        raise ConfigError("fast_layers", layers, expected)
    return layers


def plan_fast(config: CalibrationConfig, adapter: ModelAdapter, draft: Candidate) -> FastExits:
    spec = draft.head.spec
    hidden = config.fast_hidden or min(feed_forward_width(adapter), WIDEST)
    exits = [
        fast_exit(layer, spec.width, hidden, config.router_bottleneck, spec.norm_eps)
        for layer in fast_layers(config, draft.layer, adapter.num_layers)
    ]
    return FastExits(tuple(exits), rank=config.fast_rank)


def fit_fast(
    config: CalibrationConfig,
    adapter: ModelAdapter,
    shards: TokenShards,
    shortlist: Tensor,
    draft: Candidate,
    *,
    progress: Progress,
    seconds: float | None = None,
    weights: MapWeights = EVEN,
) -> TrainedFast:
    """Train the fast exits behind a draft head; with a limit of `seconds`, training ends when they are spent."""
    record = plan_fast(config, adapter, draft)
    learner = FastLearner(config, adapter, shortlist, draft, record, weights)
    steps = config.num_fast_steps
    clock = Clock(seconds, 0.0, SINGLE_PROCESS, adapter.device)
    on_cuda = adapter.device.type == "cuda"
    with (
        fast_matmul(adapter.device),
        fused_norms(adapter.model, enabled=on_cuda),
        progress.stage("fast", steps, "step") as stage,
    ):
        for step, batch in batches(config, shards, 0, steps):
            if clock.is_over(step, 0):
                break
            rows = loss_rows(batch, config.loss_positions, ROWS_PER_STEP, seed=(config.seed, step))
            learner.begin(step, steps, clock.share)
            tokens, answers = batch.tokens.to(adapter.device), answers_of(batch).to(adapter.device)
            learner.learn(tokens, answers, rows.to(adapter.device))
            learner.end(step)
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
                stage.update(1, **learner.report())
            else:
                stage.update(1)
    return TrainedFast(record, learner.finish(), learner.report())


def answers_of(batch: SequenceBatch) -> Tensor:
    """[B, S]: positions that a token of an answer follows, or its end."""
    positions = torch.arange(batch.tokens.shape[1])
    return (positions >= batch.prompt_lens.unsqueeze(1) - 1) & (positions < batch.lengths.unsqueeze(1))


class FastLearner:
    """All fast exits of one model, trained together."""

    def __init__(
        self,
        config: CalibrationConfig,
        adapter: ModelAdapter,
        shortlist: Tensor,
        draft: Candidate,
        record: FastExits,
        weights: MapWeights,
    ) -> None:
        self._config, self._draft, self._weights = config, draft, weights
        self._teacher = Teacher(adapter, shortlist, mixed=True)
        self._num_layers = adapter.num_layers
        self._layers = [draft.layer, *(each.layer for each in record.exits)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.modules = FastModules.untrained(record, draft.layer, adapter.num_layers, draft.head.spec.width)
        named = self.modules.named(record, draft.layer)
        self._parameters: list[Tensor] = [
            parameter for module in named.values() for parameter in module.to(adapter.device).parameters()
        ]
        self._mean = [parameter.detach().clone() for parameter in self._parameters]
        self._optimiser = torch.optim.AdamW(
            self._parameters,
            lr=RATE,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=adapter.device.type == "cuda",
        )
        self._skipping = SkippingPass(adapter, self._layers, self.modules.maps)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._sums: dict[str, Tensor] = {}
        self._latest: dict[str, float] = {}

    def begin(self, step: int, steps: int, time_spent: float) -> None:
        """Set the learning rate of a step."""
        warm = min(1.0, (step + 1) / max(1, min(self._config.warmup_steps, steps // 4)))
        done = max(step / max(1, steps - 1), time_spent)
        for group in self._optimiser.param_groups:
            group["lr"] = RATE * warm * (1.0 - (1.0 - self._config.final_learning_rate) * done)

    def learn(self, tokens: Tensor, answers: Tensor, rows: Tensor) -> None:
        """One step on tokens [B, S], where answers go on [B, S], and positions [N] of the flattened batch."""
        behind = range(self._layers[0], self._num_layers)
        states = self._teacher.run(tokens, sorted({*behind, *self._draft.head.spec.taps}))
        targets = self._teacher.targets(states, rows)
        before = self._draft_features(states, rows)
        mapped = self._likely_to_leave(before)
        truth = torch.stack([states.at[layer].flatten(0, 1)[rows[mapped]].float() for layer in behind], dim=1)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            total = self._map_loss(0, truth, before[mapped])
            for index, (head, layer) in enumerate(zip(self.modules.heads, self._layers[1:], strict=True), 1):
                before = refine(head, states.at[layer].flatten(0, 1)[rows].float(), before).float()
                total = total + self._exit_loss(index, before, targets)
                total = total + self._map_loss(index, truth[:, layer - behind[0] :], before.detach()[mapped])
            if self._teacher.is_plain and self._weights.kept:
                total = total + self._weights.kept * self._skipping_loss(tokens, answers, states)
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        self._optimiser.step()

    def _likely_to_leave(self, features: Tensor) -> Tensor:
        """At most MAP_ROWS positions, by chance, with a weight of their squared score at the first exit."""
        with torch.no_grad():
            weights = self._scores(0, features).square().clamp(min=1e-4).cpu()
        num = min(MAP_ROWS, len(weights))
        return torch.multinomial(weights, num, generator=self._generator).to(features.device)

    def _draft_features(self, states: States, rows: Tensor) -> Tensor:
        """Features of the draft head [N, D], each at a random distance to the last deep state."""
        head, distances = self._draft.head, range(1, self._config.max_drafts + 1)
        with torch.no_grad(), torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
            every = features_by_distance(
                head, states.at[self._draft.layer], states.fed_to(head), tuple(distances), rows=rows
            )
        pick = torch.randint(len(distances), (len(rows),), generator=self._generator).to(rows.device)
        stacked = torch.stack([every[distance] for distance in distances]).float()
        return stacked[pick, torch.arange(len(rows), device=rows.device)]

    def _exit_loss(self, index: int, features: Tensor, targets: Targets) -> Tensor:
        logits = self._teacher.exit_logits(features)
        divergence = F.cross_entropy(logits, targets.distribution, reduction="none")
        head_loss = (divergence * targets.mass).sum() / targets.mass_sum.clamp(min=1.0)
        seen = logits.detach()
        agree = (self._teacher.shortlist[seen.argmax(-1)] == targets.top).float()
        score = self.modules.routers[index - 1](features.detach(), confidence_of(seen))
        layer = self._layers[index]
        self._add(f"agreement_{layer}", agree.mean())
        return head_loss + F.binary_cross_entropy_with_logits(score.float(), agree)

    def _map_loss(self, index: int, truth: Tensor, features: Tensor) -> Tensor:
        """The mean error of what the skip map of an exit predicts from features [N, D], in units of the state, against
        what the layers behind it have seen [N, layers, D], its own layer first."""
        skip_map, states = self.modules.maps[index], truth[:, 0]
        moves = skip_map.moves(skip_map.code(states, features)).float()
        error = (_unit(skip_map.all_states(states, moves)) - _unit(truth)).square().mean()
        self._add(f"map_{self._layers[index]}", error.detach())
        return self._weights.states * error

    def _skipping_loss(self, tokens: Tensor, answers: Tensor, states: States) -> Tensor:
        """How far tokens that stay are from their full-depth distribution where others have left."""
        num = max(1, SKIPPING_TOKENS // tokens.shape[1])
        tokens, answer = tokens[:num], answers[:num]
        head, distances = self._draft.head, tuple(range(1, self._config.max_drafts + 1))
        some = States({layer: each[:num] for layer, each in states.at.items()}, states.last[:num], states.normed[:num])
        with torch.no_grad():
            every = features_by_distance(head, some.at[self._layers[0]], some.fed_to(head), distances)
            scores = torch.stack([self._scores(0, every[1])])
            before = every[1]
            for index, layer in enumerate(self._layers[1:], 1):
                before = refine(self.modules.heads[index - 1], some.at[layer].flatten(0, 1).float(), before.float())
                scores = torch.cat((scores, self._scores(index, before).unsqueeze(0)))
            draws = torch.rand(2, generator=self._generator)
            offset = int(draws[1] * (len(distances) + 1))
            scores = scores.view(len(scores), *tokens.shape)
            share = SHARES[0] + float(draws[0]) * (SHARES[1] - SHARES[0])
            threshold = float(scores[0][answer].quantile(1.0 - share))
            left = leaving(scores, threshold, answer, len(distances), offset)
            stacked = torch.stack([every[distance] for distance in distances]).float()
            nearest = left.distances.clamp(1, len(distances)).flatten() - 1
            features = [stacked[nearest, torch.arange(stacked.shape[1], device=stacked.device)]]
            for index, layer in enumerate(self._layers[1:], 1):
                at_exit = some.at[layer].flatten(0, 1).float()
                features.append(refine(self.modules.heads[index - 1], at_exit, features[-1]).float())
            stayed = ((left.exits < 0) & answer & ((left.exits >= 0).cumsum(-1) > 0)).flatten().nonzero().squeeze(-1)
            stayed = stayed[torch.randperm(len(stayed), generator=self._generator)[:KEPT_ROWS].to(stayed.device)]
        if not len(stayed):
            return torch.zeros((), device=tokens.device)
        after = self._skipping.run(tokens, left.exits, features)[stayed]
        targets = self._teacher.targets(some, stayed)
        logits = self._teacher.exit_logits(after)
        divergence = F.cross_entropy(logits, targets.distribution, reduction="none")
        entropy = -(targets.distribution * targets.distribution.clamp(min=1e-9).log()).sum(-1)
        self._add("left", (left.exits >= 0)[answer].float().mean())
        self._add("kept", (self._teacher.shortlist[logits.detach().argmax(-1)] == targets.top).float().mean())
        return ((divergence - entropy) * targets.mass).sum() / targets.mass_sum.clamp(min=1.0)

    def _scores(self, index: int, features: Tensor) -> Tensor:
        """Scores [N] of an exit from its features [N, D]."""
        router = self._draft.router if index == 0 else self.modules.routers[index - 1]
        parts = features.float().split(SCORED_AT_ONCE)  # type: ignore[no-untyped-call]
        return torch.cat([router.score(part, confidence_of(self._teacher.exit_logits(part))) for part in parts])

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, torch.zeros(2, device=value.device)) + torch.stack(
            (value.float(), torch.ones_like(value, dtype=torch.float32))
        )

    def end(self, step: int) -> None:
        """Add the step to the running mean of the weights."""
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self._mean, self._parameters, 1.0 - decay)

    def report(self) -> dict[str, float]:
        """Means since the last report, or those of it; waits for the device. Raises if one is not finite."""
        if self._sums:
            self._latest = {name: float(total[0] / total[1]) for name, total in self._sums.items()}
            self._sums = {}
        for name, value in self._latest.items():
            if value != value:
                raise TideError(f"training of the fast exits: {name} is not a number; nothing of it is usable")
        return self._latest

    @torch.no_grad()
    def finish(self) -> FastModules:
        """With their final weights, the running means, as an artefact stores them: the matrices of heads and maps are
        rounded to bfloat16 first, because some kernels read them in that width."""
        torch._foreach_copy_(self._parameters, self._mean)
        for group in (self.modules.heads, self.modules.maps, self.modules.routers):
            for module in group:
                for parameter in module.parameters():
                    narrow = group is not self.modules.routers and parameter.dim() == 2
                    parameter.copy_((parameter.bfloat16() if narrow else parameter).half().float())
                module.requires_grad_(False).eval()
        return self.modules


def _unit(states: Tensor) -> Tensor:
    return F.rms_norm(states, states.shape[-1:])


def save_fast(path: Path, trained: TrainedFast, first_layer: int) -> None:
    """One safetensors file, written atomically."""
    named = trained.modules.named(trained.record, first_layer)
    tensors = {
        f"{prefix}.{name}": value.detach().cpu().contiguous()
        for prefix, module in named.items()
        for name, value in module.state_dict().items()
    }
    about = {"record": asdict(trained.record), "losses": trained.losses}
    write_whole(path, save(tensors, {"fast": json.dumps(about)}))


def load_fast(path: Path, first_layer: int, num_layers: int, width: int) -> TrainedFast:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {})["fast"])
            record = read(FastExits, about["record"], "fast")
            modules = FastModules.untrained(record, first_layer, num_layers, width)
            for prefix, module in modules.named(record, first_layer).items():
                module.load_state_dict({name: file.get_tensor(f"{prefix}.{name}") for name in module.state_dict()})
                module.requires_grad_(False).eval()
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"fast exits {path}", f"{type(error).__name__}: {error}", "a file of fast exits") from error
    return TrainedFast(record, modules, about["losses"])

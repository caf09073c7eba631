"""Training of one candidate, independent of all others: loss, optimisers (AdamW and Muon), running mean of the weights.

The head learns the full-depth distribution within the shortlist at every distance. The router learns, from detached
features and logits, whether the head's best token is the full-depth token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train.candidates import Candidate, CandidateSpec
from tide_core.calibration.train.chain import features_by_distance
from tide_core.calibration.train.process_group import SINGLE_PROCESS, ProcessGroup
from tide_core.calibration.train.teacher import States, Targets, Teacher
from tide_core.errors import TideError
from tide_core.exits.artefact.router import confidence_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.95
ADAMW_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made orthogonal, after Keller Jordan, scaled to the size of AdamW's updates.

    For matrices only. Torch's own Muon computes in bfloat16 everywhere, which is about a hundred times slower on
    processors without it."""

    def __init__(self, matrices: Iterable[Tensor], lr: float | Tensor) -> None:
        super().__init__(list(matrices), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrices in _by_shape(matrix for matrix in group["params"] if matrix.grad is not None):
                directions = []
                for matrix in matrices:
                    assert matrix.grad is not None
                    mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                    mean.lerp_(matrix.grad, 1.0 - MOMENTUM)
                    nesterov = matrix.grad.lerp(mean, MOMENTUM)
                    directions.append(nesterov.mT if _is_tall(matrix) else nesterov)
                scale = ADAMW_RMS * max(matrices[0].shape) ** 0.5
                for matrix, update in zip(matrices, orthogonal(torch.stack(directions)), strict=True):
                    # The rate may be a tensor.
                    matrix.sub_((update.mT if _is_tall(matrix) else update) * (group["lr"] * scale))


def _by_shape(matrices: Iterable[Tensor]) -> list[list[Tensor]]:
    """Matrices whose products can be one batch: those of one shape, turned or not."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        groups.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    return list(groups.values())


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximately the orthogonal factors of matrices [..., M, N]: singular values are between about 0.7 and 1.2."""
    tall = _is_tall(matrix)
    wide = (matrix.mT if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, second, third = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = first * wide + (second * gram + third * gram @ gram) @ wide
    flat: Tensor = wide.mT if tall else wide
    return flat.to(matrix.dtype)


BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
MUON_RATE = 4e-3
ADAMW_RATE = 1e-3
"""Default learning rates of the two optimisers."""
PLAIN_RATE = 2.0
"""Factor on the AdamW rate for heads without attention."""
DISTANCE_DECAY = 0.8
"""Weight of a distance relative to the one before it: a far draft counts only after right ones."""
EMA_DECAY = 0.99
"""Of the running mean of the weights, which is the final result."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over the steps since the last report."""

    head: float
    router: float
    agreement: tuple[float, ...]
    """By distance, from 1: share of the positions at which the exit's token was the full-depth one."""


class Learner:
    def __init__(
        self,
        candidate: Candidate,
        spec: CandidateSpec,
        config: CalibrationConfig,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.candidate = candidate
        self._config, self._group = config, group
        self._module = nn.ModuleDict({"head": candidate.head, "router": candidate.router})
        self._parameters: list[Tensor] = list(self._module.parameters())
        self._mean = [parameter.detach().clone() for parameter in self._parameters]
        usual = MUON_RATE if spec.muon else ADAMW_RATE * (1.0 if candidate.kind == "block" else PLAIN_RATE)
        self._rate: float = next(rate for rate in (spec.lr, config.learning_rate, usual) if rate is not None)
        device = self._parameters[0].device
        self._rate_now: Tensor | float = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        num_distances = max(1, candidate.head.spec.max_distance)
        self._latest = torch.zeros(2 + num_distances, device=device)
        self._optimisers = self._make_optimisers(spec)
        self._sums = torch.zeros(3 + num_distances, device=device)
        """Head loss, router loss, agreement at every distance, number of steps."""
        self._broke_at = torch.full((), -1, device=device)

    def begin(self, step: int, time_spent: float = 0.0) -> None:
        """Set the learning rate of a step, by the steps done or by the share of the time that is spent."""
        config = self._config
        warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
        done = max(step / max(1, config.steps - 1), time_spent)
        rate = self._rate * warm * (1.0 - (1.0 - config.final_learning_rate) * done)
        if isinstance(self._rate_now, Tensor):
            self._rate_now.fill_(rate)
            return
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate

    def learn(self, teacher: Teacher, states: States, targets: Targets, distances: Sequence[int]) -> None:
        """One step on one batch, without waiting for the device."""
        head, device = self.candidate.head, states.last.device
        if not head.spec.deep:
            distances = (1,)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            deep = states.fed_to(head)
            at_checkpoint = states.at[self.candidate.layer]
            features = features_by_distance(head, at_checkpoint, deep, distances, rows=targets.rows)
        weights = [DISTANCE_DECAY ** (distance - 1) for distance in distances]
        total, agreement = torch.zeros(2, device=device), []
        for distance, weight in zip(distances, weights, strict=True):
            losses = self._losses(teacher, features[distance], targets)
            total = total + losses[:2] * (weight / sum(weights))
            agreement.append(losses[2])
        (total[0] + total[1]).backward()  # type: ignore[no-untyped-call]
        latest = torch.cat((total, torch.stack(agreement))).detach()
        self._group.all_reduce([*(p.grad for p in self._parameters if p.grad is not None), latest])
        for module in (self.candidate.head, self.candidate.router):
            nn.utils.clip_grad_norm_(list(module.parameters()), MAX_GRADIENT_NORM)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._latest.copy_(latest)

    def end(self, step: int) -> None:
        """Add the step to the running mean and to the sums."""
        decay = min(EMA_DECAY, (step + 1) / (step + 10))  # short at first: early weights are far off
        with torch.no_grad():
            torch._foreach_lerp_(self._mean, self._parameters, 1.0 - decay)
        self._add_losses(step, self._latest)

    def _losses(self, teacher: Teacher, features: Tensor, targets: Targets) -> Tensor:
        """[3]: head loss, router loss and agreement, at one distance."""
        logits = teacher.exit_logits(features)
        divergence = F.cross_entropy(logits, targets.distribution, reduction="none")
        # Weighted by the shortlist's probability: a position whose token is outside it teaches little.
        head_loss = (divergence * targets.mass).sum() / targets.mass_sum.clamp(min=1.0)
        seen = logits.detach()
        agree = (teacher.shortlist[seen.argmax(-1)] == targets.top).float()
        score = self.candidate.router(features.detach(), confidence_of(seen))
        num = targets.weight_sum.clamp(min=1.0)
        wrong = F.binary_cross_entropy_with_logits(score, agree, reduction="none")
        return torch.stack((head_loss, (wrong * targets.weight).sum() / num, (agree * targets.weight).sum() / num))

    def _add_losses(self, step: int, losses: Tensor) -> None:
        self._sums[:-1] += losses
        self._sums[-1] += 1
        broken = ~losses.isfinite().all() & (self._broke_at < 0)
        self._broke_at = torch.where(broken, step, self._broke_at)

    def report(self) -> Losses:
        """The means since the last report; waits for the device. Raises if a loss was not finite."""
        self.check_finite()
        head, router, *agreement, _ = (self._sums / self._sums[-1].clamp(min=1.0)).tolist()
        self._sums.zero_()
        return Losses(head, router, tuple(agreement))

    def check_finite(self) -> None:
        """Raise if a loss was not finite; waits for the device."""
        broke_at = int(self._broke_at)
        if broke_at >= 0:
            what = f"the loss of candidate {self.candidate.name} was not finite at step {broke_at}"
            raise TideError(f"{what}: nothing of this run after step {broke_at} is usable; lower learning_rate")

    def finish(self) -> Candidate:
        """The candidate with its final weights, the running means."""
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._mean)
        self._module.requires_grad_(False)
        return self.candidate

    def tensors(self) -> dict[str, Tensor]:
        """The state that the next step and the next report depend on, by name."""
        named = {"sums": self._sums}
        named |= {f"weight.{index}": tensor.detach() for index, tensor in enumerate(self._parameters)}
        named |= {f"mean.{index}": tensor for index, tensor in enumerate(self._mean)}
        for number, optimiser in enumerate(self._optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                named |= {f"optimiser.{number}.{index}.{key}": tensor for key, tensor in state.items()}
        return named

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        if "sums" in named:  # not in states of earlier versions
            self._sums.copy_(named["sums"])
        for what, to in (("weight", self._parameters), ("mean", self._mean)):
            for index, tensor in enumerate(to):
                tensor.copy_(named[f"{what}.{index}"])
        for number, optimiser in enumerate(self._optimisers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in named.items():
                if name.startswith(f"optimiser.{number}."):
                    which, key = name.split(".")[2:]
                    state.setdefault(int(which), {})[key] = tensor
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
            for group in optimiser.param_groups:
                group["lr"] = self._rate_now  # loading copies it

    def _make_optimisers(self, spec: CandidateSpec) -> list[torch.optim.Optimizer]:
        """AdamW for all parameters, or Muon for the head's matrices and AdamW for the rest."""
        decay, fused = self._config.weight_decay, self._parameters[0].is_cuda
        matrices = [
            parameter
            for name, parameter in self.candidate.head.named_parameters()
            if spec.muon and parameter.dim() == 2 and name != "distance.weight"
        ]
        others = [parameter for parameter in self._parameters if all(parameter is not matrix for matrix in matrices)]
        optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=self._rate_now, betas=BETAS, weight_decay=decay, fused=fused, capturable=fused)
        ]
        if matrices:
            optimisers.append(Muon(matrices, lr=self._rate_now))
        return optimisers

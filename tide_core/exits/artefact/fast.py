"""The exits of mode fast: heads at deeper layers, maps for the layers that a token skips, and certified contracts.

Mode fast leaves at the first exit whose router is sure enough. The first exit is the draft head's checkpoint; each exit
behind it refines what the one before made of the same token: its head is fed with the features of that exit, in the
place where a draft head takes the deep state, and starts by passing them on. So it needs no memory of its own, and a
token may leave anywhere.

Deep layers still attend to a token that left, so they need its K and V. A skip map predicts the states that the skipped
layers would have seen, from the state h and the features z at the exit:

    c = A·[norm(h); norm(z)] + b,   c' = c + B·silu(c)            a code of rank r
    state before layer l:  g_l · h + U_l · c'

Each layer's own norm and projections then make K and V of it. U starts at zero and g at one: an untrained map is the
state at the exit, carried upward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tide_core.errors import ArtefactError
from tide_core.exits.artefact.contract import FastContract
from tide_core.exits.artefact.heads import ExitHead, HeadRMSNorm, HeadSpec
from tide_core.exits.artefact.router import Router

MAX_RANK = 4096


@dataclass(frozen=True, slots=True)
class FastExit:
    """An exit of mode fast behind the draft head's."""

    layer: int
    """Layers that have run there."""
    head: HeadSpec
    router_bottleneck: int

    def __post_init__(self) -> None:
        spec = self.head
        if spec.attends or spec.taps or spec.narrow or spec.max_distance != 1:
            expected = "a head without attention that takes the features of the exit before (max_distance 1, no taps)"
            raise ArtefactError(f"fast exit at layer {self.layer}", spec, expected)


@dataclass(frozen=True, slots=True)
class FastExits:
    """All that an artefact says of mode fast."""

    exits: tuple[FastExit, ...]
    """Behind the draft head's, by rising layer."""
    rank: int
    """Of the skip maps, one for each exit and one for the draft head's."""
    contracts: tuple[FastContract, ...] = ()
    """By rising epsilon."""

    def __post_init__(self) -> None:
        rank = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise ArtefactError("fast.rank", rank, f"an integer in 1..{MAX_RANK}")
        layers = [each.layer for each in self.exits]
        if layers != sorted(set(layers)):
            raise ArtefactError("fast.exits", layers, "rising layers, none twice")
        epsilons = [each.epsilon for each in self.contracts]
        if epsilons != sorted(set(epsilons)):
            raise ArtefactError("fast.contracts", epsilons, "rising values of epsilon, none twice")
        for contract in self.contracts:
            if len(contract.thresholds) != len(self.exits) + 1:
                expected = f"{len(self.exits) + 1} thresholds, one for each exit"
                raise ArtefactError(f"fast.contracts, epsilon {contract.epsilon:g}", contract.thresholds, expected)

    def check(self, first_layer: int, num_layers: int, width: int) -> None:
        """Against the draft head's checkpoint and the model."""
        for each in self.exits:
            if not first_layer < each.layer < num_layers:
                expected = f"above the draft head's layer {first_layer} and below the model's {num_layers}"
                raise ArtefactError("fast.exits, layer", each.layer, expected)
            if each.head.width != width:
                raise ArtefactError("fast.exits, head.width", each.head.width, f"the model's {width}")


class SkipMap(nn.Module):
    """From an exit to the states that the layers behind it would have seen."""

    def __init__(self, width: int, first_layer: int, num_layers: int, rank: int, eps: float = 1e-5) -> None:
        """For layers `first_layer`, the first that is skipped, up to `num_layers`."""
        super().__init__()
        self.first_layer = first_layer
        self.state_norm, self.feature_norm = HeadRMSNorm(width, eps), HeadRMSNorm(width, eps)
        self.down = nn.Linear(2 * width, rank)
        self.mid = nn.Linear(rank, rank, bias=False)
        self.up = nn.Linear(rank, (num_layers - first_layer) * width, bias=False)
        self.gain = nn.Parameter(torch.ones(num_layers - first_layer))
        nn.init.zeros_(self.mid.weight)
        nn.init.zeros_(self.up.weight)

    def code(self, states: Tensor, features: Tensor) -> Tensor:
        """States at the exit and features of its head [T, D] to codes [T, r]."""
        code: Tensor = self.down(torch.cat((self.state_norm(states), self.feature_norm(features)), -1))
        hidden: Tensor = self.mid(nn.functional.silu(code))
        return code + hidden

    def moves(self, code: Tensor) -> Tensor:
        """Codes [T, r] to U_l · c' of every layer, [T, layers, D]."""
        moves: Tensor = self.up(code)
        return moves.view(*code.shape[:-1], len(self.gain), -1)

    def state(self, layer: int, states: Tensor, moves: Tensor) -> Tensor:
        """What layer `layer` would have seen, [T, D], from states at the exit and what `moves` gave."""
        index = layer - self.first_layer
        return states * self.gain[index] + moves[..., index, :]

    def all_states(self, states: Tensor, moves: Tensor) -> Tensor:
        """The same for every layer that is skipped, [T, layers, D]."""
        return states.unsqueeze(-2) * self.gain.unsqueeze(-1) + moves


@dataclass(frozen=True, slots=True)
class FastModules:
    """Heads and routers of the fast exits, and the skip map of each exit, the draft head's first."""

    heads: list[ExitHead]
    routers: list[Router]
    maps: list[SkipMap]

    @classmethod
    def untrained(cls, fast: FastExits, first_layer: int, num_layers: int, width: int) -> FastModules:
        layers = [first_layer, *(each.layer for each in fast.exits)]
        return cls(
            [_carrying(ExitHead(each.head)) for each in fast.exits],
            [Router(width, each.router_bottleneck) for each in fast.exits],
            [SkipMap(width, layer, num_layers, fast.rank) for layer in layers],
        )

    def named(self, fast: FastExits, first_layer: int) -> dict[str, nn.Module]:
        """By the first part of the names of their tensors in the artefact."""
        modules: dict[str, nn.Module] = {}
        for each, head, router in zip(fast.exits, self.heads, self.routers, strict=True):
            modules |= {f"fast.{each.layer}.head": head, f"fast.{each.layer}.router": router}
        layers = [first_layer, *(each.layer for each in fast.exits)]
        return modules | {f"fast.{layer}.skip": skip for layer, skip in zip(layers, self.maps, strict=True)}


def fast_exit(layer: int, width: int, hidden: int, bottleneck: int, eps: float) -> FastExit:
    """An exit as it is trained: a head that mixes state and features and adds a SwiGLU."""
    spec = HeadSpec("mlp", width, deep=True, max_distance=1, hidden=hidden, norm_eps=eps)
    return FastExit(layer, spec, bottleneck)


@torch.no_grad()
def _carrying(head: ExitHead) -> ExitHead:
    """A head that starts as "take the features of the exit before"."""
    head.mix.weight.zero_()
    nn.init.eye_(head.mix.weight[:, head.spec.width :])
    return head


def refine(head: ExitHead, states: Tensor, before: Tensor) -> Tensor:
    """Features [T, D] of a fast exit from states at its layer and the features of the exit before, [T, D] each."""
    distances = torch.ones(len(states), dtype=torch.long, device=states.device)
    return head.widen(head.embed(states, before, distances), states)

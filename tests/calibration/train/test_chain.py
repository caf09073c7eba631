"""Features for whole sequences at once are those that decoding computes, draft by draft."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.calibration.train.heads import WIDTH, random_head
from tide_core.calibration.train.chain import features_by_distance
from tide_core.exits.artefact.heads import ExitHead

LENGTH = 11
DRAFTS = 4


def random_states(num_rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states, deep = torch.randn((2, num_rows, LENGTH, WIDTH), generator=generator)
    return states, deep


def random_entered(num_rows: int = 2) -> Tensor:
    """Embedded tokens."""
    return torch.randn((num_rows, LENGTH, WIDTH), generator=torch.Generator().manual_seed(2))


class DecodedRow:
    """One row of an engine: a cache by position, drafts that overwrite nothing before the deep pass."""

    def __init__(self, head: ExitHead, states: Tensor, deep: Tensor, entered: Tensor) -> None:
        self.head, self.states, self.deep, self.entered = head, states, deep, entered
        self.settled: list[tuple[Tensor, Tensor]] = []
        """Write the state of positions after a deep pass: that of distance 1."""
        self.num_settled = 0

    def cycle(self, drafts: int) -> list[Tensor]:
        """Draft after the settled positions; features by draft."""
        first = self.num_settled
        cache = list(self.settled)
        if self.head.spec.in_one_pass:
            return self._in_one_pass(first, drafts, cache)
        return [self._token(first + i, first - 1, cache) for i in range(drafts)]

    def _in_one_pass(self, first: int, drafts: int, cache: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """All places with the state of the newest token; the cell then adds the drafts one after another."""
        anchor = self.states[first][None]
        places = [self._refined(anchor, first + place, first - 1, cache) for place in range(drafts)]
        advanced, features = places[0], []
        for place, refined in enumerate(places):
            if place:
                advanced = self.head.advance(refined, advanced, self.entered[first + place][None])
            features.append(self.head.widen(advanced, anchor)[0])
        return features

    def settle(self) -> None:
        """One more position has run deep."""
        self._token(self.num_settled, self.num_settled - 1, self.settled)
        self.num_settled += 1

    def _token(self, position: int, last_deep: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        here = self.states[position][None]
        return self.head.widen(self._refined(here, position, last_deep, cache), here)[0]

    def _refined(self, state: Tensor, position: int, last_deep: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.append((key[0], value[0]))
            keys, values = (torch.stack(kept, 1) for kept in zip(*cache, strict=True))  # [Hk, positions, D]
            group = query.shape[1] // keys.shape[0]
            scores = query[0, :, None] @ keys.repeat_interleave(group, 0).transpose(1, 2) * query.shape[-1] ** -0.5
            return (scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1)

        known = last_deep >= 0
        fed = self.deep[last_deep if known else 0][None]
        distance = torch.tensor([position - last_deep if known else 0])
        return self.head.refine(self.head.embed(state, fed, distance), torch.tensor([position]), attend)


@pytest.mark.parametrize(
    ("kind", "deep", "inner", "cell"),
    [
        ("block", True, 0, 0),
        ("block", False, 0, 0),
        ("block", True, 8, 0),
        ("block", False, 8, 0),
        ("block", True, 0, 10),
        ("block", True, 8, 10),
        ("mlp", True, 0, 0),
        ("affine", False, 0, 0),
        ("identity", False, 0, 0),
    ],
)
def test_every_draft_of_every_cycle_has_the_features_of_the_dense_computation(
    kind: str, deep: bool, inner: int, cell: int
) -> None:
    head = random_head(kind, deep=deep, max_distance=DRAFTS, inner=inner, cell=cell)
    states, deep_states = random_states()
    deep_states, entered = deep_states[..., : inner or WIDTH], random_entered()
    dense = features_by_distance(head, states, deep_states, range(1, DRAFTS + 1), entered)
    for row in range(len(states)):
        decoded = DecodedRow(head, states[row], deep_states[row], entered[row])
        for last_deep in range(LENGTH - 1):
            decoded.settle()
            drafts = min(DRAFTS, LENGTH - 1 - last_deep)
            for distance, features in enumerate(decoded.cycle(drafts), 1):
                got = dense[distance].view(*states.shape)[row, last_deep + distance]
                torch.testing.assert_close(got, features, rtol=1e-5, atol=1e-5)


def test_a_choice_of_distances_gives_what_all_of_them_give() -> None:
    head = random_head()
    states, deep = random_states()
    every = features_by_distance(head, states, deep, range(1, DRAFTS + 1))
    some = features_by_distance(head, states, deep, [1, 4])
    assert sorted(some) == [1, 4]
    assert all(torch.equal(some[distance], every[distance]) for distance in some)


@pytest.mark.parametrize("cell", [0, 10])
def test_gradients_reach_every_parameter_at_every_distance(cell: int) -> None:
    head = random_head(cell=cell)
    states, deep = random_states()
    for distance in (1, 3):
        features = features_by_distance(head, states, deep, [distance], random_entered())[distance]
        head.zero_grad(set_to_none=True)
        features.square().sum().backward()
        for name, parameter in head.named_parameters():
            reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            assert reached or (distance == 1 and name.startswith("cell.")), name


@pytest.mark.parametrize("cell", [0, 10])
def test_later_positions_change_nothing(cell: int) -> None:
    head = random_head(cell=cell)
    (states, deep), entered = random_states(), random_entered()
    before = features_by_distance(head, states, deep, [1, 2, 3], entered)
    states[:, 7:], deep[:, 7:], entered[:, 7:] = 100.0, -100.0, 50.0
    after = features_by_distance(head, states, deep, [1, 2, 3], entered)
    for distance, features in before.items():
        assert torch.equal(features.view_as(states)[:, :7], after[distance].view_as(states)[:, :7])


def test_sequences_shorter_than_a_chain_have_features_at_every_distance() -> None:
    states, deep = (values[:, :2] for values in random_states())
    features = features_by_distance(random_head(), states, deep, range(1, DRAFTS + 1))
    assert all(value.isfinite().all() for value in features.values())

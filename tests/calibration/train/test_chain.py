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


class DecodedRow:
    """One row of an engine: a cache by position, drafts that overwrite nothing before the deep pass."""

    def __init__(self, head: ExitHead, states: Tensor, deep: Tensor) -> None:
        self.head, self.states, self.deep = head, states, deep
        self.settled: list[tuple[Tensor, Tensor]] = []
        """Write the state of positions after a deep pass: that of distance 1."""
        self.num_settled = 0

    def cycle(self, drafts: int) -> list[Tensor]:
        """Draft after the settled positions; features by draft."""
        first = self.num_settled
        cache = list(self.settled)
        return [self._token(first + i, first - 1, cache) for i in range(drafts)]

    def settle(self) -> None:
        """One more position has run deep."""
        self._token(self.num_settled, self.num_settled - 1, self.settled)
        self.num_settled += 1

    def _token(self, position: int, last_deep: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.append((key[0], value[0]))
            keys, values = (torch.stack(kept, 1) for kept in zip(*cache, strict=True))  # [Hk, positions, D]
            group = query.shape[1] // keys.shape[0]
            scores = query[0, :, None] @ keys.repeat_interleave(group, 0).transpose(1, 2) * query.shape[-1] ** -0.5
            return (scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1)

        known = last_deep >= 0
        fed = self.deep[last_deep if known else 0][None]
        distance = torch.tensor([position - last_deep if known else 0])
        here = self.states[position][None]
        refined = self.head.refine(self.head.embed(here, fed, distance), torch.tensor([position]), attend)
        return self.head.widen(refined, here)[0]


@pytest.mark.parametrize(
    ("kind", "deep", "inner", "hidden"),
    [
        ("block", True, 0, 12),
        ("block", True, 0, 0),
        ("block", False, 0, 12),
        ("block", True, 8, 12),
        ("block", True, 8, 0),
        ("block", False, 8, 12),
        ("mlp", True, 0, 12),
        ("affine", True, 0, 0),
        ("affine", False, 0, 0),
        ("identity", False, 0, 0),
    ],
)
def test_every_draft_of_every_cycle_has_the_features_of_the_dense_computation(
    kind: str, deep: bool, inner: int, hidden: int
) -> None:
    head = random_head(kind, deep=deep, max_distance=DRAFTS, inner=inner, hidden=hidden)
    states, deep_states = random_states()
    deep_states = deep_states[..., : inner or WIDTH]
    dense = features_by_distance(head, states, deep_states, range(1, DRAFTS + 1))
    for row in range(len(states)):
        decoded = DecodedRow(head, states[row], deep_states[row])
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


@pytest.mark.parametrize("hidden", [12, 0], ids=["swiglu", "sum"])
def test_gradients_reach_every_parameter_at_every_distance(hidden: int) -> None:
    head = random_head(hidden=hidden)
    states, deep = random_states()
    for distance in (1, 3):
        features = features_by_distance(head, states, deep, [distance])[distance]
        head.zero_grad(set_to_none=True)
        features.square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def test_later_positions_change_nothing() -> None:
    head = random_head()
    states, deep = random_states()
    before = features_by_distance(head, states, deep, [1, 2, 3])
    states[:, 7:], deep[:, 7:] = 100.0, -100.0
    after = features_by_distance(head, states, deep, [1, 2, 3])
    for distance, features in before.items():
        assert torch.equal(features.view_as(states)[:, :7], after[distance].view_as(states)[:, :7])


def test_sequences_shorter_than_a_chain_have_features_at_every_distance() -> None:
    states, deep = (values[:, :2] for values in random_states())
    features = features_by_distance(random_head(), states, deep, range(1, DRAFTS + 1))
    assert all(value.isfinite().all() for value in features.values())


@pytest.mark.parametrize("hidden", [12, 0], ids=["swiglu", "sum"])
def test_features_of_some_rows_are_those_of_all_of_them(hidden: int) -> None:
    head = random_head(inner=8, hidden=hidden)
    states, deep = random_states()
    rows = torch.tensor([3, 4, 9, LENGTH + 2])
    every, some = (features_by_distance(head, states, deep[..., :8], [1, 3], rows=chosen) for chosen in (None, rows))
    assert sorted(some) == [1, 3]
    for distance, features in some.items():
        torch.testing.assert_close(features, every[distance][rows])

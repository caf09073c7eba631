"""Several processes train as one does: each on its share of every batch, gradients summed."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tests.calibration.train.test_train import BLOCK, settings, weights
from tide_core.calibration.collect.shards import TokenShards
from tide_core.calibration.train import train
from tide_core.calibration.train.candidates import Candidate
from tide_core.calibration.train.process_group import ProcessGroup, TorchProcessGroup
from tide_core.calibration.train.train import STATE_NAME, fit


class Threads:
    """A group of threads, of which one runs at a time: every one waits for all, then all take the sum."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=300)
        self._given: dict[int, list[Tensor]] = {}
        self.sums: list[list[Tensor]] = []

    def slot(self, rank: int) -> ProcessGroup:
        group = self

        class WorkerSlot:
            size = group.size

            def __init__(self) -> None:
                self.rank = rank

            def all_reduce(self, tensors: Sequence[Tensor]) -> None:
                group._given[rank] = [tensor.clone() for tensor in tensors]
                sums = group._summed()
                for tensor, total in zip(tensors, sums, strict=True):
                    tensor.copy_(total)

        return WorkerSlot()

    def _summed(self) -> list[Tensor]:
        self.turn.release()
        self._barrier.wait()
        sums = [torch.stack(each).sum(0) for each in zip(*self._given.values(), strict=True)]
        if self._barrier.wait() == 0:
            self.sums.append(sums)
        self.turn.acquire()
        return sums


def trained(shards: TokenShards, threads: Threads, *names: str, **changes: Any) -> list[list[Candidate]]:
    """The candidates of every member."""
    resume_dir = changes.pop("resume_dir", None)
    config = settings(candidates=names or (BLOCK,), **changes)
    adapters = [tiny_adapter() for _ in range(threads.size)]

    def one(rank: int) -> list[Candidate]:
        with threads.turn:
            fitted = fit(config, adapters[rank], shards, SHORTLIST, group=threads.slot(rank), resume_dir=resume_dir)
            return fitted.candidates

    with ThreadPoolExecutor(threads.size) as pool:
        return list(pool.map(one, range(threads.size)))


@pytest.mark.parametrize("name", [BLOCK, "2:affine:deep:muon:lr=0.003"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_group_has_the_gradients_and_losses_of_one_alone(tmp_path: Path, name: str, size: int) -> None:
    """Weights may part further: an optimiser that divides by a gradient's size makes much of its rounding."""
    shards, alone, group = write_sequences(tmp_path), Threads(1), Threads(size)
    trained(shards, alone, name, steps=12, learning_rate=0.003)
    slots = [candidate for [candidate] in trained(shards, group, name, steps=12, learning_rate=0.003)]
    for ours, theirs in zip(group.sums[1], alone.sums[1], strict=True):  # the second is of the first step's gradients
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert len(group.sums) == len(alone.sums) == 24
    for ours, theirs in zip(group.sums[1::2], alone.sums[1::2], strict=True):  # the last tensor: the losses
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=0.02, atol=0.02)
    for slot in slots:
        for mine, first in zip(weights(slot), weights(slots[0]), strict=True):
            assert torch.equal(mine, first), "all slots have the very same"


def test_more_members_than_sequences_in_a_batch_is_no_trouble(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path, num=3)
    alone, group = Threads(1), Threads(3)
    trained(shards, alone, "2:affine", steps=5, batch_tokens=8)
    trained(shards, group, "2:affine", steps=5, batch_tokens=8)
    for ours, theirs in zip(group.sums[1], alone.sums[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_group_goes_on_from_the_state_that_its_first_member_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, state = write_sequences(tmp_path / "shards"), tmp_path / "state"
    monkeypatch.setattr(train, "SAVE_EVERY", 4)
    monkeypatch.setattr(train, "SAVE_SHARE", math.inf)
    straight = trained(shards, Threads(2), "2:affine", steps=12)
    trained(shards, Threads(2), "2:affine", steps=12, resume_dir=state)  # leaves the state of step 8
    assert (state / STATE_NAME).exists()
    resumed = trained(shards, Threads(2), "2:affine", steps=12, resume_dir=state)
    for ours, theirs in zip(weights(resumed[0][0]), weights(straight[0][0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_processes_add_up_tensors_of_any_shape_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As second of three, the others of which have ten times and a hundred times as much."""
    calls = []

    def all_reduce(tensor: Tensor) -> None:
        calls.append(tensor.numel())
        tensor.mul_(111)

    for name, answer in (("get_rank", 1), ("get_world_size", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group = TorchProcessGroup()
    assert (group.rank, group.size) == (1, 3)
    mine = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(8.0, 12.0).view(2, 2).T]
    before = [tensor.clone() for tensor in mine]
    group.all_reduce(mine)
    assert calls == [11], "one message, however many tensors there are"
    for ours, theirs in zip(mine, before, strict=True):
        assert torch.equal(ours, theirs * 111)

"""States that stay on the device are those of the teacher, and a training learns the same from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tide_core.calibration.collect.shards import TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train import train
from tide_core.calibration.train.candidates import Candidate
from tide_core.calibration.train.kept_states import KeptStates
from tide_core.calibration.train.teacher import States, Teacher
from tide_core.calibration.train.train import _padded, fit

LAYERS = (1, 2)
BATCH_TOKENS = 64


class Counted(Teacher):
    """Counts the sequences that run through the model."""

    num_run = 0

    def run(self, tokens: Tensor, layers: Sequence[int]) -> States:
        self.num_run += len(tokens)
        return super().run(tokens, layers)


def kept_states(num_tokens: int) -> tuple[KeptStates, Counted]:
    teacher = Counted(tiny_adapter(), SHORTLIST)
    kept = KeptStates(teacher, LAYERS, BATCH_TOKENS)
    kept.keep(num_tokens)
    return kept, teacher


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_states_of_every_epoch_are_those_of_the_teacher_and_kept_sequences_run_once(
    tmp_path: Path, share: float
) -> None:
    shards = write_sequences(tmp_path)
    kept, teacher = kept_states(int(share * shards.num_tokens))
    plain, num_batches = Teacher(tiny_adapter(), SHORTLIST), 0
    for epoch in range(3):
        before = teacher.num_run
        for batch in shards.batches(BATCH_TOKENS, seed=0, epoch=epoch):
            states = kept.complete(kept.states(batch, batch.tokens))
            expected = plain.run(batch.tokens, LAYERS)
            for row, length in enumerate(batch.lengths.tolist()):
                for layer in LAYERS:
                    torch.testing.assert_close(states.at[layer][row, :length], expected.at[layer][row, :length])
                torch.testing.assert_close(states.normed[row, :length], expected.normed[row, :length])
            num_batches += 1
        again = teacher.num_run - before
        if epoch and share in (0.0, 1.0):
            assert again == (0 if share else shards.num_sequences)
        elif epoch:
            assert 0 < again < shards.num_sequences
    assert num_batches > 6
    assert (kept.num_tokens == shards.num_tokens) == (share == 1.0)


def test_states_of_a_padded_batch_lie_where_those_of_the_last_one_of_its_shape_lay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    shards = write_sequences(tmp_path)
    kept, _ = kept_states(shards.num_tokens)
    places = set()
    for batch in shards.batches(16, seed=0):  # one sequence each
        tokens, *_ = _padded(batch, torch.zeros(0, dtype=torch.long), 4)
        if kept.supports(tokens[:1]):
            seen = kept.states(batch, tokens[:1])
            places.add(tuple(each.data_ptr() for each in seen))
            assert all(each.shape[:2] == (1, 32) for each in seen)
    assert len(places) == 1


def test_a_batch_that_is_too_large_to_be_staged_is_not_taken(tmp_path: Path) -> None:
    kept, _ = kept_states(0)
    assert kept.supports(torch.zeros(3, BATCH_TOKENS // 2))
    assert not kept.supports(torch.zeros(4, BATCH_TOKENS // 2))


def trained(shards: TokenShards, batch_tokens: int = BATCH_TOKENS, seconds: float | None = None) -> Candidate:
    config = CalibrationConfig(
        candidates=("2:block:deep:hidden=0:ffn=24",),
        steps=16,
        batch_tokens=batch_tokens,
        max_drafts=3,
        router_bottleneck=8,
        warmup_steps=2,
    )
    return fit(config, tiny_adapter(), shards, SHORTLIST, seconds=seconds).candidates[0]


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("batch_tokens", [BATCH_TOKENS, 8])
def test_a_training_from_kept_states_is_one_in_which_the_teacher_always_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, batch_tokens: int
) -> None:
    shards, room = write_sequences(tmp_path), []

    def tokens_that_fit(kept: KeptStates, device: Any, num_tokens: int) -> int:
        room.append(int(share * num_tokens))
        return room[-1]

    monkeypatch.setattr(train, "tokens_that_fit", tokens_that_fit)
    monkeypatch.setattr(train, "KEPT_FROM", 2)
    plain, from_kept = trained(shards, batch_tokens), trained(shards, batch_tokens, seconds=1e9)
    assert room == [int(share * shards.num_tokens)], "only a training with a limit on its time keeps states"
    for part in ("head", "router"):
        ours, theirs = (getattr(each, part).state_dict() for each in (from_kept, plain))
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5, msg=f"{part} {name}")

"""Training is one pass of the frozen model per batch, repeatable, resumable, and independent of other candidates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.calibration.train.heads import SHORTLIST, tiny_adapter, write_sequences
from tide_core.calibration.collect.shards import SequenceBatch, TokenShards
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.risk.trace import trace_candidates
from tide_core.calibration.risk.traces import agreement
from tide_core.calibration.train import train
from tide_core.calibration.train.candidates import Candidate
from tide_core.calibration.train.learner import Learner
from tide_core.calibration.train.train import Fitted, _padded, fit, loss_rows, tokens_per_pass
from tide_core.errors import ConfigError, TideError
from tide_core.exits.artefact.router import CONFIDENCE_SIZE

BLOCK = "2:block:deep:hidden=16:ffn=24"


def settings(**changes: Any) -> CalibrationConfig:
    small = {"steps": 6, "batch_tokens": 64, "max_drafts": 3, "router_bottleneck": 8, "warmup_steps": 2}
    return CalibrationConfig(**{**small, **changes})


def fitted(shards: TokenShards, *names: str, **changes: Any) -> list[Candidate]:
    return whole_fit(shards, *names, **changes).candidates


def whole_fit(shards: TokenShards, *names: str, **changes: Any) -> Fitted:
    resume_dir = changes.pop("resume_dir", None)
    config = settings(candidates=names or (BLOCK,), **changes)
    return fit(config, tiny_adapter(), shards, SHORTLIST, resume_dir=resume_dir)


def shown(fitted: Fitted) -> list[tuple[int, dict[str, float]]]:
    """The curve of a training without its times."""
    return [(point.steps, dict(point.tokens_per_pass)) for point in fitted.curve]


def weights(candidate: Candidate) -> list[torch.Tensor]:
    return [*candidate.head.parameters(), *candidate.router.parameters()]


def same(left: Candidate, right: Candidate) -> bool:
    pairs = zip(weights(left), weights(right), strict=True)
    return left.name == right.name and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "name", [BLOCK, f"{BLOCK}:inner=24", "2:affine:deep:muon:lr=0.003", "2:affine", "2:mlp:deep:hidden=16"]
)
def test_a_trained_head_agrees_more_often_than_an_untrained_one(tmp_path: Path, name: str) -> None:
    shards = write_sequences(tmp_path)
    untrained, trained = (fitted(shards, name, steps=steps, learning_rate=0.003) for steps in (1, 60))
    before, after = (
        agreement(trace_candidates(tiny_adapter(), candidates, shards, SHORTLIST, 3)[0].sequences)
        for candidates in (untrained, trained)
    )
    assert all(late > early + 0.05 for early, late in zip(before, after, strict=True)), (before, after)


def test_a_router_learns_which_of_its_heads_tokens_are_right(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    [candidate] = fitted(shards, "3:affine:lr=0.02", steps=100)
    [traces] = trace_candidates(tiny_adapter(), [candidate], shards, SHORTLIST, 1)
    right, wrong = (
        torch.cat([torch.from_numpy(s.score[s.agree == agrees]) for s in traces.sequences]) for agrees in (True, False)
    )
    assert right.mean() > wrong.mean() + 0.1


def test_the_model_runs_once_a_step_and_is_left_as_it_was(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    before = {name: tensor.clone() for name, tensor in adapter.model.state_dict().items()}
    calls = []
    adapter.layers[0].register_forward_hook(lambda *_: calls.append(1))
    config = settings(candidates=(BLOCK, "1:affine", "3:identity"))
    fit(config, adapter, write_sequences(tmp_path), SHORTLIST)
    assert len(calls) == settings().steps
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.model.state_dict().items())
    assert not any(layer._forward_hooks for layer in adapter.layers[1:])


def test_a_candidate_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    names = (BLOCK, "1:affine:deep", "2:identity", "3:mlp:deep:muon:hidden=8")
    together = fitted(shards, *names)
    assert [candidate.name for candidate in together] == list(names)
    for candidate in together:
        [alone] = fitted(shards, candidate.name)
        assert same(alone, candidate)


def test_a_head_is_the_same_with_any_router(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    [narrow], [wide] = (fitted(shards, router_bottleneck=bottleneck) for bottleneck in (4, 32))
    pairs = zip(narrow.head.parameters(), wide.head.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_router_learns_from_the_heads_own_confidence(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path)
    [early], [late] = (fitted(shards, "2:identity", steps=steps) for steps in (1, 6))
    columns = [candidate.router.down.weight[:, -CONFIDENCE_SIZE:] for candidate in (early, late)]
    assert (columns[0] != columns[1]).all()


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_sequences(tmp_path / "data")
    names = (BLOCK, "2:mlp:deep:muon:hidden=8", "1:affine", "1:identity")
    monkeypatch.setattr(train, "SAVE_EVERY", 3)
    monkeypatch.setattr(train, "SAVE_SHARE", math.inf)
    monkeypatch.setattr(train, "REPORT_EVERY", 4)
    whole = whole_fit(shards, *names, steps=11)
    steps: list[int] = []
    begin = Learner.begin

    def killed(self: Learner, step: int, *spent: float) -> None:
        steps.append(step)
        if step == 7:
            raise KeyboardInterrupt
        begin(self, step, *spent)

    monkeypatch.setattr(Learner, "begin", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted(shards, *names, steps=11, resume_dir=tmp_path / "run")
    monkeypatch.setattr(Learner, "begin", lambda self, step, *spent: (steps.append(step), begin(self, step, *spent)))
    steps.clear()
    resumed = whole_fit(shards, *names, steps=11, resume_dir=tmp_path / "run")
    assert steps[0] == 6  # the last saved state is after six steps
    assert all(same(left, right) for left, right in zip(resumed.candidates, whole.candidates, strict=True))
    assert shown(resumed) == shown(whole)
    assert [steps for steps, _ in shown(whole)] == [4, 8, 11]


def test_the_curve_of_a_training_rises_with_what_its_heads_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "REPORT_EVERY", 10)
    points = shown(whole_fit(write_sequences(tmp_path), BLOCK, "2:affine", steps=60, learning_rate=0.003))
    assert [steps for steps, _ in points] == [10, 20, 30, 40, 50, 60]
    assert all(points[-1][1][name] > points[0][1][name] + 0.05 for name in (BLOCK, "2:affine"))
    assert all(1.0 <= tokens[BLOCK] <= 4.0 and tokens["2:affine"] <= 2.0 for _, tokens in points)


def test_a_draft_counts_only_if_those_before_it_are_right() -> None:
    assert tokens_per_pass((0.5, 0.4, 1.0)) == pytest.approx(1.0 + 0.5 + 0.2 + 0.2)
    assert tokens_per_pass(()) == 1.0


def test_a_training_that_was_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_sequences(tmp_path / "data")
    whole = fitted(shards, BLOCK, "1:affine", resume_dir=tmp_path / "run")
    monkeypatch.setattr(Learner, "begin", lambda self, step, *spent: pytest.fail(f"step {step} is done"))
    again = fitted(shards, BLOCK, "1:affine", resume_dir=tmp_path / "run")
    assert all(same(left, right) for left, right in zip(again, whole, strict=True))


class Seconds:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(train.time, "monotonic", clock)
    return clock


def test_training_ends_when_its_time_is_spent_and_a_later_start_does_no_more(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CLOCK_EVERY", 2)
    shards, rates = write_sequences(tmp_path / "data"), []
    begin = Learner.begin
    monkeypatch.setattr(Learner, "begin", lambda self, *args: (rates.append(args), begin(self, *args)))
    config = settings(candidates=(BLOCK,), steps=1000)
    found = [
        fit(config, tiny_adapter(), shards, SHORTLIST, resume_dir=tmp_path / "run", seconds=30.0) for _ in range(2)
    ]
    assert 2 < found[0].steps < 1000
    assert found[1].steps == found[0].steps
    assert [step for step, _ in rates] == list(range(found[0].steps))
    shares = [share for _, share in rates]
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] < 1.0, "the learning rate falls with the time"
    assert same(found[0].candidates[0], found[1].candidates[0])


def test_a_time_that_is_too_short_still_trains_a_little(tmp_path: Path) -> None:
    config = settings(candidates=(BLOCK,), steps=1000)
    found = fit(config, tiny_adapter(), write_sequences(tmp_path), SHORTLIST, seconds=1e-6)
    assert found.steps == train.CLOCK_EVERY


@pytest.mark.parametrize(("cost", "num_saves"), [(1.0, 4), (100.0, 1)])
def test_saving_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float, num_saves: int
) -> None:
    """Of 400 seconds with a step a second; a state is due every hundred steps."""
    now = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train, "SAVE_EVERY", 100)
    monkeypatch.setattr(train, "SAVE_SECONDS", 1e9)
    state, saved = train.SavedState(tmp_path, "run"), 0

    def slow(path: Path, raw: bytes) -> None:
        now[0] += cost

    monkeypatch.setattr(train, "write_whole", slow)
    state.load([])
    for step in range(1, 401):
        now[0] += 1.0
        if state.is_due(step):
            state.save([], step, now[0])
            saved += 1
    assert saved == num_saves


def test_the_first_save_of_a_large_state_waits_for_what_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    state = train.SavedState(tmp_path, "run")
    state.load([Large()])
    now[0] = 300.0
    assert not state.is_due(train.SAVE_EVERY), "twenty seconds would be more than a twentieth"
    now[0] = 401.0
    assert state.is_due(train.SAVE_EVERY)


class Large:
    """A learner with four gigabytes."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.empty(10**9, device="meta")}


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path / "data")
    fitted(shards, resume_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="another one needs another folder"):
        fitted(shards, resume_dir=tmp_path / "run", learning_rate=0.5)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    shards = write_sequences(tmp_path / "data")
    (tmp_path / train.STATE_NAME).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    with pytest.raises(ConfigError, match="whole safetensors file"):
        fitted(shards, resume_dir=tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run_naming_step_and_candidate(tmp_path: Path) -> None:
    with pytest.raises(TideError, match=r"candidate 2:affine:lr=1e\+20 was not finite at step [12]:"):
        fitted(write_sequences(tmp_path), "1:affine", "2:affine:lr=1e20")


def test_a_state_that_is_not_finite_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SAVE_EVERY", 4)
    monkeypatch.setattr(train, "SAVE_SHARE", math.inf)
    shards = write_sequences(tmp_path / "data")
    with pytest.raises(TideError, match="not finite"):
        fitted(shards, "2:affine:lr=1e20", resume_dir=tmp_path / "run")
    assert not (tmp_path / "run" / train.STATE_NAME).exists()


def test_no_train_sequences_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train sequences"):
        fitted(TokenShards(tmp_path, "train"))


def make_batch(lengths: list[int], prompt_lens: list[int]) -> SequenceBatch:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    return SequenceBatch(tokens, *map(torch.tensor, (lengths, prompt_lens, range(len(lengths)))))  # type: ignore[arg-type]


def test_the_loss_is_on_positions_that_predict_the_continuation() -> None:
    batch = make_batch([6, 4, 3], [3, 1, 3])
    assert loss_rows(batch, 99, 999, seed=(0, 0)).tolist() == [2, 3, 4, 6, 7, 8]


def test_at_most_so_many_positions_of_a_sequence_are_in_the_loss_and_others_in_the_next_step() -> None:
    batch = make_batch([50, 50, 4], [1, 40, 1])
    chosen = [loss_rows(batch, 7, 999, seed=(0, step)) for step in range(2)]
    for rows in chosen:
        assert [int(((rows >= start) & (rows < start + 50)).sum()) for start in (0, 50, 100)] == [7, 7, 3]
    assert not torch.equal(*chosen)


def test_at_most_so_many_positions_of_a_step_are_in_the_loss() -> None:
    batch = make_batch([50, 50, 4], [1, 40, 1])
    rows = loss_rows(batch, 99, 20, seed=(0, 0))
    assert len(set(rows.tolist())) == 20
    assert rows.tolist() == sorted(rows.tolist())
    assert set(rows.tolist()) <= set(loss_rows(batch, 99, 999, seed=(0, 0)).tolist())


def test_a_padded_batch_holds_the_same_tokens_at_the_same_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    batch = make_batch([50, 30, 4], [1, 4, 1])
    batch.tokens.copy_(torch.arange(150).view(3, 50))
    rows = loss_rows(batch, 9, 999, seed=(0, 0))
    tokens, filled, weight = _padded(batch, rows, 64)
    assert tokens.shape == (4, 64)
    assert weight.sum() == len(rows)
    assert torch.equal(tokens.flatten()[filled[: len(rows)]], batch.tokens.flatten()[rows])

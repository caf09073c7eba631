"""The study of block drafters on a tiny model without a GPU: masks, alignment, loss, replay, resuming."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.block_drafter import __main__ as study
from benchmarks.block_drafter.data import Batch, Batches
from benchmarks.block_drafter.evaluate import evaluate, head_right, summary, trace
from benchmarks.block_drafter.model import block_mask
from benchmarks.block_drafter.table import best_length
from benchmarks.block_drafter.train import (
    BlockTrainee,
    HeadTrainee,
    Sizes,
    predicted,
    prefix_weights,
    random_anchors,
    train,
)
from benchmarks.block_drafter.variants import TargetShape, Variant
from benchmarks.common.shapes import make_model
from benchmarks.production.session import TINY, Deadline, OutOfTime
from tide_core.calibration.collect.shards import TokenSequence
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train.teacher import Teacher
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter

PLACES = 4
SIZES = Sizes(batch_tokens=64, blocks=48, rows=64, distances=3)


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return ModelAdapter(make_model(TINY, torch.device("cpu"), torch.float32), paged=False)


@pytest.fixture(scope="module")
def teacher(adapter: ModelAdapter) -> Teacher:
    return Teacher(adapter, torch.arange(0, TINY.vocabulary, 2))


def block_trainee(adapter: ModelAdapter, teacher: Teacher, options: str = "") -> BlockTrainee:
    return BlockTrainee(Variant.parse(f"block:places={PLACES}{options}"), adapter, teacher, SIZES)


def random_text(length: int, seed: int, prompt_len: int = 3) -> TokenSequence:
    """Random ids of the shortlist, which no model can guess."""
    ids = 2 * np.random.default_rng(seed).integers(0, TINY.vocabulary // 2, length)
    return TokenSequence(ids.astype(np.int32), prompt_len)


def shake(trainee: BlockTrainee) -> None:
    """Weights that let everything reach the output."""
    torch.manual_seed(1)
    for parameter in trainee.drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)


@pytest.mark.parametrize("options", ["", ":mix:layers=2", ":seed=none", ":seed=first:checkpoint=0:width=0.5"])
def test_a_block_knows_its_newest_token_and_what_ran_deep_before_it_and_nothing_else(
    adapter: ModelAdapter, teacher: Teacher, options: str
) -> None:
    trainee = block_trainee(adapter, teacher, options)
    shake(trainee)
    tokens = torch.randint(0, TINY.vocabulary, (1, 12), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[5, 8]])

    def features(changed: int | None = None) -> torch.Tensor:
        given = tokens.clone()
        if changed is not None:
            given[0, changed] = (given[0, changed] + 1) % TINY.vocabulary
        with torch.no_grad():
            return trainee.drafting.features(trainee.drafting.states(given), given, anchors)[0]

    usual = features()
    for later in (6, 7):
        assert torch.equal(features(later)[0], usual[0])
        assert not torch.equal(features(later)[1], usual[1])
    assert torch.equal(features(9), usual)
    for known in (2, 4, 5):
        changed = (features(known)[0] != usual[0]).any(-1)
        assert changed.all(), f"token {known} reaches only places {changed.nonzero().flatten().tolist()}"


def test_the_deep_states_of_the_anchor_are_not_known(adapter: ModelAdapter, teacher: Teacher) -> None:
    trainee = block_trainee(adapter, teacher)
    shake(trainee)
    tokens, anchors = torch.arange(10).unsqueeze(0), torch.tensor([[6]])
    states = trainee.drafting.states(tokens)
    with torch.no_grad():
        usual = trainee.drafting.features(states, tokens, anchors)
        for deep in (states.normed, states.at[trainee.drafter.spec.taps[-1]]):
            deep[:, 6:] += 1.0
        assert torch.equal(trainee.drafting.features(states, tokens, anchors), usual)
        states.normed[:, 5] += 1.0
        assert not torch.equal(trainee.drafting.features(states, tokens, anchors), usual)


def test_blocks_of_one_pass_are_those_of_passes_of_their_own(adapter: ModelAdapter, teacher: Teacher) -> None:
    trainee = block_trainee(adapter, teacher, ":layers=2")
    shake(trainee)
    tokens = torch.randint(0, TINY.vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[3, 9, 6], [4, 1, 10]])
    with torch.no_grad():
        states = trainee.drafting.states(tokens)
        together = trainee.drafting.features(states, tokens, anchors)
        for place in range(3):
            alone = trainee.drafting.features(states, tokens, anchors[:, place : place + 1])
            torch.testing.assert_close(together[:, place : place + 1], alone, rtol=1e-4, atol=1e-4)


def test_a_place_reads_the_context_before_its_anchor_and_its_own_block() -> None:
    mask = block_mask(torch.tensor([[2, 0]]), 2, 3)[0, 0].int().tolist()
    assert mask == [[1, 1, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 0, 1, 1]] * 2


def test_a_drafter_that_saw_two_sequences_long_enough_drafts_them_whole(
    adapter: ModelAdapter, teacher: Teacher
) -> None:
    """Random text can only be learned by heart: places, positions and targets fit together."""
    texts = [random_text(20, seed) for seed in (0, 1)]
    trainee = block_trainee(adapter, teacher, ":layers=2:target=text:optimiser=adamw:lr=0.02")
    before = evaluate(trainee, teacher, texts, [PLACES], batch_tokens=256)
    batches = Batches(texts, 64, 0, length_step=32).epochs()
    train(trainee, batches, adapter, 600.0, is_plain=True, max_steps=130)
    after = evaluate(trainee, teacher, texts, [PLACES], batch_tokens=256)
    assert before["tokens_per_pass"][str(PLACES)] < 1.5
    assert after["tokens_per_pass"][str(PLACES)] == 16 / 4  # three cycles of five tokens and one of the last
    assert min(after["chance_by_place"]) == 1.0


def test_a_drafter_learns_the_distribution_of_the_target(adapter: ModelAdapter, teacher: Teacher) -> None:
    texts = [own_text(teacher, random_text(20, seed)) for seed in (0, 1)]
    trainee = block_trainee(adapter, teacher, ":lr=0.02")
    batches = Batches(texts, 64, 0, length_step=32).epochs()
    trained = train(trainee, batches, adapter, 600.0, is_plain=True, max_steps=24)
    assert trained.curve[-1]["loss"] < trained.curve[0]["loss"]
    assert trained.curve[-1]["accepted"] > trained.curve[0]["accepted"]


def own_text(teacher: Teacher, text: TokenSequence) -> TokenSequence:
    """The model's greedy text, restricted to the shortlist."""
    ids = text.tokens[:3].tolist()
    while len(ids) < 20:
        states = teacher.run(torch.tensor([ids]), [])
        ids.append(int(teacher.shortlist[teacher.exit_logits(states.last[0, -1:]).argmax()]))
    return TokenSequence(np.array(ids, np.int32), 3)


def test_the_exit_head_learns_the_same_text_by_the_same_loop(adapter: ModelAdapter, teacher: Teacher) -> None:
    texts = [own_text(teacher, random_text(20, seed)) for seed in (0, 1)]
    for name in ("head", "head:width=0.5"):
        trainee = HeadTrainee(Variant.parse(name), adapter, teacher, CalibrationConfig(max_drafts=3), SIZES)
        batches = Batches(texts, 64, 0, length_step=32).epochs()
        trained = train(trainee, batches, adapter, 600.0, is_plain=True, max_steps=24)
        assert trained.steps == 24
        assert trained.curve[-1]["loss"] < trained.curve[0]["loss"]
        found = evaluate(trainee, teacher, texts, [3], batch_tokens=256)
        assert found["tokens_per_pass"]["3"] > 1.0


def test_drafts_of_the_exit_head_belong_to_their_anchor(
    adapter: ModelAdapter, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = HeadTrainee(Variant.parse("head"), adapter, teacher, CalibrationConfig(max_drafts=3), SIZES)
    text = random_text(8, 0)
    wanted = {2: 5, 3: 6}  # distance 2 is right at position 5 alone, distance 3 at position 6

    def features(head: Any, states: torch.Tensor, deep: Any, distances: Any) -> dict[int, torch.Tensor]:
        return {distance: torch.full((states.shape[1], 1), float(distance)) for distance in distances}

    def logits(rows: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(rows), TINY.vocabulary // 2 + 1)
        for position, distance in enumerate(rows[:, 0].tolist()):
            is_right = wanted.get(int(distance)) == position
            following = int(text.tokens[min(position + 1, 7)]) // 2
            found[position, following if is_right else (following + 1) % (TINY.vocabulary // 2)] = 1.0
        return found

    monkeypatch.setattr("benchmarks.block_drafter.evaluate.features_by_distance", features)
    fake: Any = SimpleNamespace(shortlist=teacher.shortlist, run=teacher.run, exit_logits=logits)
    right = head_right(trainee.candidate, fake, Batches.gather([text], 8, 1), 3)
    assert right[0].nonzero().tolist() == [[1, 4], [2, 4]]  # place 1 and place 2 of the block at position 4


def test_a_replay_counts_the_cycles_of_a_walk() -> None:
    random, places, lengths = np.random.default_rng(0), 3, (2, 3)
    right = random.random((places, 30)) < 0.7
    text = random_text(30, 0, prompt_len=4)
    for place in range(places):
        right[place, 29 - place :] = False  # no text follows
    found = summary([trace(right, text)], lengths)
    for length in lengths:
        at, passes = 4, 0
        while at < 29:
            accepted = len(list(itertools.takewhile(bool, right[:length, at])))
            at += accepted + 1
            passes += 1
        assert found["tokens_per_pass"][str(length)] == pytest.approx((29 - 4) / passes)
    assert found["prefix_at_every_anchor"][0] == pytest.approx(right[0, 4:29].mean())


def test_the_weight_of_a_place_is_what_it_adds_to_the_accepted_length() -> None:
    chances, valid = torch.tensor([0.5, 0.0, 1.0, 1.0]), torch.tensor([True, True, True, False])
    passed = [0.75, 0.75 * 0.5, 0.75 * 0.5 * 1.0]
    expected = [sum(passed), sum(passed[1:]), passed[2], 0.0]
    torch.testing.assert_close(prefix_weights(chances, valid), torch.tensor(expected))


def test_anchors_are_tokens_of_answers_that_have_a_next_token() -> None:
    batch = Batch(torch.zeros(3, 10, dtype=torch.long), torch.tensor([10, 6, 0]), torch.tensor([7, 2, 0]))
    anchors = random_anchors(batch, 4, seed=0)
    assert sorted(anchors[0].tolist()) == [7, 8, 9, 9]  # filled up with the last position
    assert sorted(anchors[1].tolist())[:3] == [2, 3, 4]
    assert anchors[2].tolist() == [9, 9, 9, 9]
    assert torch.equal(anchors, random_anchors(batch, 4, seed=0))
    _, _, valid = predicted(batch.tokens, anchors, batch.lengths, 3)
    assert not valid[anchors == 9].any()
    assert valid[1][anchors[1] == 3].tolist() == [[True, True, False]]


def test_a_place_predicts_the_token_after_its_position() -> None:
    tokens = torch.arange(20).view(2, 10)
    rows, following, valid = predicted(tokens, torch.tensor([[3], [6]]), torch.tensor([10, 9]), 3)
    assert rows[:, 0].tolist() == [[3, 4, 5], [16, 17, 18]]
    assert following[:, 0].tolist() == [[4, 5, 6], [17, 18, 19]]
    assert valid[:, 0].tolist() == [[True, True, True], [True, True, False]]


def test_batches_have_few_shapes_and_every_sequence_once_an_epoch() -> None:
    texts = [random_text(length, length) for length in range(10, 60)]
    batches = Batches(texts, 128, 0, length_step=32)
    seen: list[int] = []
    shapes = set()
    for batch in batches.epochs():
        shapes.add(tuple(batch.tokens.shape))
        seen += [length for length in batch.lengths.tolist() if length]
        if len(seen) >= 50:
            break
    assert sorted(seen) == list(range(10, 60))
    assert shapes == {(4, 32), (2, 64)}


def test_the_budget_in_seconds_ends_a_training_and_its_schedule(adapter: ModelAdapter, teacher: Teacher) -> None:
    ticks = itertools.count()
    trainee = block_trainee(adapter, teacher)
    rates: list[float] = []
    begin = trainee.begin
    trainee.begin = lambda done: (rates.append(done), begin(done))[0]  # type: ignore[method-assign,func-returns-value]
    batches = Batches([random_text(20, 0)], 64, 0, length_step=32).epochs()
    found = train(trainee, batches, adapter, 4.5, is_plain=True, clock=lambda: float(next(ticks)))
    assert found.steps >= 10
    assert rates[0] < 0.5 <= rates[-1] < 1.0
    assert found.seconds >= 4.5


def test_variants_are_written_as_they_are_read_and_errors_name_them() -> None:
    for text in ("head", "head:width=0.25", "block:layers=3:places=16:mix", "block:checkpoint=0:lr=0.001"):
        assert Variant.parse(Variant.parse(text).name) == Variant.parse(text)
    shape = TargetShape(576, 1536, 30, 9, 3, 64)
    assert Variant.parse("head").candidate(shape).taps == (10, 20)
    assert Variant.parse("block:width=0.25").drafter(shape).inner == 144
    for wrong in (
        "tree",
        "block:deep",
        "block:layers",
        "head:layers=2",
        "block:width=2",
        "block:mix=1",
        "block:places=1",
    ):
        with pytest.raises(ConfigError, match=wrong):
            Variant.parse(wrong)


def test_the_best_number_of_drafts_is_by_measured_cycles() -> None:
    costs = {"full_ms": 1.0, "cycle_ms": {"block": {"2": 1.1, "8": 1.7}}}
    tokens = {"2": 2.0, "4": 2.6, "8": 2.8, "16": 9.0}
    best = best_length(tokens, costs, "block")
    assert best is not None
    assert best[0] == "4"
    assert best[1] == pytest.approx(2.0)  # a cycle of four costs what lies between
    assert best_length({"4": 2.4}, costs, "head") is None


def test_a_study_that_is_cut_off_keeps_its_variants_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "head,block:layers=2:places=4"
    options = ["--tiny", "--max-steps", "2", "--samples", "12", "--people", "2", "--variants", names]
    options += ["--state", str(tmp_path / "text"), "--out", str(tmp_path / "out.json")]
    asked: list[str] = []

    def cut_second(self: Deadline, what: str, needed_s: float = 0.0) -> None:
        asked.append(what)
        if len(asked) > 1:
            raise OutOfTime("as the test wants")

    with monkeypatch.context() as short:
        short.setattr(Deadline, "check", cut_second)
        assert study.main(options) == study.UNFINISHED
    first = json.loads((tmp_path / "out.json").read_text())
    assert list(first["variants"]) == ["head"]
    assert study.main(options) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["variants"]["head"] == first["variants"]["head"]
    assert set(report["variants"]) == set(names.split(","))
    for each in report["variants"].values():
        assert {"own", "people"} == set(each["held_out"])
        assert all(1.0 <= value <= 17.0 for value in each["held_out"]["people"]["tokens_per_pass"].values())
    assert "predicted speed-up" in capsys.readouterr().out
    assert study.main(options) == 0, "nothing is left to do"
    with pytest.raises(SystemExit, match="other max_steps"):
        study.main([*options, "--max-steps", "3"])

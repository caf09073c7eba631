"""Records become units, units become shards, shards give the shortlist."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.calibration.collect.generators import EOS, make_generator
from tests.calibration.tiny_runs import PROMPTS, tiny_calibration
from tests.factories import tiny_tokenizer
from tide_core.calibration.collect.collect import choose_shortlist, count_emitted, coverage_of, plan, sequences_of
from tide_core.calibration.collect.decoder import GREEDY, Sampling
from tide_core.calibration.collect.shards import ShardEntry, TokenSequence, TokenShards, write_shard
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import split
from tide_core.calibration.data.encode import Lengths, PromptEncoder
from tide_core.calibration.data.records import Record
from tide_core.errors import ConfigError


def lines_of(kind: str, num: int) -> list[str]:
    return [Record(kind, f"{kind} {n}: the cat sat on the mat and the dog sat on the log").line for n in range(num)]


def collected(folder: Path, model: Any, config: CalibrationConfig, lines: list[str]) -> dict[str, ShardEntry]:
    folder.mkdir(parents=True, exist_ok=True)
    generator, lengths = make_generator(model, config.generation_batch or 4), Lengths.of(config, 256)
    encoder = PromptEncoder(tiny_tokenizer(), lengths.prompt)
    return {
        unit.path: write_shard(
            folder, unit.part, unit.index, sequences_of(unit, config, encoder, generator, lengths, EOS)
        )
        for unit in plan(config, split(lines, config), generator.batch)
    }


def test_held_out_parts_are_greedy_and_train_is_mixed() -> None:
    config = tiny_calibration(num_samples=300, greedy_share=0.5, min_calibration=60, min_test=40)

    units = plan(config, split(lines_of("prompt", 300), config), 16)

    assert {unit.sampling for unit in units if unit.part != "train"} == {GREEDY}
    train = {sampled: 0 for sampled in (GREEDY, Sampling(config.temperature, config.top_p))}
    for unit in units:
        if unit.part == "train":
            train[unit.sampling] += len(unit.records)
    assert min(train.values()) > 0.35 * sum(train.values())


def test_texts_of_the_train_part_are_partly_taken_as_they_are_and_others_never() -> None:
    config = tiny_calibration(num_samples=300, text_share=0.5)

    units = plan(config, split(lines_of("text", 300), config), 16)

    taken = sum(len(unit.records) for unit in units if unit.sampling is None)
    assert 0.3 < taken / sum(len(unit.records) for unit in units if unit.part == "train") < 0.7
    assert {unit.part for unit in units if unit.sampling is None} == {"train"}


def test_a_sequence_is_a_prompt_and_the_models_answer(tmp_path: Path, model: Any) -> None:
    config = tiny_calibration()
    lines = [Record("prompt", prompt).line for prompt in PROMPTS]

    collected(tmp_path, model, config, lines)

    parts = split(lines, config)
    for part in ("calibration", "test"):
        expected = set()
        for line in parts[part]:
            [prompt] = PromptEncoder(tiny_tokenizer(), 40).prompts([Record.of_line(line)])
            [new] = make_generator(model).run([prompt], GREEDY, max_new=6, stop_ids=EOS, seed=0)
            expected.add((*prompt, *new.tolist()))
        shards = TokenShards(tmp_path, part)
        found = [shards.sequence(index) for index in range(shards.num_sequences)]
        assert {tuple(each.tokens.tolist()) for each in found} == expected
        assert all(1 < each.prompt_len < len(each.tokens) for each in found)


def test_a_text_is_cut_into_pieces_of_one_prompt_token(tmp_path: Path, model: Any) -> None:
    config = tiny_calibration(text_share=1.0, text_tokens=8)
    lines = lines_of("text", 10)

    collected(tmp_path, model, config, lines)

    shards = TokenShards(tmp_path, "train")
    found = [shards.sequence(index) for index in range(shards.num_sequences)]
    assert {each.prompt_len for each in found} == {1}
    assert max(len(each.tokens) for each in found) == 8
    pieces = "".join(sorted(tiny_tokenizer().decode(each.tokens) for each in found))
    texts = "".join(sorted(str(Record.of_line(line).content) for line in split(lines, config)["train"]))
    assert sorted(pieces) == sorted(texts)


def test_collecting_twice_gives_the_same_bytes(tmp_path: Path, model: Any) -> None:
    config, lines = tiny_calibration(), lines_of("prompt", 10)

    one = collected(tmp_path / "one", model, config, lines)
    two = collected(tmp_path / "two", model, config, lines)

    assert one == two
    assert one != collected(tmp_path / "three", model, tiny_calibration(seed=1), lines)


def test_lengths_fit_the_model() -> None:
    config = CalibrationConfig()

    assert Lengths.of(config, 8192) == Lengths(192, 224, 512)
    assert Lengths.of(config, 256) == Lengths(128, 128, 256)
    assert sum((lengths := Lengths.of(config, 300)).__getattribute__(name) for name in ("prompt", "new")) <= 300
    assert lengths.prompt > 0


def emitted(folder: Path, *sequences: tuple[list[int], int]) -> TokenShards:
    write_shard(folder, "train", 0, [TokenSequence(np.array(ids, np.int32), prompt) for ids, prompt in sequences])
    return TokenShards(folder, "train")


def test_only_tokens_of_the_model_are_counted(tmp_path: Path) -> None:
    counts = count_emitted(emitted(tmp_path, ([7, 7, 3, 4], 2), ([7, 4], 1)), 8)

    assert counts.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_texts_are_counted_where_there_is_nothing_else(tmp_path: Path) -> None:
    counts = count_emitted(emitted(tmp_path, ([7, 4, 4], 1)), 8)

    assert counts.tolist() == [0, 0, 0, 0, 2, 0, 0, 0]


def test_an_id_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an id below 8"):
        count_emitted(emitted(tmp_path, ([7, 4, 9], 2)), 8)


def test_the_shortlist_is_the_most_frequent_ids_and_the_ends_in_order() -> None:
    counts = np.array([0, 5, 0, 9, 1, 7, 0, 0])

    assert choose_shortlist(counts, size=3, coverage=0.9, eos_ids=(6,)).tolist() == [3, 5, 6]
    assert choose_shortlist(counts, size=3, coverage=0.9, eos_ids=()).tolist() == [1, 3, 5]


def test_ids_that_were_never_seen_fill_up_from_below() -> None:
    counts = np.array([0, 0, 0, 9, 0, 0, 0, 0])

    assert choose_shortlist(counts, size=4, coverage=0.9, eos_ids=(7,)).tolist() == [0, 1, 3, 7]


@pytest.mark.parametrize("size", [None, 8, 8192])
def test_without_a_size_below_the_vocabulary_coverage_decides(size: int | None) -> None:
    counts = np.array([50, 30, 17, 2, 1, 0, 0, 0])

    ids = choose_shortlist(counts, size=size, coverage=0.97, eos_ids=(0,))

    assert ids.tolist() == [0, 1, 2]
    assert coverage_of(ids, counts) == pytest.approx(0.97)
    assert len(choose_shortlist(counts, size=size, coverage=1.0, eos_ids=(0,))) == 5
    assert len(choose_shortlist(np.ones(8, np.int64), size=size, coverage=1.0, eos_ids=(0,))) == 7

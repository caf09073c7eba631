from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from tide_core.calibration.collect import shards as module
from tide_core.calibration.collect.shards import (
    SequenceBatch,
    TokenSequence,
    TokenShards,
    remove_others,
    shard_name,
    write_shard,
)
from tide_core.errors import ConfigError


def sequences(num: int, *, seed: int = 0, longest: int = 40) -> list[TokenSequence]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest, num)
    return [TokenSequence(random.integers(0, 99, n).astype(np.int32), int(random.integers(1, n + 1))) for n in lengths]


def plain(batches: list[SequenceBatch]) -> list[tuple[tuple[int, ...], int]]:
    return [
        (tuple(row[:length].tolist()), int(prompt_len))
        for batch in batches
        for row, length, prompt_len in zip(batch.tokens, batch.lengths, batch.prompt_lens, strict=True)
    ]


def test_sequences_come_back_in_file_order_as_they_were_written(tmp_path: Path) -> None:
    first, second = sequences(7), sequences(5, seed=1)
    entries = [write_shard(tmp_path, "train", index, some) for index, some in enumerate((first, second))]
    shards = TokenShards(tmp_path, "train", expected={entry.name: entry.sha256 for entry in entries})

    expected = [(tuple(each.tokens.tolist()), each.prompt_len) for each in (*first, *second)]
    assert plain(list(shards.batches(100, seed=None))) == expected
    assert (shards.num_sequences, shards.num_tokens) == (12, sum(len(tokens) for tokens, _ in expected))
    assert [entry.num_sequences for entry in entries] == [7, 5]


def test_equal_sequences_make_equal_bytes(tmp_path: Path) -> None:
    one, two = (write_shard(tmp_path, "train", index, sequences(9)) for index in range(2))

    assert one.sha256 == two.sha256


def test_batches_keep_to_their_tokens_with_padding_counted(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, sequences(60))
    shards = TokenShards(tmp_path, "train")

    for seed in (None, 3):
        shapes = [batch.tokens.shape for batch in shards.batches(64, seed=seed)]
        assert all(rows * length <= 64 for rows, length in shapes)
        assert len(shapes) == shards.num_batches(64, seed=seed)


def test_a_sequence_longer_than_a_batch_is_a_batch_of_its_own(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, sequences(6))

    batches = list(TokenShards(tmp_path, "train").batches(1, seed=0))

    assert [len(batch.lengths) for batch in batches] == [1] * 6


def test_a_seeded_epoch_holds_every_sequence_once_and_repeats_exactly(tmp_path: Path) -> None:
    some = sequences(50)
    write_shard(tmp_path, "train", 0, some)
    shards = TokenShards(tmp_path, "train")

    first, again, next_epoch = (plain(list(shards.batches(100, seed=5, epoch=epoch))) for epoch in (0, 0, 1))

    assert sorted(first) == sorted((tuple(each.tokens.tolist()), each.prompt_len) for each in some)
    assert first == again
    assert first != next_epoch
    assert sorted(first) == sorted(next_epoch)


def test_padding_is_zero_and_little_when_lengths_are_bucketed(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, sequences(400))
    shards = TokenShards(tmp_path, "train")

    padded = 0
    for batch in shards.batches(256, seed=0):
        outside = batch.lengths[:, None] <= torch.arange(batch.tokens.shape[1])
        assert not batch.tokens[outside].any()
        padded += int(outside.sum())
    assert padded < 0.15 * shards.num_tokens


def test_parts_do_not_mix(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, sequences(3))
    write_shard(tmp_path, "test", 0, sequences(4, seed=1))

    assert [TokenShards(tmp_path, part).num_sequences for part in ("train", "calibration", "test")] == [3, 0, 4]


def test_a_changed_byte_is_refused_by_name(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, "train", 0, sequences(3))
    path = tmp_path / entry.name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    with pytest.raises(ConfigError, match=r"train-00000.*SHA-256"):
        TokenShards(tmp_path, "train", expected={entry.name: entry.sha256})


def test_a_missing_and_an_extra_shard_are_refused(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, "train", 0, sequences(3))

    with pytest.raises(ConfigError, match="exactly"):
        TokenShards(tmp_path, "train", expected={})
    with pytest.raises(ConfigError, match="exactly"):
        TokenShards(tmp_path, "train", expected={entry.name: entry.sha256, shard_name("train", 1): "00"})


def test_shards_that_are_not_planned_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for index in range(3):
        write_shard(tmp_path, "train", index, sequences(3))
    (tmp_path / "notes.txt").write_text("mine")

    remove_others(tmp_path, {shard_name("train", 0), shard_name("train", 2), shard_name("test", 0)})
    remove_others(tmp_path / "nowhere", ())

    assert {path.name for path in tmp_path.iterdir()} == {
        shard_name("train", 0),
        shard_name("train", 2),
        "notes.txt",
    }


def write_shards(folder: Path, num: int, *, longest: int = 40) -> TokenShards:
    entries = [write_shard(folder, "train", index, sequences(4, seed=index, longest=longest)) for index in range(num)]
    return TokenShards(folder, "train", expected={entry.name: entry.sha256 for entry in entries})


def test_every_sequence_is_what_a_plain_reading_of_its_file_gives(tmp_path: Path) -> None:
    write_shards(tmp_path, 4)
    write_shard(tmp_path, "train", 2, [])
    shards, expected = TokenShards(tmp_path, "train"), []
    for path in sorted(tmp_path.glob("*.safetensors")):
        arrays = load(path.read_bytes())
        pieces = np.split(arrays["tokens"], arrays["offsets"][1:-1]) if len(arrays["prompt_lens"]) else []
        expected += [(piece.tolist(), n) for piece, n in zip(pieces, arrays["prompt_lens"].tolist(), strict=True)]

    found = [shards.sequence(index) for index in range(shards.num_sequences)]

    assert [(each.tokens.tolist(), each.prompt_len) for each in found] == expected
    assert {each.tokens.dtype for each in found} == {np.dtype(np.int32)}
    seeded = plain(list(shards.batches(100, seed=2)))
    assert sorted(seeded) == sorted((tuple(tokens), prompt_len) for tokens, prompt_len in expected)


def test_what_is_held_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    held = []
    for longest in (40, 40_000):
        folder = tmp_path / str(longest)
        folder.mkdir()
        tracemalloc.start()
        shards = write_shards(folder, 8, longest=longest)
        num_tokens = sum(int(batch.lengths.sum()) for batch in shards.batches(100_000, seed=0))
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert num_tokens == shards.num_tokens

    assert shards.num_tokens > 500_000
    assert held[1] < held[0] + 100_000


def test_more_shards_than_may_be_open_are_read_with_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 3)
    shards = write_shards(tmp_path, 10)
    before, most = num_open_files(), 0

    for _ in shards.batches(200, seed=1):
        most = max(most, num_open_files())
    assert before < most <= before + 3
    del shards
    assert num_open_files() == before


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_vanishes_after_the_check_is_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 3)
    (tmp_path / shard_name("train", 1)).unlink()

    assert shards.sequence(0).prompt_len >= 1
    with pytest.raises(ConfigError, match=r"train-00001.*No such file"):
        shards.sequence(4)
    with pytest.raises(ConfigError, match="train-00001"):
        list(shards.batches(100, seed=0))


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_shrinks_after_the_check_is_named(tmp_path: Path, is_open: bool) -> None:
    shards = write_shards(tmp_path, 2)
    if is_open:
        shards.sequence(7)
    path = tmp_path / shard_name("train", 1)
    os.truncate(path, path.stat().st_size - 4 * len(shards.sequence(7).tokens) if is_open else 100)

    with pytest.raises(ConfigError, match="train-00001"):
        shards.sequence(7)


def test_a_file_that_changes_after_the_check_is_refused_and_the_same_one_written_again_is_not(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 2)
    expected = shards.sequence(5)
    again = TokenShards(tmp_path, "train")
    write_shard(tmp_path, "train", 1, sequences(4, seed=1))
    assert again.sequence(5).tokens.tolist() == expected.tokens.tolist()

    changed = TokenShards(tmp_path, "train")
    write_shard(tmp_path, "train", 1, sequences(4, seed=9))
    with pytest.raises(ConfigError, match=r"train-00001.*SHA-256"):
        changed.sequence(5)


@pytest.mark.parametrize("keep", [0, 7, 40])
def test_half_a_shard_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / write_shard(tmp_path, "train", 0, sequences(3)).name
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(ConfigError, match="shard"):
        TokenShards(tmp_path, "train")


def test_a_prompt_longer_than_its_sequence_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, "train", 0, [TokenSequence(np.zeros(3, np.int32), 4)])

    with pytest.raises(ConfigError, match="prompt_lens"):
        TokenShards(tmp_path, "train")


def test_what_a_killed_writer_left_goes_with_shards_of_other_records(tmp_path: Path) -> None:
    for name in ("train-00000.safetensors", "train-00001.safetensors", ".train-00000.safetensors.0011.tmp"):
        (tmp_path / name).touch()
    remove_others(tmp_path, {"train-00000.safetensors"})
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.safetensors"]

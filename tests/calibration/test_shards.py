from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tide_core import disk
from tide_core.calibration.shards import (
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


def test_shards_that_nobody_plans_are_removed_and_nothing_else(tmp_path: Path) -> None:
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


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    disk.write_whole(path, b"before")
    monkeypatch.setattr(disk.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))

    with pytest.raises(OSError, match="no space"):
        disk.write_whole(path, b"after")

    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]

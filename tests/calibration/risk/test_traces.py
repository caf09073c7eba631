"""Traces on disk are those in memory; agreement is counted over all positions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tide_core.calibration.risk.traces import (
    CandidateTraces,
    SequenceTrace,
    agreement,
    read_traces,
    write_traces,
)
from tide_core.errors import ConfigError


def make_trace(*rows: str) -> SequenceTrace:
    """Rows of 1 and 0, one for each distance."""
    agree = np.array([[mark == "1" for mark in row] for row in rows], dtype=np.bool_)
    return SequenceTrace(agree, np.linspace(0, 1, agree.size, dtype=np.float32).reshape(agree.shape))


def test_traces_read_back_are_the_ones_written(tmp_path: Path) -> None:
    sequences = [make_trace("1011", "0110"), make_trace("", ""), make_trace("111111111", "000000001")]
    sequences[0].score[0, 0] = np.nan
    written = [CandidateTraces("2:block:deep", 2, "block", sequences), CandidateTraces("1:affine", 1, "affine", [])]
    write_traces(tmp_path / "traces.msgpack", written)
    read = read_traces(tmp_path / "traces.msgpack")
    assert [(t.name, t.layer, t.kind) for t in read] == [("2:block:deep", 2, "block"), ("1:affine", 1, "affine")]
    for got, expected in zip(read[0].sequences, sequences, strict=True):
        assert np.array_equal(got.agree, expected.agree)
        assert np.array_equal(got.score, expected.score, equal_nan=True)
    assert [path.name for path in tmp_path.iterdir()] == ["traces.msgpack"]


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "traces.msgpack"
    write_traces(path, [CandidateTraces("2:block", 2, "block", [make_trace("1011")])])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match="traces"):
        read_traces(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    import msgpack

    (tmp_path / "traces").write_bytes(msgpack.packb({"format_version": 99, "candidates": []}))
    with pytest.raises(ConfigError, match="format version"):
        read_traces(tmp_path / "traces")
    (tmp_path / "traces").write_bytes(msgpack.packb([1, 2]))
    with pytest.raises(ConfigError, match="whole file of traces"):
        read_traces(tmp_path / "traces")


def test_agreement_is_over_all_positions_of_all_sequences() -> None:
    assert agreement([make_trace("1100", "1000"), make_trace("11", "11")]) == [4 / 6, 3 / 6]
    assert agreement([]) == []
    assert all(math.isnan(share) for share in agreement([make_trace("", "")]))

"""Traces: the predictions of exit heads along sequences whose full-depth tokens are known. No torch here.

A trace holds, for every position and every distance to the last deep state, whether the exit's token is the full-depth
token, and the router's score. This is enough to replay decoding in any mode, at any threshold and draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_core.disk import write_whole
from tide_core.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """One sequence: J distances by T generated positions; row j - 1 is distance j."""

    agree: NDArray[np.bool_]
    score: NDArray[np.float32]

    def __post_init__(self) -> None:
        for array, dtype in ((self.agree, np.bool_), (self.score, np.float32)):
            assert array.dtype == dtype, "agree: bool, score: float32"
            assert array.ndim == 2, "[J, T] each"
        assert self.agree.shape == self.score.shape, "agree and score of the same positions"

    @property
    def max_distance(self) -> int:
        return int(self.agree.shape[0])


@dataclass(frozen=True, slots=True)
class CandidateTraces:
    """Traces of one candidate over all sequences of one part."""

    name: str
    layer: int
    kind: str
    sequences: list[SequenceTrace]


def agreement(sequences: Sequence[SequenceTrace]) -> list[float]:
    """Share of all positions at which the exit's token is the full-depth one, by distance; NaN without positions."""
    return [_share(*(trace.agree[j] for trace in sequences)) for j in range(_max_distance(sequences))]


def write_traces(path: Path, traces: Sequence[CandidateTraces]) -> None:
    """Write as msgpack, atomically."""
    import msgpack

    document = {"format_version": FORMAT_VERSION, "candidates": [_packed(candidate) for candidate in traces]}
    write_whole(path, msgpack.packb(document))


def read_traces(path: Path) -> list[CandidateTraces]:
    import msgpack

    try:
        document = msgpack.unpackb(path.read_bytes())
        if document["format_version"] != FORMAT_VERSION:
            raise ConfigError(f"format version of {path}", document["format_version"], str(FORMAT_VERSION))
        return [_unpacked(candidate) for candidate in document["candidates"]]
    except (OSError, ValueError, KeyError, TypeError, AssertionError, msgpack.UnpackException) as error:
        raise ConfigError(f"traces {path}", f"{type(error).__name__}: {error}", "a whole file of traces") from error


def _packed(candidate: CandidateTraces) -> dict[str, Any]:
    sequences = [
        {
            "shape": list(trace.agree.shape),
            "agree": np.packbits(trace.agree).tobytes(),
            "score": trace.score.astype("<f4").tobytes(),
        }
        for trace in candidate.sequences
    ]
    return {"name": candidate.name, "layer": candidate.layer, "kind": candidate.kind, "sequences": sequences}


def _unpacked(packed: dict[str, Any]) -> CandidateTraces:
    sequences = []
    for entry in packed["sequences"]:
        distances, tokens = entry["shape"]
        bits = np.unpackbits(np.frombuffer(entry["agree"], np.uint8), count=distances * tokens)
        score = np.frombuffer(entry["score"], "<f4").astype(np.float32)
        sequences.append(SequenceTrace(bits.reshape(distances, tokens) == 1, score.reshape(distances, tokens)))
    return CandidateTraces(str(packed["name"]), int(packed["layer"]), str(packed["kind"]), sequences)


def _max_distance(sequences: Sequence[SequenceTrace]) -> int:
    return sequences[0].max_distance if sequences else 0


def _share(*flags: NDArray[np.bool_]) -> float:
    total = sum(flag.size for flag in flags)
    return sum(int(flag.sum()) for flag in flags) / total if total else float("nan")

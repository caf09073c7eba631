"""What the host says of rows that draw at random: how each does, and all the random numbers a cycle may need of it.

Which of them are used is seen on the device alone: a draft that stays needs other numbers than one that is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tide_core.batch import RowStep
from tide_core.kernels.reference.draw import NUM_SETTINGS
from tide_core.sampling.draw import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, stream_key, uniforms

PLAIN_STREAM = 0
STREAMS = (PLAIN_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM)


class DrawNumbers(NamedTuple):
    """Of R rows with K drafts, float64, as arrays or tensors. Each stream has a number for what follows the newest
    token and one for what follows each draft, [K + 1, R]."""

    settings: Any
    """[5, R], as `tide_core.kernels.reference.draw` names them."""
    plain: Any
    draft: Any
    accept: Any
    residual: Any


def num_numbers(rows: int, drafts: int) -> int:
    return rows * (NUM_SETTINGS + len(STREAMS) * (drafts + 1))


def split_numbers(wide: Any, rows: int, drafts: int) -> DrawNumbers:
    """The parts of an array or a tensor, one behind another."""
    border = NUM_SETTINGS * rows
    streams = wide[border:].reshape(len(STREAMS), drafts + 1, rows)
    return DrawNumbers(wide[:border].reshape(NUM_SETTINGS, rows), *streams)


def fill_numbers(numbers: DrawNumbers, rows: Sequence[RowStep]) -> None:
    """Write down the first rows; those behind them take the likeliest token, and nobody asks for it."""
    settings, *streams = numbers
    settings[:] = 0.0
    for place, row in enumerate(rows):
        params = row.request.params
        least = -math.inf if params.threshold is None else params.threshold
        settings[:, place] = params.temperature, params.top_k, params.top_p, params.min_p, least
    first = np.array([len(row.output_ids) for row in rows], dtype=np.uint64)
    steps = first + np.arange(len(numbers.plain), dtype=np.uint64)[:, None]
    for stream, part in zip(STREAMS, streams, strict=True):
        keys = np.array([stream_key(row.request.seed, stream) for row in rows], dtype=np.uint64)
        part[:, : len(rows)] = uniforms(keys, steps)

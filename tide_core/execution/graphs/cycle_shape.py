"""The inputs of a cycle: one small buffer per shape, from which the device computes all indices itself."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tide_core.batch import RowStep
from tide_core.exits.accept import cycle_min_score
from tide_core.kernels.reference.cycle import IF_RIGHT, NEVER, NUM_META
from tide_core.kernels.reference.draw import NUM_SETTINGS
from tide_core.request import MAX_LOGPROBS, Budget, ExitPolicy, Request
from tide_core.sampling.draw import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, stream_key

Array = np.ndarray[Any, Any]
PLAIN_STREAM = 0
STREAMS = (PLAIN_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM)
"""Random numbers of a sampled row: one stream each to draw a token, to draw a draft, to accept it, to replace it."""
MAX_END = 2**31 - 1
NO_ROW = (0, 0, -1, 0, 0, 0, 0, -1, -1, 0, 0, 0, 0)
"""Row metadata of a place without a row."""


@dataclass(frozen=True, slots=True)
class CycleShape:
    """Capacity and kind of a cycle. Every row may take part in several branches, each of which counts as a row."""

    rows: int
    drafts: int
    blocks: int
    """Of each row."""
    branches: int = 1
    writes_exit_state: bool = False
    """Whether any of the rows may exit."""
    samples: bool = False
    """Whether any of the rows is sampled. Then there are no branches."""
    adjusts: bool = False
    """Whether any of the rows has a bias, penalties or fewest tokens. Then there are no branches."""
    logprobs: bool = False
    """Whether the likeliest tokens of any of the rows are listed: with log-probabilities, or for its grammar."""
    masks: bool = False
    """Whether any of the rows needs a mask (`masks.needs_mask`). Then there are no branches."""
    has_suffix: bool = False
    """Whether any of the rows has suffix drafts. Then there are no branches."""
    by_exits: bool = True
    """Whether exits draft."""

    @property
    def tokens(self) -> int:
        """Of the deep pass."""
        return self.rows * (self.drafts + 1)

    @property
    def passes(self) -> int:
        """Draft passes."""
        return self.drafts if self.by_exits else 0

    @property
    def size(self) -> int:
        """Of the buffer, in 32-bit words."""
        return self._sampling_words + self.rows * (NUM_META + self.blocks + (self.drafts if self.has_suffix else 0))

    def split(self, buffer: Any) -> tuple[Any, Any]:
        """Of an array or a tensor: row metadata [13, R], and the rows' blocks [R, B]."""
        first = self._sampling_words
        border = first + NUM_META * self.rows
        meta, tables = buffer[first:border], buffer[border : border + self.rows * self.blocks]
        return meta.reshape(NUM_META, self.rows), tables.reshape(self.rows, self.blocks)

    def suffix_of(self, buffer: Any) -> Any:
        """Of an array or a tensor: the suffix drafts [K, R], t as -1 - t; 0 where the draft of an exit stays."""
        return buffer[self.size - self.drafts * self.rows :].reshape(self.drafts, self.rows)

    def sampling(self, buffer: Any, float64: Any, int64: Any) -> tuple[Any, Any]:
        """Of an array or a tensor, with its own 64-bit types: how rows sample, [5, R] float64, and the keys of their
        random streams, [4, R] int64."""
        wide, border = buffer[: self._sampling_words], 2 * NUM_SETTINGS * self.rows
        settings, keys = wide[:border].view(float64), wide[border:].view(int64)
        return settings.reshape(NUM_SETTINGS, self.rows), keys.reshape(len(STREAMS), self.rows)

    @property
    def _sampling_words(self) -> int:
        return 2 * self.rows * (NUM_SETTINGS + len(STREAMS)) if self.samples else 0


class RowPlace(NamedTuple):
    """A row of a cycle."""

    step: RowStep
    """Of this cycle, or of an earlier one: then its token and position are known on the device alone."""
    drafts: int
    blocks: list[int]
    """All that the cycle may need."""
    previous: int = -1
    """Its place in the cycle before, whose next state it continues with; -1: as its step says."""

    @property
    def suffix_drafts(self) -> Sequence[int]:
        """Its suffix drafts. A row that continues has none: what it continues with is not known yet."""
        return self.step.suffix_drafts if self.previous < 0 else ()


class CycleInputs:
    """Writes rows into the host's copy of the buffer, which keeps what has not changed since the launch before."""

    def __init__(self, shape: CycleShape, host: Array) -> None:
        self._meta, self._tables = shape.split(host)
        self._branches = shape.branches
        self._meta[:] = np.array(NO_ROW, dtype=np.int32)[:, None]
        self._sampling = shape.sampling(host, np.float64, np.int64) if shape.samples else None
        self._suffix = shape.suffix_of(host) if shape.has_suffix else None
        self._no_draft = 0 if shape.by_exits else -1  # without exits there may be no shortlist
        if self._suffix is not None:
            self._suffix[:] = self._no_draft
        self._num_places = 0
        self._sampled: list[tuple[Request, ExitPolicy] | None] = [None] * shape.rows
        """The rows whose settings and keys are in the buffer."""
        self._written: list[list[int]] = [[] for _ in range(shape.rows)]
        """Block ids in the tables: most rows have those of the step before."""

    def fill(self, rows: Sequence[RowPlace], slots: Sequence[int] | None = None) -> list[int]:
        """By falling number of drafts; `slots`: where each row's logit adjustments are, -1 for none. Returns where the
        tokens of each place begin in the deep pass."""
        written = self._written
        meta: list[tuple[int, ...]] = []
        place = 0
        for number, (step, drafts, blocks, previous) in enumerate(rows):
            start = step.table.length if previous < 0 else -1 - previous
            slot = -1 if slots is None else slots[number]
            constants, num_listed = _constants(step.request, step.policy), _num_listed(step.request)
            budget = step.num_differing, *_budget_bits(step.policy.budget)
            of_row = step.token_ids[0], start, drafts, *constants, slot, num_listed, *budget
            for _ in range(self._branches):
                if written[place] != blocks:  # a few times quicker than to write them again
                    self._tables[place, : len(blocks)] = written[place] = blocks
                meta.append(of_row)
                place += 1
        num, before = len(meta), self._num_places
        if meta:
            self._meta[:, :num] = np.array(meta, dtype=np.int32).T
        if num < before:
            self._meta[:, num:before] = np.array(NO_ROW, dtype=np.int32)[:, None]
        self._num_places = num
        if self._suffix is not None:
            self._suffix[:] = self._no_draft
            for place, row in enumerate(rows):
                self._suffix[: len(row.suffix_drafts), place] = [-1 - token_id for token_id in row.suffix_drafts]
        if self._sampling is not None:
            self._fill_sampling(*self._sampling, rows)
        return [0, *accumulate([of_row[2] + 1 for of_row in meta[:-1]])]

    def _fill_sampling(self, settings: Array, keys: Array, rows: Sequence[RowPlace]) -> None:
        for place, row in enumerate(rows):
            request, policy = row.step.request, row.step.policy
            written = self._sampled[place]
            if written is not None and written[0] is request and written[1] is policy:
                continue
            params, min_score = request.params, cycle_min_score(request)
            settings[:, place] = params.temperature, params.top_k, params.top_p, params.min_p, min_score
            keys[:, place].view(np.uint64)[:] = [stream_key(request.seed, stream) for stream in STREAMS]
            self._sampled[place] = request, policy
        for place in range(len(rows), len(self._sampled)):
            if self._sampled[place] is not None:
                settings[:, place] = 0.0  # a place without a row takes the largest logit, and no row reads it
                self._sampled[place] = None


def _constants(request: Request, policy: ExitPolicy) -> tuple[int, int, int, int]:
    """Row metadata that a request does not change."""
    leaves = IF_RIGHT if policy.may_exit else NEVER
    return leaves, end_of(request), _bits(cycle_min_score(request)), len(request.prompt_ids)


def _num_listed(request: Request) -> int:
    """Of the likeliest tokens, -1 for none: a grammar chooses among as many as there may be."""
    logprobs = request.params.logprobs if request.mask is None else MAX_LOGPROBS
    return -1 if logprobs is None else logprobs


def end_of(request: Request) -> int:
    """The position after the last that its answer can have."""
    return min(len(request.prompt_ids) + request.params.max_tokens, MAX_END)


@functools.lru_cache(maxsize=256)
def _bits(value: float) -> int:
    """A float32 as the int32 with the same bits. Rounded up, so that no score below the threshold reaches it."""
    single = np.float32(value)
    if float(single) < value:
        single = np.nextafter(single, np.float32(math.inf))
    return int(struct.unpack("<i", struct.pack("<f", single))[0])


@functools.lru_cache(maxsize=256)
def _budget_bits(budget: Budget | None) -> tuple[int, int, int]:
    """Margin and epsilon as row metadata. The margin is rounded down: a gap is a float32 and stays below either."""
    if budget is None:
        return 0, 0, 0
    with np.errstate(over="ignore"):
        margin = np.float32(budget.margin)
    if float(margin) > budget.margin:
        margin = np.nextafter(margin, np.float32(-math.inf))
    margin_bits, low, high = struct.unpack("<iii", struct.pack("<fd", margin, budget.epsilon))
    return margin_bits, low, high

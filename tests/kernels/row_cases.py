"""Cycles of rows with thresholds, penalties and random numbers of their own: what the ops that read `row_meta` get."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tide_core.kernels.reference import cycle
from tide_core.kernels.reference.adjust import AdjustState
from tide_core.kernels.reference.draw import NUM_STREAMS
from tide_core.request import SamplingParams
from tide_core.sampling.rows import SamplingRow

SHAPES = [(1, 1, 0, 1), (1, 2, 5, 1), (3, 4, 3, 1), (5, 8, 15, 1), (64, 64, 3, 1), (130, 256, 2, 1), (0, 2, 2, 1)]
"""Rows, places for rows, drafts, branches."""
BRANCHED_SHAPES = [(2, 2, 1, 2), (6, 6, 3, 2), (8, 8, 4, 4)]


class RowCase(NamedTuple):
    """With R places for rows, K drafts, T = R (K + 1) tokens of the deep pass."""

    row_meta: Tensor
    counting: Tensor
    starts: Tensor
    positions: Tensor
    drafted: Tensor
    scores: Tensor
    following: Tensor
    logits: Tensor
    gaps: Tensor


def row_case(seed: int, num_rows: int, places: int, drafts: int, branches: int = 1, vocab_size: int = 2) -> RowCase:
    """The first `num_rows` exist; one in eight is so near its end that not all its drafts count. With few tokens in the
    vocabulary many drafts equal what full depth chooses. Scores are sixteenths, so that some equal a threshold, and
    logits, so that some gaps equal a margin. Half of the rows have a budget."""
    random = np.random.default_rng(seed)
    counts = np.full(places, -1)
    counts[:num_rows] = drafts if branches > 1 else np.sort(random.integers(0, drafts + 1, num_rows))[::-1]
    counts[: min(num_rows, 1)] = drafts
    groups = np.arange(places) // branches  # all branches of a row share its metadata
    meta = np.zeros((cycle.NUM_META, places), dtype=np.int32)
    prompt_lens = random.integers(1, 300, places)
    starts_at = prompt_lens + random.integers(0, 200, places) - 1
    meta[cycle.NEWEST] = random.integers(0, vocab_size, places)[groups]
    meta[cycle.START] = starts_at[groups]
    meta[cycle.DRAFTS] = counts
    meta[cycle.LEAVES] = random.integers(0, 2, places)[groups]
    limits = [-math.inf, 0.25, 0.5], [0.0, 0.125, 1.0]
    for part, values in zip((cycle.MIN_SCORE, cycle.MARGIN), limits, strict=True):
        chosen = random.choice(np.array(values, dtype=np.float32), places)[groups]
        meta[part] = chosen.astype(np.float32).view(np.int32)
    epsilons = random.choice([0.0, 0.0, 0.0, 0.02, 0.05, 0.9], places)[groups]
    meta[cycle.EPSILON : cycle.EPSILON + 2] = epsilons.view(np.int32).reshape(places, 2).T
    meta[cycle.DIFFERING] = random.integers(0, 6, places)[groups]
    meta[cycle.PROMPT_LEN] = prompt_lens[groups]
    meta[cycle.ADJUST_SLOT] = meta[cycle.LOGPROBS] = -1
    near_end = np.where(random.random(places) < 0.125, random.integers(0, drafts + 1, places), drafts)[groups]
    counting = np.minimum(counts, near_end).astype(np.int32)
    meta[cycle.END] = meta[cycle.START] + near_end + 2
    tokens = places * (drafts + 1)
    positions, starts = np.zeros(tokens, dtype=np.int64), np.zeros(places + 1, dtype=np.int32)
    for r, count in enumerate(counts):
        starts[r + 1] = starts[r] + count + 1
        positions[starts[r] : starts[r + 1]] = meta[cycle.START, r] + np.arange(count + 1)
    scores = (random.integers(4, 17, (drafts, places)) / 16).astype(np.float32)
    scores[random.random(scores.shape) < 0.05] = math.nan
    scores[random.random(scores.shape) < 0.05] = math.inf
    drafted = random.integers(0, vocab_size, (drafts, places))
    logits = (random.integers(-32, 33, (tokens, vocab_size)) / 16).astype(np.float32)
    logits[random.random(logits.shape) < 0.02] = -math.inf
    logits[:, 0] = np.maximum(logits[:, 0], -2.0)  # no token without any choice
    parts = meta, counting, starts, positions, drafted, scores, logits.argmax(-1), logits
    return RowCase(*(torch.from_numpy(part) for part in parts), torch.full((tokens,), 77.0))


def keys_of(seed: int, places: int) -> Tensor:
    """Keys of four streams of each row, [4, R]: any bits, all zeros and all ones among them."""
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63, (NUM_STREAMS, places), dtype=np.int64)
    keys.flat[0], keys.flat[-1] = 0, -1
    return torch.from_numpy(keys)


def next_state_of(case: RowCase) -> tuple[Tensor, Tensor]:
    """Buffers for `accept_drafts`, filled with numbers that it must replace or leave."""
    device_state = torch.full((3, cycle.MOST_ROWS), 77, dtype=torch.int32)
    device_state[2] = torch.arange(cycle.MOST_ROWS) % 7
    return device_state, torch.full((2, case.starts.numel() - 1), 77)


def continued(case: RowCase, branches: int) -> RowCase:
    """The case with every other row at another place of the cycle before, whose next state it continues with."""
    meta = case.row_meta.clone()
    for r in range(meta.shape[1]):
        if r // branches % 2 == 0:
            meta[cycle.START, r] = -1 - (r - r % branches + 5) % cycle.MOST_ROWS
    return case._replace(row_meta=meta)


ADJUSTMENTS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.3, "frequency_penalty": 0.7},
    {"logit_bias": {0: 5.0, 3: -100.0, 7: 0.1}},
    {"min_tokens": 100_000, "max_tokens": 100_000, "stop_ids": (3, 5)},
    {"min_tokens": 60, "stop_ids": (7,), "ignore_eos": True},
    {
        "repetition_penalty": 0.7,
        "presence_penalty": -1.1,
        "frequency_penalty": -0.1,
        "logit_bias": {3: 2.5, 11: 1e-3},
        "min_tokens": 100_000,
        "max_tokens": 100_000,
        "stop_ids": (3,),
    },
    {"frequency_penalty": 1.9, "logit_bias": {i: i / 7 for i in range(300)}},
]
"""What requests ask for; ids beyond the vocabulary start again at its first."""
ENTRIES = 320
EOS_ID = 5


class AdjustCase(NamedTuple):
    rows: list[SamplingRow | None]
    """What the sampler is given for each place; None where nothing is to be adjusted."""
    state: AdjustState


def adjust_case(seed: int, case: RowCase, vocab_size: int) -> AdjustCase:
    """Requests for the rows of the case, of every kind in turn, whose slots it writes to `row_meta`."""
    random = np.random.default_rng(seed)
    places = case.row_meta.shape[1]
    num_slots = places + 1
    slots = random.permutation(num_slots)
    counts = np.zeros((num_slots, vocab_size), dtype=np.uint16)
    penalties = np.ones((3, num_slots))
    entries = np.full((num_slots, ENTRIES), -1, dtype=np.int32)
    values = random.standard_normal((num_slots, ENTRIES)).astype(np.float32)
    until = np.full((num_slots, ENTRIES), 2**31 - 1, dtype=np.int32)
    rows: list[SamplingRow | None] = []
    for r, slot in zip(range(places), slots, strict=False):
        wanted = dict(ADJUSTMENTS[r % len(ADJUSTMENTS)])
        if not wanted:
            rows.append(None)
            continue
        wanted["logit_bias"] = {i % vocab_size: value for i, value in wanted.get("logit_bias", {}).items()}
        wanted["stop_ids"] = tuple(i % vocab_size for i in wanted.get("stop_ids", ()))
        params, prompt_len = SamplingParams(**wanted), int(case.row_meta[cycle.PROMPT_LEN, r])
        num_outputs = int(case.row_meta[cycle.START, r]) + 1 - prompt_len
        few = random.integers(0, vocab_size, 40)  # so that tokens come more than once
        prompt, output = random.choice(few, prompt_len), random.choice(few, num_outputs)
        eos_ids = (EOS_ID % vocab_size,)
        rows.append(SamplingRow(params, 1, prompt.tolist(), output.tolist(), eos_ids))
        case.row_meta[cycle.ADJUST_SLOT, r] = int(slot)
        np.add.at(counts[slot], output, 1)
        counts[slot, prompt] |= 0x8000
        penalties[:, slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        ending = {*params.stop_ids, *(() if params.ignore_eos else eos_ids)} if params.min_tokens else ()
        listed = [*params.logit_bias.items(), *((token_id, -math.inf) for token_id in ending)]
        for entry, (token_id, value) in enumerate(listed):
            entries[slot, entry], values[slot, entry] = token_id, value
            until[slot, entry] = 2**31 - 1 if entry < len(params.logit_bias) else params.min_tokens
    parts = counts.view(np.int16), penalties, entries, values, until
    return AdjustCase(rows, AdjustState(*(torch.from_numpy(part) for part in parts)))


def sources_of(case: RowCase) -> Tensor:
    """Of the tokens of the deep pass, those of no row after them, and of a pass that has all places, [T + R]."""
    drafts = case.row_meta[cycle.DRAFTS].tolist()
    sources = [d * len(drafts) + r for r, count in enumerate(drafts) for d in range(count + 1)]
    return torch.tensor([*sources, *[0] * (len(case.positions) - len(sources)), *range(len(drafts))])


def adjust_logits_of(seed: int, count: int, width: int) -> Tensor:
    """Float32, with zeros of both signs, numbers that are infinite and some that are none."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((count, width)) * 6).astype(np.float32)
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan):
        logits[random.random(logits.shape) < 0.01] = value
    return torch.from_numpy(logits)


def logprobs_case(seed: int, case: RowCase, vocab_size: int, listed: int) -> tuple[Tensor, ...]:
    """Logits, sources and following tokens of the deep pass, and buffers of `top_logprobs` filled with numbers that it
    must replace or leave. Rows list 0 to `listed` tokens, and every third has no log-probabilities; it writes that to
    `row_meta`. Logits have few different values, so that many are equal."""
    random = np.random.default_rng(seed)
    places, tokens = case.row_meta.shape[1], len(case.positions)
    wanted = np.where(np.arange(places) % 3 == 2, -1, random.integers(0, listed + 1, places))
    wanted[: min(places, 1)] = listed
    case.row_meta[cycle.LOGPROBS] = torch.from_numpy(wanted.astype(np.int32))
    logits = (random.standard_normal((tokens, vocab_size)) * 3).round(1).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -math.inf
    logits[:, 0] = 1.0  # no row is ruled out altogether
    following = torch.from_numpy(random.integers(0, vocab_size, tokens))
    ids, logprobs = torch.full((tokens, listed), 77), torch.full((tokens, listed), 77.0)
    sources = sources_of(case)[:tokens]
    return torch.from_numpy(logits), sources, following, ids, logprobs, torch.full((tokens,), 77.0)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal float32 numbers, with their signs; one NaN is like another."""
    nan = one.isnan() & other.isnan()
    return bool((nan | (one.view(torch.int32) == other.view(torch.int32))).all())

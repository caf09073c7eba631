"""The sampler against exact distributions, hand-made values and Hugging Face's processors."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.sampling.chances import token_probabilities
from tide_core.request import SamplingParams
from tide_core.sampling.adjust import adjusted
from tide_core.sampling.draw import DRAFT_STREAM, draw, uniform
from tide_core.sampling.rows import SampledToken, SamplingRow
from tide_core.sampling.sampler import probabilities_of, prompt_logprobs, sample, sample_with_chances, with_logprobs
from tide_core.sampling.weights import HEAD_TOKENS

pytestmark = pytest.mark.unit

Probabilities = npt.NDArray[np.float64]

INF = math.inf
NAN = math.nan
no_deadline = settings(deadline=None)  # the machine may be busy


def make_row(
    *,
    seed: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=10**6, **params), seed, prompt or [], output or [], eos)


def sample_one(logits: list[float] | torch.Tensor, **row: Any) -> SampledToken:
    return sample(torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0), [make_row(**row)])[0]


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def exact(logits: torch.Tensor, params: SamplingParams) -> Probabilities:
    """The distribution as the parameters define it, in float64, token by token."""
    scaled = logits.double().numpy() / params.temperature
    probabilities: Probabilities = np.exp(scaled - scaled.max())
    ranking = np.lexsort((np.arange(len(logits)), -logits.numpy()))
    if params.top_k:
        probabilities[ranking[params.top_k :]] = 0.0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[ranking]) - probabilities[ranking]
    if params.top_p < 1.0:
        probabilities[ranking[before >= params.top_p]] = 0.0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    probabilities /= probabilities.sum()
    return probabilities


def assert_fits(counts: Counter[int], expected: Probabilities) -> None:
    """Pearson's chi-square, five standard deviations wide; tokens of no probability must not come up at all.

    Tokens expected fewer than five times count as one: the statistic is not chi-square with less.
    """
    total = sum(counts.values())
    assert all(expected[token_id] > 0 for token_id in counts)
    cells = [(counts[i], total * p) for i, p in enumerate(expected) if total * p >= 5]
    rare = (total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells))
    if rare[1] >= 5:
        cells.append(rare)
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
]

params_strategy = st.builds(
    lambda temperature, top_k, top_p, min_p: {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    },
    st.floats(0.05, 10),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
logit_lists = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=10)


# The distribution.


@pytest.mark.parametrize("params", FILTERS)
def test_tokens_come_up_as_often_as_their_probability_says(params: dict[str, Any]) -> None:
    logits = torch.tensor([1.0, 2.0, 0.5, -1.0, 2.0, 0.0, 1.5, -2.0, -INF, 0.9])
    num_draws = 10_000
    rows = [make_row(seed=seed, **params) for seed in range(num_draws)]
    drawn = sample(logits.expand(num_draws, -1), rows)
    assert_fits(Counter(token.token_id for token in drawn), exact(logits, rows[0].params))


def test_tokens_of_one_seed_over_many_steps_come_up_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([1.0, 2.0, 0.5, -1.0])
    rows = [make_row(seed=7, temperature=1.0, output=[0] * step) for step in range(2000)]
    drawn = sample(logits.expand(2000, -1), rows)
    assert_fits(Counter(token.token_id for token in drawn), exact(logits, rows[0].params))


def meets_a_limit(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether a mass meets top_p or min_p so closely that rounding decides."""
    wide = exact(logits, SamplingParams(temperature=params.temperature, top_k=params.top_k))
    mass = np.cumsum(np.sort(wide)[::-1])
    near_p = params.top_p < 1.0 and np.any(np.abs(mass - params.top_p) < 1e-6)
    near_min = 0.0 < params.min_p < 1.0 and np.any(np.abs(wide / wide.max() - params.min_p) < 1e-6)
    return bool(near_p or near_min)


@no_deadline
@given(logits=logit_lists, params=params_strategy)
def test_probabilities_are_those_the_parameters_define(logits: list[float], params: dict[str, Any]) -> None:
    row, tensor = make_row(**params), torch.tensor(logits)
    assume(not meets_a_limit(tensor, row.params))
    got = token_probabilities(tensor, row).numpy()
    np.testing.assert_allclose(got, exact(tensor, row.params), atol=1e-6)
    assert abs(got.sum() - 1.0) < 1e-12


@no_deadline
@given(logits=logit_lists, params=params_strategy, seed=st.integers(-(2**63), 2**64 - 1))
def test_the_token_drawn_always_has_probability(logits: list[float], params: dict[str, Any], seed: int) -> None:
    row, tensor = make_row(seed=seed, **params), torch.tensor(logits)
    (token,) = sample(tensor.unsqueeze(0), [row])
    assert token.error is None
    assert token_probabilities(tensor, row)[token.token_id] > 0


@pytest.mark.parametrize("params", FILTERS)
def test_a_large_vocabulary_has_the_probabilities_the_parameters_define(params: dict[str, Any]) -> None:
    for spread in (0.01, 3.0):  # the flat one needs more than the head that is sorted first
        logits = random_logits(1, 5 * HEAD_TOKENS, spread=spread)[0]
        row = make_row(**params)
        np.testing.assert_allclose(token_probabilities(logits, row).numpy(), exact(logits, row.params), atol=1e-6)


# Greedy, and what amounts to it.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 49152, dtype=dtype)
    logits[0, [300, 7, 49151]] = 2.0
    assert [token.token_id for token in sample(logits, [make_row()] * 2)] == [7, 0]


@no_deadline
@given(logits=logit_lists, seed=st.integers(0, 2**64 - 1), temperature=st.floats(1e-300, 100))
def test_top_k_of_one_equals_greedy_at_any_temperature(logits: list[float], seed: int, temperature: float) -> None:
    greedy = sample_one(logits)
    assert sample_one(logits, seed=seed, temperature=temperature, top_k=1) == greedy
    assert sample_one(logits, seed=seed, temperature=temperature, top_p=1e-9) == greedy


@no_deadline
@given(logits=logit_lists, seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([5e-324, 1e-40, 1e-6]))
def test_the_coldest_temperatures_take_one_of_the_largest_logits(
    logits: list[float], seed: int, temperature: float
) -> None:
    token = sample_one(logits, seed=seed, temperature=temperature)
    assert logits[token.token_id] == max(logits)


def test_greedy_probability_is_one_hot() -> None:
    assert token_probabilities(torch.tensor([0.0, 3.0, 3.0]), make_row()).tolist() == [0.0, 1.0, 0.0]


def test_top_k_and_top_p_keep_the_lowest_ids_among_equals() -> None:
    flat = torch.zeros(8)
    assert token_probabilities(flat, make_row(temperature=1.0, top_k=3)).nonzero().flatten().tolist() == [0, 1, 2]
    assert token_probabilities(flat, make_row(temperature=1.0, top_p=0.5)).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_top_p_counts_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    row = make_row(temperature=1.0, top_k=2, top_p=0.5)  # 0.4 of the 0.7 that are left is enough
    assert token_probabilities(logits, row).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_min_p_of_one_keeps_only_equals_of_the_likeliest() -> None:
    row = make_row(temperature=1.0, min_p=1.0)
    assert token_probabilities(torch.tensor([1.0, 2.0, 2.0]), row).tolist() == [0.0, 0.5, 0.5]


# Against Hugging Face.


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_k": 500}, TopKLogitsWarper(500)),
        ({"top_p": 0.3}, TopPLogitsWarper(0.3)),
        ({"top_p": 0.95}, TopPLogitsWarper(0.95)),
        ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_filters_keep_the_tokens_that_hugging_face_keeps(
    params: dict[str, Any], warper: Any, temperature: float
) -> None:
    for logits in random_logits(10, 400).unsqueeze(1):
        kept = warper(None, TemperatureLogitsWarper(temperature)(None, logits)) > -INF
        got = token_probabilities(logits[0], make_row(temperature=temperature, **params)) > 0
        assert torch.equal(got, kept[0])


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_hugging_face(penalty: float) -> None:
    logits = random_logits(1, 50)
    prompt, output = [1, 2, 3, 3, 40], [3, 7, 7, 49]
    row = make_row(prompt=prompt, output=output, repetition_penalty=penalty)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    assert torch.equal(adjusted(logits, [row]), expected)


# Penalties, bias and fewest tokens.


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    row = make_row(prompt=[0, 0, 3], output=[1, 2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(torch.zeros(1, 5), [row]).tolist() == [[0.0, -0.75, -1.25, 0.0, 0.0]]


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    row = make_row(prompt=[0], output=[1], logit_bias={0: 3.0, 1: -1.0}, repetition_penalty=2.0, presence_penalty=1.0)
    # Token 0: (1 + 3) / 2. Token 1: (0 - 1) * 2 - 1.
    assert adjusted(torch.tensor([[1.0, 0.0, 0.0]]), [row]).tolist() == [[2.0, -3.0, 0.0]]


def test_bias_moves_greedy_and_drawn_tokens() -> None:
    assert sample_one([0.0, 1.0], logit_bias={0: 100.0}).token_id == 0
    assert sample_one([0.0, 1.0], logit_bias={0: 100.0}, temperature=1.0).token_id == 0


def test_nothing_ends_the_text_before_min_tokens() -> None:
    logits, ends = [5.0, 4.0, 3.0, 0.0], {"eos": (0,), "stop_ids": (1,), "min_tokens": 2}
    assert [sample_one(logits, output=[3] * n, **ends).token_id for n in range(4)] == [2, 2, 0, 0]
    assert sample_one(logits, output=[3], temperature=1.0, top_k=1, **ends).token_id == 2


def test_ignored_end_of_text_ids_may_come_before_min_tokens() -> None:
    assert sample_one([5.0, 4.0, 0.0], eos=(0,), stop_ids=(1,), min_tokens=2, ignore_eos=True).token_id == 0


def test_a_row_left_with_no_token_gets_an_error() -> None:
    token = sample_one([1.0, 2.0], eos=(0,), stop_ids=(1,), min_tokens=1)
    assert token.token_id == -1
    assert token.error is not None
    assert token.error.startswith("numerical_error")


def test_penalties_that_overflow_give_an_error_and_not_a_wrong_token() -> None:
    assert "numerical_error" in str(sample_one([3e38, 2.0], prompt=[0], repetition_penalty=0.01).error)


def test_the_logits_given_are_not_changed() -> None:
    logits = random_logits(4, 100)
    before = logits.clone()
    asks: dict[str, Any] = {"logit_bias": {1: 1.0}, "repetition_penalty": 2.0, "min_tokens": 9, "presence_penalty": 1.0}
    sample(logits, [make_row(prompt=[1], output=[2], eos=(3,), temperature=t, top_k=5, **asks) for t in (0, 1, 2, 0.1)])
    token_probabilities(logits[0], make_row(prompt=[1], output=[2], eos=(3,), **asks))
    assert torch.equal(logits, before)


# Rows are on their own.


def every_kind_of_row(vocab_size: int, num: int) -> list[SamplingRow]:
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 5},
        {"logit_bias": {3: 2.0}, "repetition_penalty": 1.3},
        *FILTERS,
        {"temperature": 1.0, "top_p": 0.99},
        {"temperature": 5.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_tokens": 50, "logprobs": 0},
    ]
    return [
        make_row(seed=n * 77 - 500, prompt=[n, 5, 9], output=list(range(n % 4)), eos=(2,), **kinds[n % len(kinds)])
        for n in range(num)
    ]


@pytest.mark.parametrize("vocab_size", [37, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_in_a_batch_equals_the_row_alone_to_the_last_bit(vocab_size: int, dtype: torch.dtype) -> None:
    rows = every_kind_of_row(vocab_size, 29)
    logits = random_logits(len(rows), vocab_size).to(dtype)
    together = sample(logits, rows)
    assert together == [sample(logits[r : r + 1], [row])[0] for r, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize("vocab_size", [37, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_with_its_chances_is_the_token_that_is_sampled_and_they_are_what_it_is_drawn_from(
    vocab_size: int, dtype: torch.dtype
) -> None:
    rows = every_kind_of_row(vocab_size, 29)
    logits = random_logits(len(rows), vocab_size).to(dtype)
    logits[4, 3] = NAN
    together = sample_with_chances(logits, rows)

    assert [token.token_id for token, _ in together] == [token.token_id for token in sample(logits, rows)]
    for r, (row, (token, chances)) in enumerate(zip(rows, together, strict=True)):
        assert (token.error is not None) == (r == 4)
        if row.params.is_greedy or r == 4:
            assert chances is None
        else:
            assert chances is not None
            assert torch.equal(chances, token_probabilities(logits[r], row))


def test_a_seed_and_a_stream_draw_the_same_token_with_and_without_chances() -> None:
    logits = random_logits(1, 50).expand(200, -1)
    rows = [replace(make_row(seed=n, temperature=1.5, output=[1] * (n % 5)), stream=n % 4) for n in range(200)]

    assert [token for token, _ in sample_with_chances(logits, rows)] == sample(logits, rows)


@pytest.mark.parametrize(
    "bad", [[NAN, 1.0, 2.0, 3.0], [INF, 1.0, 2.0, 3.0], [-INF] * 4, [NAN] * 4, [1.0, NAN, INF, 2.0]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gets_an_error_and_its_mates_do_not_notice(
    bad: list[float], temperature: float
) -> None:
    good = random_logits(3, 4)
    rows = [make_row(seed=r, temperature=temperature, logprobs=2) for r in range(4)]
    logits = torch.cat([good[:1], torch.tensor([bad]), good[1:]])
    first, failed, *others = sample(logits, rows)
    assert failed.token_id == -1
    assert str(failed.error).startswith("numerical_error")
    assert "penalties" not in str(failed.error)  # they are not to blame
    assert (failed.logprob, failed.top_logprobs) == (None, ())
    assert [first, *others] == sample(good, [rows[0], *rows[2:]])
    _, errors = probabilities_of(logits, rows)
    assert errors.keys() == {1}
    assert errors[1].startswith("numerical_error")


def test_a_token_ruled_out_by_the_model_is_no_error_and_never_drawn() -> None:
    rows = [make_row(seed=seed, temperature=100.0) for seed in range(500)]
    drawn = sample(torch.tensor([-INF, 0.0, -INF, 1.0, -INF]).expand(500, -1), rows)
    assert {token.token_id for token in drawn} == {1, 3}


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []
    assert sample_with_chances(torch.empty(0, 5), []) == []


# Log-probabilities.


def test_logprobs_are_those_of_the_model_before_penalties_and_temperature() -> None:
    logits = random_logits(1, 30)
    raw = logits[0].log_softmax(-1)
    row = make_row(temperature=0.3, output=[4], repetition_penalty=5.0, logit_bias={2: 9.0}, logprobs=4, top_k=3)
    (token,) = sample(logits, [row])
    assert token.logprob == raw[token.token_id].item()
    values, ids = raw.topk(4)
    assert token.top_logprobs == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_equal_logprobs_are_listed_by_lower_id() -> None:
    token = sample_one([1.0, 2.0, 1.0, 2.0, 1.0], logprobs=4)
    assert [i for i, _ in token.top_logprobs] == [1, 3, 0, 2]
    many = sample_one(torch.zeros(5000), logprobs=20)
    assert [i for i, _ in many.top_logprobs] == list(range(20))
    assert [i for i, _ in sample_one([-1.0, 0.0, -0.0, -2.0, 0.0], logprobs=5).top_logprobs] == [1, 2, 4, 0, 3]


def test_logprobs_of_zero_give_that_of_the_chosen_token_alone() -> None:
    token = sample_one([0.0, 0.0], logprobs=0)
    assert token.logprob == pytest.approx(math.log(0.5))
    assert token.top_logprobs == ()
    assert sample_one([0.0, 0.0]).logprob is None


def test_tokens_the_model_rules_out_are_not_listed() -> None:
    assert [i for i, _ in sample_one([-INF, 0.0, -INF], logprobs=3).top_logprobs] == [1]


def test_more_logprobs_than_tokens_lists_them_all() -> None:
    assert len(sample_one([0.0, 1.0], logprobs=20).top_logprobs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_a_prompt_have_the_logprobs_they_would_have_as_choices(dtype: torch.dtype) -> None:
    """Rounded to bfloat16, many logits are equal."""
    logits = random_logits(9, 500).to(dtype)
    tokens, error = prompt_logprobs(logits, range(9), 20)
    chosen = [with_logprobs(row, make_row(logprobs=20), token_id) for token_id, row in enumerate(logits)]
    assert error is None
    assert [(t.token_id, t.logprob, t.top_logprobs) for t in tokens] == [
        (t.token_id, t.logprob, t.top_logprobs) for t in chosen
    ]
    for row, token in zip(logits.float(), tokens, strict=True):
        assert [i for i, _ in token.top_logprobs] == row.argsort(descending=True, stable=True)[:20].tolist()


def test_logits_of_a_prompt_that_are_not_finite_are_an_error() -> None:
    logits = random_logits(3, 10)
    logits[1, 4] = NAN
    tokens, error = prompt_logprobs(logits, [1, 2, 3], 2)
    assert tokens == []
    assert error is not None
    assert error.startswith("numerical_error")


# Random numbers.


def test_the_same_seed_and_step_draw_the_same_token_whatever_came_before() -> None:
    logits = random_logits(1, 1000)[0]
    first = sample_one(logits, seed=5, temperature=1.0, prompt=[1], output=[3, 4])
    assert sample_one(logits, seed=5, temperature=1.0, prompt=[9, 9], output=[7, 7]) == first


def test_every_seed_and_every_step_has_its_own_number() -> None:
    seeds = [0, 1, 2, -1, -2, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64 - 2, 2**32, 2**32 + 1]
    numbers = [uniform(seed, step) for seed in seeds for step in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_numbers_of_a_seed_do_not_change_between_versions() -> None:
    assert [uniform(seed, step) for seed, step in ((0, 0), (0, 1), (-1, 0), (2**64 - 1, 0))] == [
        0.13870941014555427,
        0.2582654469187293,
        0.5581932986907879,
        0.9844383619111032,
    ]


def test_every_distance_of_a_draft_has_its_own_number() -> None:
    numbers = [uniform(5, step, DRAFT_STREAM, distance) for step in range(100) for distance in range(16)]
    assert len(set(numbers)) == len(numbers)
    assert uniform(5, 3, DRAFT_STREAM, 0) == uniform(5, 3, DRAFT_STREAM)


@pytest.mark.parametrize(
    "pairs", [[(s, 0) for s in range(8000)], [(3, t) for t in range(8000)]], ids=["seeds", "steps"]
)
def test_numbers_are_spread_evenly_and_neighbours_are_not_alike(pairs: list[tuple[int, int]]) -> None:
    numbers = [uniform(seed, step) for seed, step in pairs]
    assert_fits(Counter(int(number * 50) for number in numbers), np.full(50, 1 / 50))
    neighbours = itertools.pairwise(numbers)
    assert_fits(Counter(int(a * 8) * 8 + int(b * 8) for a, b in neighbours), np.full(64, 1 / 64))


def test_the_smallest_and_largest_numbers_fall_on_tokens_that_have_weight() -> None:
    largest = 1.0 - 2.0**-53
    totals = [2, 3, 2**53 - 1, 2**53 + 1, 2**61 - 1, 2**61 + 255, 2**62 - 257, 2**62 - 1]
    for total in totals:
        weights = [0, 0, total // 2, 0, total - total // 2, 0, 0]
        assert draw(torch.tensor([weights, weights]), [0.0, largest]).tolist() == [2, 4]
    assert draw(torch.tensor([[0, 1, 0]]), [largest]).tolist() == [1]

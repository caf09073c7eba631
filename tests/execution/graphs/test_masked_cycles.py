"""Rows that follow a grammar in cycles; here on the CPU, where the CUDA kernels' twin stands in."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.exits.test_sampled_distribution import LEAST_P, chi_square_p
from tests.factories import make_parts, random_prompts
from tide_core.batch import RowResult, RowStep
from tide_core.execution.graphs import cycle_graph, cycle_shape, masks
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.execution.graphs.masks import MaskBuffer
from tide_core.request import Grammar, SamplingParams
from tide_core.sampling.grammar import FIRST_MISFITS

BLOCK = {"kind": "block", "taps": (2, 3), "draft_threshold": 0.0}
WORDS = Grammar("regex", r"[a-z ,.]{60,}")
HALF = Grammar("regex", "[^a-m]*")
LISTED = Grammar("regex", r"([a-f]{2,5}, ?){8,}[0-9]{6}")
KINDS: list[dict[str, Any]] = [
    {"grammar": WORDS, "mode": "full"},
    {"grammar": WORDS},
    {"grammar": WORDS, "mode": "bounded", "epsilon": 0.1},
    {"grammar": LISTED},
    {"grammar": LISTED, "logprobs": 2},
    {"grammar": LISTED, "repetition_penalty": 1.3, "logit_bias": {40: 2.0}},
    {"grammar": Grammar("choice", '["red", "dark green", "blue and more"]'), "ignore_eos": False},
]


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 7, **changes})


# Those of mode bounded differ, as the plain path masks its drafts.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.get("mode") != "bounded"], ids=str)
def test_greedy_rows_get_what_the_plain_path_gives(kind: dict[str, Any], request: pytest.FixtureRequest) -> None:
    prompts, params = random_prompts(3, 11), asked(**kind)
    with poisoned(exit_parts(kernels="reference", artefact=BLOCK)) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(prompts, params)
    assert any(row.request.mask is not None for rows in cycles for row in rows), "in cycles"
    assert all(answer.error is None for answer in answers)
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])


def test_drafts_are_accepted_under_a_grammar_and_tokens_are_those_of_full_depth(cycles: list[list[RowStep]]) -> None:
    prompts = random_prompts(4, 11)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        full, verified = (engine.generate(prompts, asked(grammar=WORDS, mode=mode)) for mode in ("full", "verified"))
    assert all_ids(verified) == all_ids(full)
    assert all(re.fullmatch("[a-z ,.]*", answer.text) for answer in verified)
    assert sum(answer.usage.num_accepted for answer in verified) > 0
    assert any(layer < 4 for answer in verified for layer in exit_layers(answer))


def test_a_budget_keeps_no_draft_that_the_grammar_forbids(cycles: list[list[RowStep]]) -> None:
    wide = asked(grammar=WORDS, mode="bounded", epsilon=0.9, margin=1e30, max_tokens=40)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(random_prompts(4, 11), wide)
    assert any(token.gap is not None for answer in answers for token in answer.tokens)
    assert all(re.fullmatch("[a-z ,.]*", answer.text) for answer in answers)


def test_rows_of_every_kind_share_a_cycle_and_get_what_they_get_alone(cycles: list[list[RowStep]]) -> None:
    kinds = [*KINDS, {}, {"mode": "full"}, {"temperature": 0.8}, {"grammar": LISTED, "temperature": 0.8}]
    prompts, params = random_prompts(len(kinds), 11), [asked(**kind) for kind in kinds]
    with poisoned(exit_parts(artefact=BLOCK, max_rows=12)) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert max(len(rows) for rows in cycles) == len(kinds)
    assert all(answer.error is None for answer in together)
    assert all_ids(together) == all_ids(alone)


@pytest.fixture
def num_masks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Cycles that masks were computed for, under `sent`."""
    count: Counter[str] = Counter()
    send = MaskBuffer.send

    def counted(self: MaskBuffer, *arguments: Any) -> set[int]:
        count["sent"] += 1
        return send(self, *arguments)

    monkeypatch.setattr(MaskBuffer, "send", counted)
    return count


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Of every attempt to launch ahead: which of its rows follow a grammar."""
    tried: list[list[bool]] = []
    launch = GraphCycles._launch_ahead

    def noted(self: GraphCycles, rows: Any, *more: Any) -> InFlightStep | None:
        tried.append([row.request.mask is not None for row in rows])
        return launch(self, rows, *more)

    monkeypatch.setattr(GraphCycles, "_launch_ahead", noted)
    return tried


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("most", [0.0, 0.1, 1.0])
def test_with_masks_or_checked_afterwards_greedy_rows_get_the_tokens_of_the_plain_path(
    logprobs: int | None,
    most: float,
    cycles: list[list[RowStep]],
    num_masks: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """About half of all tokens fit, drafts among them, so both are seen. Now and then none of the likeliest fits."""
    monkeypatch.setattr(masks, "MOST_MISFITS", most)
    prompts, params = random_prompts(3, 11), asked(grammar=HALF, max_tokens=40, logprobs=logprobs)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(prompts, params)
        sent = num_masks["sent"]
        free = engine.generate(prompts, asked(max_tokens=40))
    assert num_masks["sent"] == sent, "free rows have none"
    assert sent < len(cycles) / 8 if most == 1.0 else sent > len(cycles) / 8
    assert all_ids(answers) != all_ids(free)
    assert all(re.fullmatch("[^a-m]*", answer.text) for answer in answers)
    assert sum(answer.usage.num_accepted for answer in answers) > 0
    assert all(len(answer.tokens) == 40 for answer in answers)
    for answer in answers:
        assert answer.usage.num_accepted == sum(layer < 4 for layer in exit_layers(answer))
    with poisoned(exit_parts(kernels="reference", artefact=BLOCK)) as engine:
        plain = engine.generate(prompts, params)
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])
        assert [[i for i, _ in token.top_logprobs] for token in one.tokens] == [
            [i for i, _ in token.top_logprobs] for token in other.tokens
        ]


def test_where_none_of_the_likeliest_tokens_fits_a_mask_chooses(
    cycles: list[list[RowStep]], num_masks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MOST_MISFITS", 1.0)
    prompts, params = random_prompts(3, 11), asked(grammar=HALF, max_tokens=30)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        among_many = engine.generate(prompts, params)
    many = num_masks.pop("sent", 0)
    for module in (cycle_shape, cycle_graph):
        monkeypatch.setattr(module, "MAX_LOGPROBS", 2)
    del cycles[:]
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        among_two = engine.generate(prompts, params)
    assert many < num_masks["sent"] < len(cycles), "others have none"
    assert all_ids(among_two) == all_ids(among_many)


def test_launched_ahead_or_not_tokens_are_the_same(
    cycles: list[list[RowStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without masks, of rows that are sampled or not, and end at different times."""
    prompts = random_prompts(5, 11)
    params = [
        asked(grammar=HALF, max_tokens=40),
        asked(max_tokens=30),
        asked(grammar=WORDS),
        asked(grammar=WORDS, temperature=0.8, max_tokens=25),
        asked(grammar=HALF, repetition_penalty=1.3, max_tokens=33),
    ]
    found = []
    for most in (0.0, 0.1, 1.0):
        monkeypatch.setattr(masks, "MOST_MISFITS", most)
        with poisoned(exit_parts(artefact=BLOCK)) as engine:
            found.append(all_ids(engine.generate(prompts, params)))
    monkeypatch.setattr(GraphCycles, "_launch_ahead", lambda *_: None)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        found.append(all_ids(engine.generate(prompts, params)))
    assert found[0] == found[1] == found[2] == found[3]


def test_a_row_with_masks_loses_no_step(
    cycles: list[list[RowStep]], ahead: list[list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all tokens do not fit: each costs a row a step if it is seen when it is read."""
    monkeypatch.setattr(masks, "MOST_MISFITS", 0.0)
    params = [asked(grammar=HALF, max_tokens=40, mode="full"), asked(grammar=HALF, max_tokens=40, temperature=0.9)]
    for one in params:
        del cycles[:], ahead[:]
        with poisoned(make_parts()) as engine:
            engine.generate(random_prompts(1, 11), one)
        assert len(cycles) == 39, "the first token is that of the prompt"
        assert len(ahead) == 39
        assert all(with_grammar == [True] for with_grammar in ahead)


def test_a_wait_for_drafts_is_no_work_of_the_host(
    cycles: list[list[RowStep]], num_masks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the planner would take the host for slow and draft more, for which the host would wait longer."""
    drafts_s, waits = 0.01, list[float]()
    fetch, read = MaskBuffer.fetch, GraphCycles._read

    def fetched(self: MaskBuffer, drafted: torch.Tensor) -> None:
        fetch(self, drafted)
        self._fetched = SimpleNamespace(record=lambda: None, synchronize=lambda: time.sleep(drafts_s))

    def noted(self: GraphCycles, *arguments: Any) -> list[RowResult]:
        results = read(self, *arguments)
        waits.append(self._timing.wait_s)
        return results

    monkeypatch.setattr(MaskBuffer, "fetch", fetched)
    monkeypatch.setattr(GraphCycles, "_read", noted)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        engine.generate(random_prompts(1, 11), asked(grammar=WORDS, temperature=0.8))
    assert len(waits) == num_masks["sent"] > 0, "a sampled row has masks in every cycle"
    assert min(waits) >= drafts_s


@pytest.mark.parametrize("vocab_size", [64, 75])
def test_a_mask_leaves_the_logits_whose_bits_are_set(vocab_size: int) -> None:
    shape = cycle_shape.CycleShape(2, 1, 64, masks=True)
    buffer = MaskBuffer(shape, vocab_size, torch.device("cpu"))
    logits = torch.randn(shape.tokens, vocab_size)
    assert torch.equal(buffer.apply(logits), logits), "all are allowed at first"
    allowed = torch.rand(shape.tokens, vocab_size) < 0.5
    allowed[0, 31], allowed[1, 31] = True, False
    for token, row in enumerate(allowed):
        packed = np.packbits(row.numpy(), bitorder="little")
        packed = np.pad(packed, (0, buffer._words[token].nbytes - len(packed)))
        buffer._words[token] = packed.view(np.int32)
    buffer._device.copy_(buffer._host)
    assert torch.equal(buffer.apply(logits), logits.masked_fill(~allowed, -torch.inf))


@pytest.mark.parametrize("num_in_time", [0, 1, 3, 8])
def test_masks_that_come_late_are_done_without_where_tokens_can_be_checked(
    num_in_time: int, cycles: list[list[RowStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are ready before the deep pass ends: after none, some or all drafts of a row."""
    monkeypatch.setattr(masks, "MOST_MISFITS", 0.0)
    prompts = random_prompts(4, 11)
    params = [
        asked(grammar=HALF, max_tokens=30),
        asked(grammar=WORDS, temperature=0.8),
        asked(grammar=HALF, mode="full"),
        asked(grammar=Grammar("regex", "[^n-z]*"), logprobs=2, max_tokens=25),
    ]
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        in_time = engine.generate(prompts, params)
    asked_for, send = [0], MaskBuffer.send

    def counted(self: MaskBuffer, *arguments: Any) -> set[int]:
        asked_for[0] = 0
        complete = send(self, *arguments)
        seen.append(len(complete))
        return complete

    def is_done(_: Any) -> bool:
        asked_for[0] += 1
        return asked_for[0] > num_in_time

    seen: list[int] = []
    monkeypatch.setattr(MaskBuffer, "send", counted)
    monkeypatch.setattr(cycle_graph.HostBuffer, "is_done", is_done)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        late = engine.generate(prompts, params)
    assert all_ids(late) == all_ids(in_time)
    for one, other in zip(late, in_time, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens])
    assert min(seen[:4]) >= 1, "the sampled row has all of its masks"
    assert min(seen[:4]) == 1 if num_in_time == 0 else max(seen) > 1, "others as far as time allows"


def test_a_step_whose_choice_was_never_launched_harms_none(cycles: list[list[RowStep]]) -> None:
    """Rows that are aborted leave one in flight."""
    prompts, kind = random_prompts(2, 11), asked(grammar=WORDS, temperature=0.8, max_tokens=40)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        alone = engine.generate(prompts[1:], kind)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        for tokens in (2, 3, 7):
            short = asked(grammar=HALF, max_tokens=tokens)
            ended: Any = engine.generate_as_completed([prompts[0], prompts[0]], [kind, short])
            next(ended)
            ended.close()
            assert all_ids(engine.generate(prompts[1:], kind)) == all_ids(alone)


def test_rows_have_masks_until_most_tokens_fit() -> None:
    mask = FakeMask()
    request = SimpleNamespace(mask=mask, params=asked(), adjusts_logits=False)
    row: Any = SimpleNamespace(request=request, output_ids=(), policy=SimpleNamespace(budget=None))
    result = RowResult((1,), (4,), (None,), 1)
    assert masks.needs_mask(row), "at the beginning of an answer"
    seen = []
    for fitting in [True] * 25 + [False]:
        mask.fitting = fitting
        if masks.needs_mask(row):
            masks.observe_masked(row, result, lambda _: ((1, 0), (-0.5, -1.0)))
        else:
            masks.obeyed(row, result, lambda _: ((0,), (-0.5,)), 4)
        seen.append(masks.needs_mask(row))
    assert seen.index(False) in range(10, 20)
    assert not seen[24]
    assert seen[25], "after a token that does not fit"
    mask.misfits = 0.0
    masks.observe_masked(row, result, lambda _: ((0, 1), (-0.5, -1.0)))
    assert mask.misfits > 0.0, "another token would have been chosen without the mask"


class FakeMask:
    """Allows token 0 alone, or any."""

    masked_at, misfits, fitting = -1, FIRST_MISFITS, True

    def num_fitting(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        return len(token_ids) if self.fitting else 0

    def allowed(self, output_ids: Sequence[int]) -> list[bool]:
        return [True, self.fitting]


def test_fewest_tokens_beside_a_grammar_take_the_plain_path(cycles: list[list[RowStep]]) -> None:
    params = asked(grammar=Grammar("choice", '["red"]'), min_tokens=20, ignore_eos=False)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        (answer,) = engine.generate(random_prompts(1, 11), params)
    assert answer.text == "red"
    assert not cycles


def test_samples_under_a_grammar_have_the_distribution_of_full_depth(cycles: list[list[RowStep]]) -> None:
    grammar, num = Grammar("regex", "[ab]{2}x*"), 200
    kinds = [asked(grammar=grammar, temperature=0.9, max_tokens=2, seed=n, mode="verified") for n in range(num)]
    full = [asked(grammar=grammar, temperature=0.9, max_tokens=2, seed=n, mode="full") for n in range(num, 4 * num)]
    prompt = random_prompts(1, 11)[0]
    with poisoned(exit_parts(artefact=BLOCK, max_rows=64, max_batch_tokens=1024)) as engine:
        observed = [answer.text for answer in engine.generate([prompt] * num, kinds)]
        expected = [answer.text for answer in engine.generate([prompt] * len(full), full)]
    texts = sorted(set(expected) | set(observed))
    assert all(re.fullmatch("[ab]{2}", text) for text in texts)
    shares = {text: max(expected.count(text), 1) / len(expected) for text in texts}
    assert chi_square_p(Counter(observed), shares) > LEAST_P


def test_without_an_artefact_rows_follow_their_grammar_at_full_depth(request: pytest.FixtureRequest) -> None:
    prompts, params = random_prompts(3, 11), asked(grammar=LISTED)
    with poisoned(make_parts(kernels="reference")) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(make_parts()) as engine:
        answers = engine.generate(prompts, params)
    assert cycles
    assert all_ids(answers) == all_ids(plain)

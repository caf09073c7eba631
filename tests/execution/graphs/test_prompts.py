"""Prompts in passes of fixed shapes against the plain engine; here on the CPU, where the CUDA kernels' twin stands in
for them and nothing is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import make_parts, random_prompts
from tests.kernels.twin import engine_kernels
from tide_core.batch import RowStep
from tide_core.engine import assemble
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import prompts as graph_prompts
from tide_core.execution.graphs.in_flight import Launched
from tide_core.execution.graphs.prompts import FEW_TOKENS, MAX_PROMPTS, PROMPT_SIZES, TOKENS_PER_ROW, GraphPrompts
from tide_core.kv.block_manager import BlockTable
from tide_core.kv.cache import RowSpan, StepIndex
from tide_core.request import NO_EXITS, ExitPolicy, Request, SamplingParams

FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "granite", "cohere2")
BLOCK = {"kind": "block", "taps": (2, 3)}
SAYS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"threshold": 0.3},
    {"mode": "fast", "threshold": 0.3},
    {"threshold": 0.3, "temperature": 0.9, "seed": 5},
    {"logprobs": 3, "threshold": 0.3},
    {"threshold": 0.3, "repetition_penalty": 1.3},
    {"threshold": 0.3, "logit_bias": {7: 100.0}},
]


def asked(max_tokens: int = 12, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Engines made from now on run prompts in passes of fixed shapes; the tokens of the rows of each."""
    seen: list[list[int]] = []
    start = GraphPrompts.start

    def counted(self: GraphPrompts, rows: Any, **how: Any) -> Launched:
        seen.append([len(row.token_ids) for row in rows])
        return start(self, rows, **how)

    monkeypatch.setattr(GraphPrompts, "start", counted)
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return seen


def logprobs(answers: list[Completion]) -> list[list[float]]:
    return [[token.logprob for token in answer.tokens if token.logprob is not None] for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_what_the_plain_engine_makes_of_them(family: str, request: pytest.FixtureRequest) -> None:
    prompts = [*random_prompts(2, 11), random_prompts(1, 70)[0]]
    with poisoned(make_parts(family, kernels="reference")) as engine:
        plain = engine.generate(prompts, asked())
    pieces = request.getfixturevalue("pieces")
    with poisoned(make_parts(family, max_batch_tokens=128)) as engine:
        answers = engine.generate(prompts, asked())
    assert all_ids(answers) == all_ids(plain)
    assert pieces == [[11, 11, 70]], "one pass for all of them"


@pytest.mark.parametrize("params", SAYS, ids=str)
@pytest.mark.parametrize("artefact", [{}, {"kind": "mlp"}, BLOCK], ids=str)
def test_what_the_exits_keep_of_a_prompt_is_what_the_plain_engine_keeps(
    artefact: dict[str, Any], params: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are made from it: the same tokens leave at the same layers."""
    prompts = random_prompts(3, 21)
    with poisoned(exit_parts(artefact=artefact, kernels="reference")) as engine:
        plain = engine.generate(prompts, asked(**params))
    pieces = request.getfixturevalue("pieces")
    monkeypatch.setattr(assemble, "GraphCycles", lambda *args, **rest: None)  # prompts alone are judged here
    with poisoned(exit_parts(artefact=artefact)) as engine:
        answers = engine.generate(prompts, asked(**params))
    assert all_ids(answers) == all_ids(plain)
    assert [exit_layers(answer) for answer in answers] == [exit_layers(answer) for answer in plain]
    for here, there in zip(logprobs(answers), logprobs(plain), strict=True):
        assert here == pytest.approx(there, abs=1e-4)
    assert pieces == [[21, 21, 21]]


@pytest.mark.parametrize(
    "settings",
    [
        [{"threshold": 0.3}, {"mode": "full"}],
        [{}, {"temperature": 0.9, "seed": 5}, {"logprobs": 2}],
    ],
    ids=["with exits and without", "the likeliest token and more than that"],
)
def test_rows_that_ask_for_different_things_share_a_pass(
    settings: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    prompts, wishes = random_prompts(len(settings), 21), [asked(**each) for each in settings]
    with poisoned(exit_parts(artefact=BLOCK, kernels="reference")) as engine:
        plain = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts, wishes, strict=True)]
    pieces = request.getfixturevalue("pieces")
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        answers = engine.generate(prompts, wishes)
    assert all_ids(answers) == all_ids(plain)
    assert list(map(len, logprobs(answers))) == list(map(len, logprobs(plain)))
    assert pieces == [[21] * len(prompts)]


def test_the_fewest_tokens_of_an_answer_count_from_the_one_behind_the_prompt(pieces: list[list[int]]) -> None:
    [prompt] = random_prompts(1, 21)
    with poisoned(make_parts()) as engine:
        likeliest = engine.generate([prompt], asked())[0].tokens[0].token_id
        short = engine.generate([prompt], asked(stop_ids=(likeliest,)))[0]
        longer = engine.generate([prompt], asked(stop_ids=(likeliest,), min_tokens=3))[0]
    assert [token.token_id for token in short.tokens] == [likeliest]
    assert longer.tokens[0].token_id != likeliest
    assert len(longer.tokens) >= 3
    assert len(pieces) == 3


def test_what_is_kept_of_a_piece_stands_behind_the_token_before_it_and_nowhere_for_rows_without_exits(
    pieces: list[list[int]],
) -> None:
    parts = exit_parts(artefact=BLOCK)
    prompts, size = parts.runner.prompts, parts.runner.cache.block_size
    assert prompts is not None
    exits = ExitPolicy("verified", (0.3,))
    steps = []
    for start, num, policy in ((0, 5, exits), (size + 3, 4, exits), (2, 6, NO_EXITS)):
        table = BlockTable()
        parts.core.scheduler.blocks.allocate(table, start + num + size)
        table.advance(start)
        steps.append(RowStep(Request("r", (1,), SamplingParams(), seed=0), table, (1,) * num, (), True, policy))
    index = StepIndex.build([RowSpan(s.table.block_ids, s.start, len(s.token_ids)) for s in steps], size)
    (slots, _), (before, _), (distances, _) = prompts._exit_columns(steps, index)
    expected = [
        (
            step.table.block_ids[at // size] * size + at % size if step.policy.may_exit else -1,
            step.table.block_ids[max(at - 1, 0) // size] * size + max(at - 1, 0) % size,
            min(at, 1),
        )
        for step in steps
        for at in range(step.start, step.start + len(step.token_ids))
    ]
    assert list(zip(slots.tolist(), before.tolist(), distances.tolist(), strict=True)) == expected


@pytest.mark.parametrize("budget", [24, 64])
def test_pieces_of_a_prompt_make_the_prompt(budget: int, request: pytest.FixtureRequest) -> None:
    prompts = [random_prompts(1, 101)[0], random_prompts(2, 30)[1]]
    with poisoned(exit_parts(artefact=BLOCK, kernels="reference")) as engine:
        plain = engine.generate(prompts, asked(threshold=0.3))
    pieces = request.getfixturevalue("pieces")
    settings = {"max_rows": 4, "max_batch_tokens": budget}
    with poisoned(exit_parts(artefact=BLOCK, **settings), **settings) as engine:
        answers = engine.generate(prompts, asked(threshold=0.3))
    assert all_ids(answers) == all_ids(plain)
    assert len(pieces) > 1
    assert max(sum(piece) for piece in pieces) <= budget


def test_many_prompts_go_in_several_passes_and_none_of_them_sees_the_others(request: pytest.FixtureRequest) -> None:
    prompts = random_prompts(MAX_PROMPTS + 4, 9)
    settings: dict[str, Any] = {"max_rows": MAX_PROMPTS + 4, "max_batch_tokens": 512, "prefix_caching": False}
    pieces = request.getfixturevalue("pieces")
    with poisoned(exit_parts(artefact=BLOCK, **settings), **settings) as engine:
        together = engine.generate(prompts, asked(threshold=0.3))
        assert pieces == [[9] * len(prompts)]
        alone = [engine.generate([prompt], asked(threshold=0.3))[0] for prompt in prompts]
    assert all_ids(together) == all_ids(alone)


def test_a_cached_beginning_is_not_run_again(request: pytest.FixtureRequest) -> None:
    prompt = random_prompts(1, 70)[0]
    pieces = request.getfixturevalue("pieces")
    with poisoned(exit_parts(artefact=BLOCK, max_batch_tokens=128)) as engine:
        first, again = (engine.generate([prompt], asked(threshold=0.3))[0] for _ in range(2))
    assert all_ids([again]) == all_ids([first])
    assert pieces[0] == [70]
    assert pieces[1][0] < 20


def test_long_pieces_and_long_contexts_are_left_to_the_plain_path(
    pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompts, "PROMPT_SIZES", (16, 32))
    monkeypatch.setattr(graph_prompts, "MAX_CONTEXT", 64)
    settings = {"max_rows": 4, "max_batch_tokens": 64, "prefix_caching": False}
    with poisoned(make_parts(**settings), **settings) as engine:
        engine.generate([random_prompts(1, 40)[0]], asked())
        assert not pieces, "40 tokens are too many for a pass of 32"
        engine.generate([random_prompts(1, 64 + 20)[0]], asked())
        assert not pieces, "the first piece is too long, the second too far along"
        engine.generate([random_prompts(1, 32)[0]], asked())
    assert pieces == [[32]]


@pytest.mark.parametrize(
    ("num", "length", "size", "is_short"),
    [
        *((1, 9, 16, True), (2, 8, 16, True), (2, 9, 32, True), (5, 9, 48, True), (1, 33, 48, True), (8, 8, 64, True)),
        *((1, 41, 48, False), (3, 2, 16, False), (7, 6, 48, False), (3, 25, 96, False)),
    ],
)
def test_prompts_run_in_the_smallest_shape_that_holds_their_tokens_rows_and_contexts(
    num: int, length: int, size: int, is_short: bool, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_prompts, "SHORT_CONTEXT", 40)
    settings = {"max_rows": 8, "max_batch_tokens": 256, "prefix_caching": False}
    parts = make_parts(**settings)
    with poisoned(parts, **settings) as engine:
        together = engine.generate(random_prompts(num, length), asked())
        assert pieces == [[length] * num]
        assert parts.runner.prompts is not None
        assert list(parts.runner.prompts._passes) == [(size, False, is_short)]
        alone = [engine.generate([prompt], asked())[0] for prompt in random_prompts(num, length)]
    assert all_ids(together) == all_ids(alone)


def test_a_prompt_whose_logits_are_no_numbers_ends_alone(pieces: list[list[int]]) -> None:
    prompts = random_prompts(3, 9)
    with poisoned(make_parts()) as engine:
        sound = engine.generate(prompts, asked())
    parts = make_parts()
    head, spoiled = parts.runner.adapter.head, [True]

    def once(states: torch.Tensor) -> torch.Tensor:
        logits = head(states)
        if spoiled and len(states) == 32 // TOKENS_PER_ROW:  # the prompts, which come first
            spoiled.clear()
            logits[1] = float("nan")
        return logits

    parts.runner.adapter.head = once  # type: ignore[method-assign]
    with poisoned(parts) as engine:
        first, bad, last = engine.generate(prompts, asked())
    assert all_ids([first, last]) == all_ids([sound[0], sound[2]])
    assert bad.finish_reason == "error"
    assert not spoiled


def test_shapes_made_beforehand_are_those_that_prompts_run_in(pieces: list[list[int]]) -> None:
    parts = exit_parts(artefact=BLOCK)
    prompts = parts.runner.prompts
    assert prompts is not None
    for shape in prompts.shapes():
        prompts.prepare(shape)
    made = set(prompts._passes)
    both = (False, True)
    assert made >= {(size, keeps, False) for size in PROMPT_SIZES for keeps in both}
    assert made >= {(size, keeps, True) for size in PROMPT_SIZES for keeps in both if size <= FEW_TOKENS}
    with poisoned(parts) as engine:
        engine.generate([random_prompts(1, 70)[0]], asked(threshold=0.3))
    assert set(prompts._passes) == made

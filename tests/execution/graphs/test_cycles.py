"""Whole cycles in one go against the plain engine; here on the CPU, where the CUDA kernels' twin stands in for them and
nothing is captured."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import make_parts, random_prompts
from tests.kernels.twin import engine_kernels
from tide_core.engine import assemble
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import branches, cycle_graph
from tide_core.execution.graphs.base import TOKEN_SIZES
from tide_core.execution.graphs.branches import branches_for
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.cycle_output import OutputBuffer
from tide_core.execution.graphs.in_flight import InFlightStep, Launched
from tide_core.execution.graphs.prompts import TOKENS_PER_ROW
from tide_core.exits.propose import Exits
from tide_core.request import Audit, SamplingParams

FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "granite", "cohere2")
GREEDY: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
BLOCK = {"kind": "block", "taps": (2, 3)}
NARROW = {**BLOCK, "sizes": (("inner", 16), ("head_size", 8))}
HEADS = [{}, {"kind": "mlp"}, BLOCK, NARROW]


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Engines made from now on run cycles in one go; the drafts of the rows of each cycle."""
    seen: list[list[int]] = []
    start = GraphCycles.start

    def counted(self: GraphCycles, rows: Any, **how: Any) -> Launched:
        seen.append([row.num_drafts for row in rows])
        return start(self, rows, **how)

    monkeypatch.setattr(GraphCycles, "start", counted)
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return seen


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the plain engine says; asked before `cycles` is."""

    def say(prompts: list[list[int]], params: SamplingParams, **settings: Any) -> list[Completion]:
        with poisoned(exit_parts(kernels="reference", **settings)) as engine:
            return engine.generate(prompts, params)

    return say


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_at_full_depth_is_a_cycle_without_drafts(family: str, request: pytest.FixtureRequest) -> None:
    prompts, params = [*random_prompts(2, 11), random_prompts(1, 70)[0]], SamplingParams(**GREEDY)
    with poisoned(make_parts(family, kernels="reference")) as engine:
        plain = engine.generate(prompts, params)
    cycles = request.getfixturevalue("cycles")
    with poisoned(make_parts(family)) as engine:
        answers = engine.generate(prompts, params)
    assert all_ids(answers) == all_ids(plain)
    assert cycles.count([0, 0, 0]) > 8, "the three rows decode together"


@pytest.mark.parametrize("artefact", HEADS, ids=str)
@pytest.mark.parametrize(
    "mode", [{"threshold": 0.3}, {"threshold": 0.3, "mode": "bounded", "epsilon": 0.2, "margin": 1.0}], ids=str
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_tokens_scores_layers_and_audits_are_those_of_the_plain_engine(
    artefact: dict[str, Any],
    mode: dict[str, Any],
    num_rows: int,
    plainly: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threshold is one that the request names: drafts below the calibrated one count here if they are right."""
    prompts, params = random_prompts(num_rows, 11), SamplingParams(**GREEDY, **mode)
    plain = plainly(prompts, params, artefact=artefact)
    monkeypatch.setattr(branches, "MAX_BRANCHES", 1)
    cycles = request.getfixturevalue("cycles")
    parts = exit_parts(artefact=artefact)
    parts.runner.lookahead_steps = lambda: 0  # else the last cycle drafts more than the answer can use
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, params)
    assert cycles
    assert max(map(max, cycles)) == 4
    assert all_ids(answers) == all_ids(plain)
    for one, other in zip(answers, plain, strict=True):
        assert exit_layers(one) == exit_layers(other)
        assert [token.audit for token in one.tokens] == [token.audit for token in other.tokens]
        gaps = [[token.gap for token in answer.tokens] for answer in (one, other)]
        assert gaps[0] == [None if gap is None else pytest.approx(gap, abs=1e-5) for gap in gaps[1]]
        for token, twin in zip(one.tokens, other.tokens, strict=True):
            assert token.score == (None if twin.score is None else pytest.approx(twin.score, abs=1e-5))
        assert one.usage.num_drafts == other.usage.num_drafts
        assert one.usage.num_accepted == other.usage.num_accepted
        assert one.usage.deep_passes == other.usage.deep_passes


@pytest.mark.parametrize(("params", "writes"), [({"mode": "full"}, False), ({"threshold": 0.3}, True)], ids=str)
def test_exit_state_is_written_only_for_rows_that_may_exit(
    params: dict[str, Any], writes: bool, cycles: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(kind: Any, name: str) -> None:
        work = getattr(kind, name)

        def noted(self: Any, *given: Any) -> None:
            order.append(name)
            work(self, *given)

        monkeypatch.setattr(kind, name, noted)

    note(OutputBuffer, "send")
    note(Exits, "write_exit_state")
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        engine.generate(random_prompts(2, 11), SamplingParams(**GREEDY, **params))
    of_each = ["write_exit_state", "send"] if writes else ["send"]
    assert order[-len(of_each) * len(cycles) :] == of_each * len(cycles), "prompts come before"


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_what_another_stream_reads_lives_until_it_is_joined(
    kind: dict[str, Any], cycles: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph uses memory again once nothing refers to it, while the streams of scores and exit state may still run."""
    read: list[weakref.ref[torch.Tensor]] = []
    joined: list[int] = []
    draft, write, join = Exits.draft, Exits.write_exit_state, cycle_graph._join

    def drafting(self: Exits, *given: Any) -> Any:
        found = draft(self, *given)
        read.extend(map(weakref.ref, found))
        return found

    def writing(self: Exits, view: Any, states: Any, normed: Any, gathered: Any, *given: Any) -> None:
        if read:  # of a cycle; prompts have no drafts
            read.extend(map(weakref.ref, (states, normed, gathered)))
        write(self, view, states, normed, gathered, *given)

    def joining(other: Any) -> None:
        assert all(tensor() is not None for tensor in read)
        joined.append(len(read))
        join(other)

    monkeypatch.setattr(Exits, "draft", drafting)
    monkeypatch.setattr(Exits, "write_exit_state", writing)
    monkeypatch.setattr(cycle_graph, "_join", joining)
    monkeypatch.setattr(cycle_graph.CycleGraph, "_choose", _then(cycle_graph.CycleGraph._choose, read.clear))
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        engine.generate(random_prompts(2, 11), SamplingParams(**{**GREEDY, **kind}, threshold=0.0))
    assert max(joined) == 4 * 2 + 3


def _then(first: Any, then: Any) -> Any:
    def both(self: Any, *given: Any) -> None:
        first(self, *given)
        then()

    return both


def test_a_draft_that_is_right_counts_whatever_its_score(plainly: Any, request: pytest.FixtureRequest) -> None:
    artefact, prompts, params = {"draft_threshold": 0.999}, random_prompts(2, 11), SamplingParams(**GREEDY)
    plain = plainly(prompts, params, artefact=artefact)
    request.getfixturevalue("cycles")
    with poisoned(exit_parts(artefact=artefact)) as engine:
        answers = engine.generate(prompts, params)
        asked = engine.generate(prompts, SamplingParams(**GREEDY, threshold=0.999))
    assert all_ids(answers) == all_ids(asked) == all_ids(plain)
    early = [sum(layer == 1 for answer in some for layer in exit_layers(answer)) for some in (plain, answers, asked)]
    assert early[0] == early[2] == 0
    assert early[1] > 10


def test_rows_of_every_kind_share_a_step_and_get_what_they_get_alone(cycles: list[list[int]]) -> None:
    """Prompts that arrive, rows that draw, rows that skip layers, rows with few tokens left."""
    kinds: list[dict[str, Any]] = [
        {"mode": "full"},
        {"max_tokens": 3},
        {"mode": "verified", "temperature": 0.8, "seed": 3},
        {"mode": "fast", "threshold": 0.3},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"mode": "bounded", "epsilon": 0.05},
        {"max_tokens": 14},
    ]
    prompts, params = random_prompts(len(kinds), 11), [SamplingParams(**{**GREEDY, **kind}) for kind in kinds]
    with poisoned(exit_parts(artefact=BLOCK, max_rows=8)) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert all_ids(together) == all_ids(alone)
    assert any(len(set(drafts)) > 2 for drafts in cycles), "rows with different numbers of drafts"


def test_more_rows_than_a_launch_takes_go_in_several(cycles: list[list[int]]) -> None:
    most = TOKEN_SIZES[-1] // 5
    prompts = random_prompts(most + 3, 5)
    with poisoned(exit_parts(max_rows=most + 3, max_batch_tokens=1024)) as engine:
        together = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        alone = engine.generate(prompts[-4:], SamplingParams(max_tokens=12, ignore_eos=True))
    assert max(map(len, cycles)) == most + 3
    assert all_ids(together)[-4:] == all_ids(alone)


def test_text_past_its_end_is_neither_emitted_nor_counted_as_drafted(cycles: list[list[int]]) -> None:
    [prompt] = random_prompts(1, 11)
    with poisoned(exit_parts()) as engine:
        [whole] = engine.generate([prompt], SamplingParams(**GREEDY))
        stop = whole.tokens[9].token_id
        first = next(place for place, token in enumerate(whole.tokens) if token.token_id == stop)
        [cut] = engine.generate([prompt], SamplingParams(**GREEDY, stop_ids=(stop,)))
    assert all_ids([cut])[0] == all_ids([whole])[0][: first + 1]
    assert cut.finish_reason == "stop"


def test_a_row_with_a_number_that_is_none_ends_alone(cycles: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_BRANCHES", 1)
    prompts, params = random_prompts(3, 11), SamplingParams(**GREEDY)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        sound = engine.generate(prompts, params)
    parts = exit_parts(artefact=BLOCK)
    adapter, head, seen = parts.runner.adapter, parts.runner.adapter.head, []
    of_prompts = 48 // TOKENS_PER_ROW  # that fit, with 33 tokens

    def spoiled(normed: torch.Tensor) -> torch.Tensor:
        logits = head(normed)
        if len(logits) > 3 and len(logits) != of_prompts:  # a cycle, in which all rows have as many tokens at first
            seen.append(len(logits))
            # The newest token of the second row, then its first draft.
            logits[5 if len(seen) == 1 else 6] = float("nan")
        return logits

    adapter.head = spoiled  # type: ignore[method-assign]
    with poisoned(parts) as engine:
        first, bad, last = engine.generate(prompts, params)
    assert all_ids([first, last]) == all_ids([sound[0], sound[2]])
    assert bad.finish_reason == "error"
    assert "numerical_error: the largest logit of the row is nan" in str(bad.error)
    assert all_ids([bad])[0] == all_ids([sound[1]])[0][: len(bad.tokens)]


def test_a_score_that_is_no_number_drafts_nothing_and_changes_no_token(cycles: list[list[int]]) -> None:
    prompts, params = random_prompts(2, 11), SamplingParams(**GREEDY)
    with poisoned(exit_parts(artefact=BLOCK)) as engine:
        sound = engine.generate(prompts, params)
    parts = exit_parts(artefact=BLOCK)
    assert parts.runner.exits is not None
    with torch.no_grad():
        parts.runner.exits._scorers[0].weights.out.fill_(float("nan"))
    with poisoned(parts) as engine:
        broken = engine.generate(prompts, params)
    assert all_ids(broken) == all_ids(sound)
    assert all(token.audit is Audit.VERIFIED for answer in broken for token in answer.tokens)
    assert {layer for answer in broken for layer in exit_layers(answer)} == {max(exit_layers(sound[0]))}


def test_few_shapes_come_up(cycles: list[list[int]]) -> None:
    parts = exit_parts(max_rows=8)
    with poisoned(parts) as engine:
        for num_rows in (1, 3, 5, 7):
            engine.generate(random_prompts(num_rows, 11), SamplingParams(**GREEDY))
    shapes = parts.runner.cycles._graphs  # type: ignore[union-attr]
    assert {shape.rows for shape in shapes} <= {1, 2, 4, 8}
    assert len(shapes) <= 4 * 5 + 4


def test_what_a_row_counts_as_run_is_every_pass_it_was_in(
    cycles: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three drafts: three times the first segment, then four tokens through all layers, for each of its branches."""
    passes: list[tuple[int, int]] = []
    results = InFlightStep.results

    def noted(self: InFlightStep, *given: Any) -> Any:
        passes.append((self.branches, self.drafts))
        return results(self, *given)

    monkeypatch.setattr(InFlightStep, "results", noted)
    with poisoned(exit_parts(drafts=3)) as engine:
        [answer] = engine.generate(random_prompts(1, 11), SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(passes) == len(cycles)
    num_layers = max(exit_layers(answer))
    assert {(branches_for(1, drafts, 16), drafts) for _, drafts in passes} == {*passes}
    assert (2, 3) in passes
    expected = num_layers + sum(each * (drafts * 1 + (drafts + 1) * num_layers) for each, drafts in passes)
    assert answer.usage.layers_run == expected


def test_shapes_that_were_prepared_are_those_that_come_up(cycles: list[list[int]]) -> None:
    parts = exit_parts(max_rows=6)
    runner = parts.runner.cycles
    assert runner is not None
    shapes = runner.shapes(6, 4)
    for shape in shapes:
        runner.prepare(shape)
    assert {shape.rows for shape in shapes} == {1, 2, 4, 8}
    assert {shape.branches for shape in shapes} == {1, 2}
    with poisoned(parts) as engine:
        for num_rows in (1, 3, 6):
            engine.generate(random_prompts(num_rows, 11), SamplingParams(**GREEDY))
            engine.generate(random_prompts(num_rows, 11), SamplingParams(**GREEDY, temperature=0.8))
    assert set(runner._graphs) == set(shapes), "none had to be made while requests waited"


def test_shapes_of_rows_that_are_about_to_end_were_prepared_too(cycles: list[list[int]]) -> None:
    parts = exit_parts(max_rows=2, share=0.3, drafts=3)
    runner = parts.runner.cycles
    assert runner is not None
    shapes = runner.shapes(2, 3)
    for shape in shapes:
        runner.prepare(shape)
    with poisoned(parts) as engine:
        for more in range(4):
            lengths = [SamplingParams(**{**GREEDY, "max_tokens": 12 + more * row}) for row in range(2)]
            engine.generate(random_prompts(2, 11), lengths)
    assert [3, 1] in [sorted(drafts, reverse=True) for drafts in cycles], "one may draft fewer tokens than the other"
    assert set(runner._graphs) == set(shapes)

"""Cycles whose head drafts all tokens in one pass, against the dense computation of training; here on the CPU, where
the CUDA kernels' twin stands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.exit_engines import all_ids, easy_model, exit_parts, fixed_depths, poisoned
from tests.engine.test_suffix_drafts import BESIDE, Certain, with_suffixes
from tests.exits.test_sampled_distribution import LEAST_P, chi_square_p, exact, run_all
from tests.factories import random_prompts
from tests.kernels.twin import twin_kernels
from tests.tiny_models import tiny_model
from tide_core.calibration.train.chain import features_by_distance
from tide_core.engine import assemble
from tide_core.engine.assemble import Parts
from tide_core.engine.engine import Completion
from tide_core.execution.graphs import branches
from tide_core.execution.graphs.branches import branches_for
from tide_core.execution.graphs.cycle_graph import CycleGraph
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.exits.artefact.router import confidence_of
from tide_core.exits.policy import resolve_policy
from tide_core.exits.propose import Exits
from tide_core.request import Grammar, Request, SamplingParams

HARDER = 0.3
NUM_DRAWS = 1_000
WORDS = Grammar("regex", r"[a-z ,.]{60,}")
WIDE: dict[str, Any] = {"kind": "block", "taps": (2, 3), "sizes": (("cell", 24),), "draft_threshold": 0.0}
NARROW: dict[str, Any] = {**WIDE, "sizes": (("cell", 24), ("head_size", 8), ("inner", 16))}
PLAIN: dict[str, Any] = {**WIDE, "taps": (), "sizes": (("cell", 24), ("hidden", 0))}
HEADS = {"wide": WIDE, "narrow": NARROW, "plain": PLAIN}
EACH_HEAD = pytest.mark.parametrize("artefact", HEADS.values(), ids=HEADS)
BOTH_WIDTHS = pytest.mark.parametrize("artefact", [WIDE, NARROW], ids=["wide", "narrow"])


class Drafted(NamedTuple):
    """By one place of one row in one cycle."""

    request: Request
    start: int
    """Position of the newest token."""
    branch: int
    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    is_ahead: bool
    """Whether its launch continued with what the one before left on the device."""
    is_mixed: bool
    """Whether rows of the launch had other numbers of drafts."""


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """What rows without suffix drafts draft, in engines made from now on, which run cycles in one go."""
    seen: list[Drafted] = []
    results = InFlightStep.results

    def noted(self: InFlightStep, wanted: Any, rows: Any) -> Any:
        found = results(self, wanted, rows)
        for index, number in wanted.items():
            start, place, num = rows[index].table.length, self.rows[number], self.rows[number].drafts
            for output in self.host.read():
                for branch in range(self.branches if num and not place.suffix_drafts else 0):
                    at = number * self.branches + branch
                    ids, scores = (tuple(part[d][at] for d in range(num)) for part in (output.drafted, output.scores))
                    of_launch = place.previous >= 0, num != min(row.drafts for row in self.rows)
                    seen.append(Drafted(rows[index].request, start, branch, ids, scores, *of_launch))
                start = output.next_state[1][self._place(number, output)]
        return found

    monkeypatch.setattr(InFlightStep, "results", noted)
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: twin_kernels())
    return seen


class Dense:
    """What a head proposes, by the computation of its training over a whole text."""

    def __init__(self, parts: Parts, model: Any) -> None:
        assert parts.runner.exits is not None
        self._model, self._exits = model, parts.runner.exits
        [self._point] = self._exits.checkpoints

    @torch.inference_mode()
    def proposals(self, text: list[int], drafts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [K, S] and scores [K], of drafts after a text that came before them."""
        head, exits, num = self._point.head, self._exits, len(drafts)
        ids = torch.tensor([[*text, *drafts[:-1]]])
        states = self._model(ids, output_hidden_states=True).hidden_states
        deep = head.deep_state(states[-1], [states[tap] for tap in head.spec.taps])
        features = features_by_distance(head, states[self._point.layer], deep, range(1, num + 1), states[0])
        chain = torch.stack([features[j][len(text) + j - 2] for j in range(1, num + 1)])
        logits = exits._narrow_head(exits._adapter.norm(chain))
        return logits, self._point.router.score(chain, confidence_of(logits))


def check_drafts(drafted: list[Drafted], answers: list[Completion], parts: Parts, model: Any) -> None:
    """Scores, and of rows that do not sample the drafts."""
    dense, texts = Dense(parts, model), dict(zip((a.request_id for a in answers), all_ids(answers), strict=True))
    assert parts.runner.exits is not None
    shortlist = parts.runner.exits.shortlist
    for cycle in drafted:
        request = cycle.request
        text = [*request.prompt_ids, *texts[request.request_id]][: cycle.start + 1]
        logits, scores = dense.proposals(text, cycle.token_ids)
        assert cycle.scores == pytest.approx(scores.tolist(), abs=1e-4)
        for distance, token_id in enumerate(cycle.token_ids if request.params.is_greedy else ()):
            output = [*text[len(request.prompt_ids) :], *cycle.token_ids[:distance]]
            adjusted = adjust(logits[distance], shortlist, request.params, output)
            best = adjusted.sort(descending=True).values[0 if distance else cycle.branch]
            chosen = adjusted[shortlist.tolist().index(token_id)]
            assert float(chosen) == pytest.approx(float(best), abs=1e-4), f"draft {distance} after {len(text)} tokens"


def adjust(logits: torch.Tensor, ids: torch.Tensor, params: SamplingParams, output: list[int]) -> torch.Tensor:
    """By the bias of a request and by how often each token has come."""
    adjusted = logits.clone()
    for token_id, bias in params.logit_bias.items():
        adjusted[ids == token_id] += bias
    for token_id in set(output):
        adjusted[ids == token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    return adjusted


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seed": 7, **changes})


def model_of(family: str) -> Any:
    return tiny_model(family) if family == "gemma2" else easy_model(family, share=HARDER)


def parts_of(family: str, artefact: dict[str, Any], **settings: Any) -> Parts:
    return exit_parts(family, easy=family != "gemma2", share=HARDER, artefact=artefact, **settings)


@EACH_HEAD
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_drafts_and_scores_are_those_of_the_dense_computation(
    artefact: dict[str, Any], family: str, num_rows: int, drafted: list[Drafted]
) -> None:
    """Models whose tokens enter with a row alone, with a learned position, and scaled."""
    parts = parts_of(family, artefact)
    with poisoned(parts) as engine:
        answers = engine.generate(random_prompts(num_rows, 11), asked())
    assert {cycle.branch for cycle in drafted} >= {*range(branches_for(num_rows, 4, 16))}
    assert max(len(cycle.token_ids) for cycle in drafted) == 4
    assert any(cycle.is_ahead for cycle in drafted)
    check_drafts(drafted, answers, parts, model_of(family))


@BOTH_WIDTHS
@pytest.mark.parametrize("steps", [1, 3])
def test_rows_with_fewer_drafts_and_cycles_of_one_launch_draft_the_same(
    artefact: dict[str, Any], steps: int, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "MAX_BRANCHES", 1)
    parts = parts_of("llama", artefact)
    assert parts.runner.cycles is not None
    parts.runner.cycles.depths = fixed_depths(steps)
    params = [asked(max_tokens=length) for length in (17, 5, 11, 2, 8)]
    with poisoned(parts) as engine:
        answers = engine.generate(random_prompts(5, 11), params)
    assert any(cycle.is_mixed for cycle in drafted)
    assert {len(cycle.token_ids) for cycle in drafted} >= {1, 2, 4}
    check_drafts(drafted, answers, parts, model_of("llama"))


@BOTH_WIDTHS
@pytest.mark.parametrize("drafts", [1, 8])
def test_one_draft_and_more_than_the_head_knows_distances(
    artefact: dict[str, Any], drafts: int, drafted: list[Drafted]
) -> None:
    parts = parts_of("llama", {**artefact, "max_drafts": 8, "acceptance": (0.7,) * 8}, drafts=drafts)
    with poisoned(parts) as engine:
        answers = engine.generate(random_prompts(2, 11), asked(max_tokens=24))
    assert max(len(cycle.token_ids) for cycle in drafted) == drafts
    check_drafts(drafted, answers, parts, model_of("llama"))


def test_a_text_of_one_token_has_no_deep_state_and_is_drafted_after(drafted: list[Drafted]) -> None:
    parts = parts_of("llama", NARROW)
    with poisoned(parts) as engine:
        answers = engine.generate([[5], [7, 9]], asked())
    check_drafts(drafted, answers, parts, model_of("llama"))


@BOTH_WIDTHS
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_sampled_row_has_the_scores_of_the_drafts_it_drew(
    artefact: dict[str, Any], num_rows: int, drafted: list[Drafted]
) -> None:
    parts = parts_of("llama", artefact)
    with poisoned(parts) as engine:
        answers = engine.generate(random_prompts(num_rows, 11), asked(temperature=0.9))
    assert drafted
    check_drafts(drafted, answers, parts, model_of("llama"))


@BOTH_WIDTHS
def test_beside_suffix_drafts_the_others_are_the_same(artefact: dict[str, Any], drafted: list[Drafted]) -> None:
    class Some(Certain):
        def propose(self, row: Any) -> Any:
            return super().propose(row) if row.request.prompt_ids[0] == first else None

    prompts = random_prompts(3, 11)
    first, parts = prompts[0][0], parts_of("llama", artefact)
    with_suffixes(parts, BESIDE, Some([5, 6, 7, 8]))
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, asked())
        full = engine.generate(prompts, asked(mode="full"))
    assert parts.runner.cycles is not None
    assert any(shape.has_suffix and shape.passes == 1 for shape in parts.runner.cycles._graphs), "in one cycle"
    assert all_ids(answers) == all_ids(full)
    assert drafted
    check_drafts(drafted, answers, parts, model_of("llama"))


@BOTH_WIDTHS
def test_each_draft_counts_those_before_it_in_its_penalties(artefact: dict[str, Any], drafted: list[Drafted]) -> None:
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {7: 3.0}}
    parts, prompts = parts_of("llama", artefact), random_prompts(2, 11)
    with poisoned(parts) as engine:
        answers = engine.generate(prompts, asked(**penalties))
        full = engine.generate(prompts, asked(**penalties, mode="full"))
    assert all_ids(answers) == all_ids(full)
    check_drafts(drafted, answers, parts, model_of("llama"))


@BOTH_WIDTHS
@pytest.mark.parametrize("kind", [{}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"grammar": WORDS}], ids=str)
def test_greedy_answers_are_those_of_full_depth(
    artefact: dict[str, Any], kind: dict[str, Any], drafted: list[Drafted]
) -> None:
    with poisoned(parts_of("llama", artefact)) as engine:
        for num_rows in (1, 3):
            prompts = random_prompts(num_rows, 11)
            full, verified = (engine.generate(prompts, asked(mode=mode, **kind)) for mode in ("full", "verified"))
            assert all_ids(verified) == all_ids(full)
    assert drafted


@BOTH_WIDTHS
def test_rows_of_every_kind_share_a_cycle_and_get_what_they_get_alone(
    artefact: dict[str, Any], drafted: list[Drafted]
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"mode": "full"},
        {"max_tokens": 3},
        {"temperature": 0.8},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"max_tokens": 11},
    ]
    prompts, params = random_prompts(len(kinds), 11), [asked(**kind) for kind in kinds]
    with poisoned(parts_of("llama", artefact, max_rows=8)) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert all(answer.error is None for answer in together)
    assert all_ids(together) == all_ids(alone)
    assert any(cycle.is_mixed for cycle in drafted)


def test_samples_have_the_distribution_of_full_depth(drafted: list[Drafted]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, ignore_eos=True, mode="verified", top_k=6, top_p=0.9)
    parts = exit_parts(drafts=2, max_rows=64, max_batch_tokens=1024, artefact=NARROW)
    observed = run_all(parts.core, params, resolve_policy(params, parts.checkpoints, 4), NUM_DRAWS)
    assert drafted
    assert parts.core.exits.accepted, "some drafts were accepted"
    assert chi_square_p(observed, exact(params, 3)) > LEAST_P


@BOTH_WIDTHS
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_row_counts_the_first_layers_once_a_cycle(
    artefact: dict[str, Any], num_rows: int, drafted: list[Drafted]
) -> None:
    parts = parts_of("llama", artefact, drafts=3)
    parts.runner.lookahead_steps = lambda: 0
    with poisoned(parts) as engine:
        answers = engine.generate(random_prompts(num_rows, 11), asked())
    num_layers = parts.runner.adapter.num_layers
    cycles = {answer.request_id: 0 for answer in answers}
    for cycle in drafted:
        cycles[cycle.request.request_id] += 1 + (len(cycle.token_ids) + 1) * num_layers
    for answer in answers:
        rest = answer.usage.layers_run - cycles[answer.request_id]
        assert rest in (num_layers, 2 * num_layers), "the prompt, and at the end a cycle without drafts"


def test_the_first_layers_run_once_a_cycle_and_the_block_once_for_all_places(
    drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two rows of two branches, four places each."""
    calls: list[tuple[str, int]] = []

    def note(kind: Any, name: str, width: Callable[..., int]) -> None:
        work = getattr(kind, name)

        def noted(self: Any, *given: Any) -> Any:
            calls.append((name, width(*given)))
            return work(self, *given)

        monkeypatch.setattr(kind, name, noted)

    note(Exits, "embed_places", lambda states, *_: len(states))
    note(Exits, "refine_places", lambda view, embedded: len(embedded))
    note(Exits, "advance", lambda refined, *_: len(refined))
    note(CycleGraph, "_run_deep", lambda: 0)
    parts = parts_of("llama", NARROW, drafts=3)
    with poisoned(parts) as engine:
        engine.generate(random_prompts(2, 11), asked(max_tokens=30))
    of_each = [("embed_places", 16), ("refine_places", 16), ("advance", 4), ("advance", 4), ("_run_deep", 0)]
    assert calls[: 5 * 4] == of_each * 4

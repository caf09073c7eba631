"""The four contracts of a request, on one engine."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, easy_model, exit_engine, exit_layers, exit_parts, ids, poisoned
from tests.engine.runners import RunnerOf
from tests.factories import make_engine, make_parts, random_prompts
from tests.tiny_models import tiny_model
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import ConfigError, RequestError
from tide_core.request import Audit, SamplingParams

PROMPTS = random_prompts(6, 11)
NUM_LAYERS = 4
BLOCK_BYTES = NUM_LAYERS * 2 * (12 + 12) * 16 * 4
OTHER_FAMILIES = (
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "gpt_neox",
    "opt_projected",
    "falcon_multi_query",
    "falcon_alibi",
    "deepseek_v2",
    "mixtral",
    "granite",
    "cohere2",
    "gpt_oss",
)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **changes})


def answers(engine: Engine, **changes: Any) -> list[Completion]:
    with engine:
        return engine.generate(PROMPTS, params(**changes))


@functools.cache
def at_full_depth() -> list[Completion]:
    return answers(exit_engine(), mode="full")


@pytest.mark.parametrize("drafts", [1, 3, 6])
@pytest.mark.parametrize(
    "artefact",
    [
        {},
        {"kind": "affine"},
        {"kind": "mlp", "deep": False},
        {"kind": "block"},
        {"kind": "block", "deep": False},
        {"kind": "identity", "layers": (1, 3)},
        {"kind": "block", "layers": (1, 2, 3)},
    ],
    ids=lambda a: "-".join(map(str, a.values())) or "identity",
)
def test_verified_greedy_output_equals_full_depth(artefact: dict[str, Any], drafts: int) -> None:
    full = at_full_depth()
    got = answers(exit_engine(artefact=artefact, drafts=drafts), mode="verified")
    assert all_ids(got) == all_ids(full)
    assert all(token.audit is Audit.VERIFIED for answer in got for token in answer.tokens)


def test_verified_really_drafts_and_really_skips_deep_passes() -> None:
    [answer, *_] = answers(exit_engine(), mode="verified")
    usage = answer.usage
    assert usage is not None
    assert usage.acceptance is not None
    assert usage.acceptance > 0.3
    assert usage.tokens_per_deep_pass > 1.3
    assert usage.deep_passes < len(answer.tokens)
    assert set(exit_layers(answer)) == {1, NUM_LAYERS}
    assert usage.exits == Counter(exit_layers(answer))


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {5: 4.0, 9: -100.0}},
        {"min_tokens": 20, "ignore_eos": False},
        {"logprobs": 3},
    ],
    ids=lambda c: next(iter(c)),
)
def test_verified_equals_full_depth_with_every_parameter(changes: dict[str, Any]) -> None:
    full = answers(exit_engine(), mode="full", **changes)
    got = answers(exit_engine(), mode="verified", **changes)
    assert all_ids(got) == all_ids(full)
    if "logprobs" in changes:
        for one, other in zip(got, full, strict=True):
            assert [t.logprob for t in one.tokens] == pytest.approx([t.logprob for t in other.tokens], abs=1e-4)
            assert [[i for i, _ in t.top_logprobs] for t in one.tokens] == [
                [i for i, _ in t.top_logprobs] for t in other.tokens
            ]


def test_stop_strings_and_stop_ids_inside_a_run_of_accepted_drafts_end_the_text_there() -> None:
    [whole, *_] = at_full_depth()
    stop_id = ids(whole)[5]
    cut = ids(whole).index(stop_id) + 1
    with exit_engine() as engine:
        [got] = engine.generate([PROMPTS[0]], params(mode="verified", stop_ids=(stop_id,)))
        assert ids(got) == ids(whole)[:cut]
        assert got.usage is not None
        assert got.usage.output_tokens == cut
        assert engine.stats().blocks_owned == 0


def test_a_request_gets_exactly_as_many_tokens_as_it_may() -> None:
    for max_tokens in range(1, 12):
        [got, *_] = answers(exit_engine(), mode="verified", max_tokens=max_tokens)
        assert len(got.tokens) == max_tokens


@pytest.mark.parametrize("mode", ["verified", "bounded"])
def test_a_freed_page_is_never_read(mode: str) -> None:
    expected = all_ids(answers(exit_engine(artefact={"kind": "block"}), mode=mode))
    parts = exit_parts(artefact={"kind": "block"})
    with poisoned(parts, drafts=4) as engine:
        for _ in range(2):
            assert all_ids(engine.generate(PROMPTS, params(mode=mode))) == expected


def test_a_rejected_draft_leaves_no_trace_in_the_cache() -> None:
    """Exits of a head that is always wrong: the text must be that of full depth, token after token."""
    expected = all_ids(answers(make_engine()))
    got = answers(exit_engine(easy=False, artefact={"kind": "block", "draft_threshold": 0.0}), mode="verified")
    assert all_ids(got) == expected
    assert all(answer.usage is not None and answer.usage.acceptance is not None for answer in got)


@pytest.mark.parametrize("mode", ["verified", "bounded", "fast"])
def test_tokens_and_exit_layers_do_not_depend_on_mates(mode: str) -> None:
    needle = PROMPTS[0]
    settings: dict[str, Any] = {"artefact": {"kind": "block"}, "max_rows": 16, "max_batch_tokens": 128}
    with exit_engine(**settings) as engine:
        [alone] = engine.generate([needle], params(mode=mode))
    for num_mates in (1, 5, 15):
        mates = random_prompts(num_mates, 7, seed=num_mates)
        with exit_engine(**settings) as engine:
            together = engine.generate([*mates[: num_mates // 2], needle, *mates[num_mates // 2 :]], params(mode=mode))
        got = together[num_mates // 2]
        assert ids(got) == ids(alone)
        assert exit_layers(got) == exit_layers(alone)


def test_modes_mix_in_one_batch_and_each_keeps_its_contract() -> None:
    modes = ("full", "verified", "bounded", "fast", "verified", "full")
    expected = {}
    for mode in set(modes):
        expected[mode] = all_ids(answers(exit_engine(), mode=mode))
    with exit_engine() as engine:
        got = engine.generate(PROMPTS, [params(mode=mode) for mode in modes])
    for index, (mode, answer) in enumerate(zip(modes, got, strict=True)):
        assert ids(answer) == expected[mode][index], mode
        assert {token.mode for token in answer.tokens} == {mode}


def test_preempted_rows_come_back_with_the_same_tokens() -> None:
    expected = all_ids(answers(exit_engine(), mode="verified"))
    with exit_engine(kv_memory_gib=10 * BLOCK_BYTES / 2**30, prefix_caching=False) as engine:
        got = engine.generate(PROMPTS, params(mode="verified"))
        assert engine.stats().num_preemptions > 0
    assert all_ids(got) == expected


@pytest.mark.parametrize(("first", "second"), [("verified", "verified"), ("verified", "fast"), ("fast", "verified")])
def test_the_prefix_cache_changes_neither_tokens_nor_exit_layers(first: str, second: str) -> None:
    [prompt] = random_prompts(1, 40)
    with exit_engine(artefact={"kind": "block"}, prefix_caching=False) as engine:
        [cold] = engine.generate([prompt], params(mode=second, threshold=0.3))
    with exit_engine(artefact={"kind": "block"}) as engine:
        engine.generate([prompt], params(mode=first, threshold=0.3))
        [warm] = engine.generate([prompt], params(mode=second, threshold=0.3))
    assert warm.usage is not None
    assert warm.usage.cached_tokens == 32
    assert ids(warm) == ids(cold)
    assert exit_layers(warm) == exit_layers(cold)


def test_only_the_prompt_of_a_request_that_skips_layers_is_shared() -> None:
    """What it generated has K and V that depend on where its tokens left."""
    [prompt] = random_prompts(1, 40)
    fast = params(mode="fast", threshold=0.0, max_tokens=40)
    with exit_engine(artefact={"kind": "block"}) as engine:
        [answer] = engine.generate([prompt], fast)
        assert set(exit_layers(answer)) == {1, NUM_LAYERS}
        longer = [*prompt, *ids(answer)]
        [again] = engine.generate([longer], params(mode="verified"))
    with exit_engine(artefact={"kind": "block"}, prefix_caching=False) as engine:
        [cold] = engine.generate([longer], params(mode="verified"))
    assert again.usage is not None
    assert again.usage.cached_tokens == 32
    assert ids(again) == ids(cold)


def test_prompts_whose_tokens_may_exit_are_not_shared() -> None:
    [prompt] = random_prompts(1, 40)
    with exit_engine(artefact={"kind": "block"}, prompt_exits=True) as engine:
        engine.generate([prompt], params(mode="verified"))
        [got] = engine.generate([prompt], params(mode="fast", threshold=0.0))
    assert got.usage is not None
    assert got.usage.cached_tokens == 0


def test_a_cached_prefix_of_full_depth_requests_is_not_taken_for_one_with_head_memory() -> None:
    [prompt] = random_prompts(1, 40)
    with exit_engine(artefact={"kind": "block"}) as engine:
        engine.generate([prompt], params(mode="full"))
        [got] = engine.generate([prompt], params(mode="verified"))
    assert got.usage is not None
    assert got.usage.cached_tokens == 0


def test_fast_skips_layers_and_says_which_tokens_nobody_checked() -> None:
    got = answers(exit_engine(), mode="fast", threshold=0.0)
    for answer in got:
        usage = answer.usage
        assert usage is not None
        exits = [token for token in answer.tokens if token.exit_layer == 1]
        assert usage.layers_per_token < 0.7 * NUM_LAYERS
        assert usage.layers_run == NUM_LAYERS * usage.deep_passes + len(exits) + _dropped(answer)
        assert {token.audit for token in exits} == {Audit.UNAUDITED}


def _dropped(answer: Completion) -> int:
    """Layers run for drafts behind the last token of the answer."""
    assert answer.usage is not None
    return answer.usage.num_drafts - sum(token.exit_layer == 1 for token in answer.tokens)


def test_prompt_exits_save_prompt_layers_and_leave_the_last_token_whole() -> None:
    [prompt] = random_prompts(1, 60)
    plain, saving = (exit_parts(prompt_exits=on, max_batch_tokens=128) for on in (False, True))
    ran = []
    for parts in (plain, saving):
        policy_engine = Engine.from_parts(parts)
        counted = 0

        def counting(batch: Any, run: Any = parts.runner.run) -> Any:
            nonlocal counted
            result = run(batch)
            counted += sum(row.layers_run for row in result.rows)
            return result

        parts.core._runner = RunnerOf(counting)
        with policy_engine as engine:
            [answer] = engine.generate([prompt], params(mode="fast", threshold=0.0, max_tokens=1))
        assert exit_layers(answer) == [NUM_LAYERS]
        ran.append(counted)
    assert ran == [60 * NUM_LAYERS, 59 + NUM_LAYERS]


def test_a_threshold_above_one_lets_nothing_leave() -> None:
    for mode in ("verified", "fast"):
        got = answers(exit_engine(), mode=mode, threshold=1.5)
        assert {layer for answer in got for layer in exit_layers(answer)} == {NUM_LAYERS}
        assert all(answer.usage is not None and answer.usage.num_drafts == 0 for answer in got)


def test_min_layers_closes_the_checkpoints_before_it() -> None:
    artefact = {"kind": "identity", "layers": (1, 3), "draft_threshold": 0.0}
    got = answers(exit_engine(artefact=artefact), mode="verified", min_layers=2)
    assert {layer for answer in got for layer in exit_layers(answer)} == {3, NUM_LAYERS}
    with exit_engine() as engine, pytest.raises(RequestError, match="min_layers"):
        engine.make_request(PROMPTS[0], params(min_layers=NUM_LAYERS + 1))


def test_the_default_mode_is_verified_with_an_artefact_and_full_without() -> None:
    assert {t.mode for a in answers(exit_engine()) for t in a.tokens} == {"verified"}
    assert {t.mode for a in answers(make_engine()) for t in a.tokens} == {"full"}
    with make_engine() as engine, pytest.raises(RequestError, match="no artefact"):
        engine.make_request(PROMPTS[0], params(mode="verified"))


@pytest.mark.parametrize("bad", ["score", "state"])
def test_a_score_that_is_no_number_never_lets_a_token_leave_and_is_counted(bad: str) -> None:
    parts = exit_parts(artefact={"kind": "affine", "draft_threshold": 0.0})
    assert parts.runner.exits is not None
    checkpoint = parts.runner.exits.checkpoints[0]
    broken = checkpoint.router.out.bias if bad == "score" else checkpoint.head.mix.bias
    broken.data.fill_(math.nan)
    expected = all_ids(at_full_depth())
    with Engine.from_parts(parts) as engine:
        got = engine.generate(PROMPTS, params(mode="verified"))
        stats = engine.stats()
    assert all_ids(got) == expected
    assert stats.exits["non_finite_scores"] > 0
    assert {layer for answer in got for layer in exit_layers(answer)} == {NUM_LAYERS}


@pytest.mark.parametrize("family", ["gpt2"])
def test_verified_equals_full_depth_for_families_of_other_shapes(family: str) -> None:
    expected = all_ids(answers(exit_engine(family), mode="full"))
    got = answers(exit_engine(family), mode="verified")
    assert all_ids(got) == expected
    assert max(answer.usage.tokens_per_deep_pass for answer in got if answer.usage) > 1.2


@pytest.mark.parametrize("family", OTHER_FAMILIES)
@pytest.mark.parametrize("mode", ["verified", "fast"])
def test_every_family_runs_with_a_block_head(family: str, mode: str) -> None:
    artefact = {"kind": "block", "draft_threshold": 0.0, "shortlist_size": 200}
    got = answers(exit_engine(family, easy=False, artefact=artefact), mode=mode)
    assert all(answer.error is None and len(answer.tokens) == 24 for answer in got)
    if mode == "verified":
        assert all_ids(got) == all_ids(answers(make_engine(family)))


def test_the_easy_model_is_not_the_tiny_one() -> None:
    assert easy_model() is not tiny_model("llama")


def test_fast_leaves_at_one_checkpoint_only() -> None:
    artefact = {"kind": "block", "layers": (1, 2), "draft_threshold": 0.0}
    got = answers(exit_engine(artefact=artefact), mode="fast", threshold=0.6)
    assert all(answer.error is None for answer in got)
    assert {layer for answer in got for layer in exit_layers(answer)} == {1, NUM_LAYERS}
    deeper = answers(exit_engine(artefact=artefact), mode="fast", threshold=0.0, min_layers=2)
    assert {layer for answer in deeper for layer in exit_layers(answer)} == {2, NUM_LAYERS}


def test_preempted_rows_of_mode_fast_read_nothing_unwritten() -> None:
    settings: dict[str, Any] = {"artefact": {"kind": "block"}, "block_size": 4, "kv_memory_gib": 0.00012}
    engine = poisoned(exit_parts(**settings), drafts=4)
    with engine:
        got = engine.generate(PROMPTS, params(mode="fast", threshold=0.3))
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.exits["non_finite_scores"] == 0
    assert all(answer.error is None for answer in got)


def test_more_drafts_than_the_artefact_was_certified_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafts"):
        exit_parts(artefact={"max_drafts": 2}, drafts=3)


def test_a_failure_behind_the_end_of_the_text_does_not_spoil_it() -> None:
    """Logits that are no numbers after an accepted draft fail the next step, not the tokens before it."""
    parts = exit_parts()
    head = parts.runner.adapter.head

    def failing(normed: torch.Tensor) -> torch.Tensor:
        logits = head(normed)
        if len(logits) > 2:
            logits[2:] = math.nan
        return logits

    parts.runner.adapter.head = failing  # type: ignore[method-assign]
    with Engine.from_parts(parts) as engine:
        [got] = engine.generate([PROMPTS[0]], params(mode="verified", max_tokens=12))
    [full] = answers(exit_engine(), mode="full", max_tokens=12)[:1]
    assert ids(got) == ids(full)


def test_the_default_mode_is_verified_where_anything_can_be_drafted() -> None:
    with make_engine() as engine:
        assert engine.default_mode == "full"
    parts = replace(make_parts(), suffix_drafts=True)
    with Engine.from_parts(parts) as engine:
        assert engine.default_mode == "verified"
        assert engine.describe().modes == ("full", "verified", "bounded")
        [answer] = engine.generate([[2, 3, 4]], SamplingParams(max_tokens=2))
        assert {token.mode for token in answer.tokens} == {"verified"}
        with pytest.raises(RequestError, match="no artefact"):
            engine.generate([[2, 3, 4]], SamplingParams(mode="fast"))

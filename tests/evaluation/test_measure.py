"""All contracts over the same prompts: each figure against a count of its own."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import easy_model, exit_parts, ids
from tests.factories import random_prompts
from tide_core.engine.engine import Engine
from tide_core.errors import ConfigError, EngineError
from tide_core.evaluation.full_depth import FullDepth
from tide_core.evaluation.measure import Contract, contracts_of, evaluate
from tide_core.evaluation.results import ContractResult, as_csv, as_json, draw_curve, table
from tide_core.exits.policy import CheckpointPolicy, FastPolicy
from tide_core.request import SamplingParams

PROMPTS = random_prompts(5, 9)
NUM_LAYERS = 4
TOKENS = 16


def run(contracts: list[Contract], *, artefact: dict[str, Any] | None = None, **settings: Any) -> list[ContractResult]:
    parts = exit_parts(artefact=artefact, prefix_caching=False)
    full_depth = FullDepth(parts.runner.adapter, parts.kernels)
    with Engine.from_parts(parts) as engine:
        return evaluate(
            engine,
            full_depth,
            PROMPTS,
            contracts,
            **{"num_layers": NUM_LAYERS, "max_tokens": TOKENS, "ignore_eos": True, **settings},
        )


def library_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """Full depth at each output token, by the library."""
    with torch.inference_mode():
        return easy_model()(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_figure_of_fast_is_what_a_count_of_its_own_gives(batch_size: int) -> None:
    full, fast = run([Contract("full", "full"), Contract("fast at 0.3", "fast", threshold=0.3)], batch_size=batch_size)
    outputs: dict[str, list[list[int]]] = {}
    usages: dict[str, list[Any]] = {}
    with Engine.from_parts(exit_parts()) as engine:
        for mode, threshold in (("full", None), ("fast", 0.3)):
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, mode=mode, threshold=threshold)
            answers = engine.generate(PROMPTS, params)
            outputs[mode] = [ids(answer) for answer in answers]
            usages[mode] = [answer.usage for answer in answers]
    num_tokens = TOKENS * len(PROMPTS)
    wrong, perplexity = {}, {}
    for mode, texts in outputs.items():
        pairs = [(library_logits(p, o), torch.tensor(o)) for p, o in zip(PROMPTS, texts, strict=True)]
        wrong[mode] = sum(int((logits.argmax(-1) != o).sum()) for logits, o in pairs)
        total = sum(float(logits.log_softmax(-1).gather(1, o[:, None]).sum()) for logits, o in pairs)
        perplexity[mode] = math.exp(-total / num_tokens)
    assert wrong["full"] == 0 < wrong["fast"]
    assert fast.num_tokens == num_tokens
    assert fast.num_prompts == len(PROMPTS)
    assert fast.disagreement == wrong["fast"] / num_tokens
    same = [a == b for a, b in zip(outputs["full"], outputs["fast"], strict=True)]
    assert fast.exact_match == sum(same) / len(same)
    assert fast.perplexity == pytest.approx(perplexity["fast"], rel=1e-4)
    assert fast.perplexity_difference == pytest.approx(perplexity["fast"] - perplexity["full"], rel=1e-3)
    assert fast.layers_per_token == sum(u.layers_run for u in usages["fast"]) / num_tokens < NUM_LAYERS
    assert fast.layers_share == fast.layers_per_token / NUM_LAYERS
    assert fast.tokens_per_deep_pass == num_tokens / sum(u.deep_passes for u in usages["fast"]) > 1
    assert fast.acceptance == sum(u.num_accepted for u in usages["fast"]) / sum(u.num_drafts for u in usages["fast"])
    assert fast.tokens_per_s == pytest.approx(num_tokens / fast.seconds)
    assert fast.speedup == pytest.approx(fast.tokens_per_s / full.tokens_per_s)
    assert (full.disagreement, full.exact_match, full.speedup, full.acceptance) == (0.0, 1.0, 1.0, None)


def test_verified_disagrees_nowhere_and_its_answers_are_those_of_full_depth() -> None:
    _, verified = run([Contract("full", "full"), Contract("verified", "verified")])
    assert (verified.disagreement, verified.exact_match) == (0.0, 1.0)
    assert verified.perplexity_difference == pytest.approx(0.0, abs=1e-4)
    assert verified.exit_rate > 0.1


def test_an_answer_that_fails_ends_the_measurement_with_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_core.execution.runner import ModelRunner

    def fail(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ModelRunner, "_verify", fail)
    with pytest.raises(EngineError, match=r"contract full: .*no"):
        run([Contract("full", "full")])


def policy(layer: int = 1, *, fast: float | None = 0.7) -> CheckpointPolicy:
    return CheckpointPolicy(layer, 0.0, fast)


def test_contracts_are_all_that_every_checkpoint_is_calibrated_for() -> None:
    names = [contract.name for contract in contracts_of([policy()], 4, [0.5, 0.9])]
    assert names == [
        "full",
        "verified",
        "bounded 0.02",
        "bounded 0.05",
        "bounded 0.1",
        "fast",
        "fast at 0.5",
        "fast at 0.9",
    ]
    two = [policy(), policy(2, fast=None)]
    assert [contract.name for contract in contracts_of(two, 4, [0.5])] == [
        "full",
        "verified",
        "bounded 0.02",
        "bounded 0.05",
        "bounded 0.1",
        "fast at 0.5",
    ]


def test_certified_contracts_of_fast_are_compared_by_their_epsilon() -> None:
    fast = FastPolicy((1, 2), {0.1: (0.5, 0.5), 0.05: (0.8, 0.8)})
    found = contracts_of([policy(fast=None)], 4, [0.5], fast)
    assert [contract.name for contract in found][5:] == ["fast 0.05", "fast 0.1", "fast at 0.5"]
    assert [contract.epsilon for contract in found][5:] == [0.05, 0.1, None]


def test_without_exits_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="artefact"):
        contracts_of([], 4)


def result(**changes: Any) -> ContractResult:
    values: dict[str, Any] = {
        "name": "fast",
        "mode": "fast",
        "epsilon": None,
        "threshold": None,
        "num_prompts": 2,
        "num_tokens": 20,
        "disagreement": 0.05,
        "exact_match": 0.5,
        "perplexity": 3.0,
        "perplexity_difference": 0.25,
        "layers_per_token": 2.5,
        "layers_share": 0.625,
        "tokens_per_deep_pass": 2.0,
        "acceptance": None,
        "exit_rate": 0.5,
        "seconds": 1.0,
        "tokens_per_s": 20.0,
        "speedup": 1.5,
    }
    return ContractResult(**{**values, **changes})


def test_table_csv_and_json_hold_the_same_figures() -> None:
    results = [result(), result(name="bounded 0.02", mode="bounded", epsilon=0.02, acceptance=0.75)]
    text = table(results)
    for figure in ("0.0500", "+0.250", "0.750"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 120
    rows = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert [row["name"] for row in rows] == ["fast", "bounded 0.02"]
    assert (rows[0]["acceptance"], rows[1]["acceptance"]) == ("", "0.75")
    values = json.loads(as_json(results, {"model": "m"}))
    assert values["conditions"] == {"model": "m"}
    assert values["results"][1]["epsilon"] == 0.02
    assert json.loads(as_json([result(perplexity=math.inf)], {}))["results"][0]["perplexity"] is None


def test_the_curve_is_a_png_with_all_modes() -> None:
    pytest.importorskip("matplotlib")
    results = [result(name="full", mode="full", disagreement=0.0), result(threshold=0.5), result(threshold=0.9)]
    assert draw_curve(results).startswith(b"\x89PNG")

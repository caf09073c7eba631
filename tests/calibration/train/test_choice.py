"""Which candidates of a wide model are trained: a few, by what passes cost on this device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.calibration.train.heads import tiny_adapter
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.risk import pass_times
from tide_core.calibration.risk.costs import Considered, MeasuredCosts
from tide_core.calibration.risk.pass_times import measure_costs
from tide_core.calibration.train import candidates, choice
from tide_core.calibration.train.candidates import CandidateSpec, make_candidate
from tide_core.calibration.train.choice import CandidateChoice, choose, trained_names
from tide_core.errors import ConfigError


def considered(name: str, speedup: float, **changes: Any) -> Considered:
    layer = int(name.partition(":")[0])
    plain = {"inner": 64, "ffn": 64, "num_parameters": 10, "draft_share": 0.1, "tokens_per_s": None, "trained": False}
    return Considered(name=name, layer=layer, speedup=speedup, **{**plain, **changes})


def made_choice(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> CandidateChoice:
    """Of a tiny model that counts as a wide one."""
    monkeypatch.setattr(candidates, "WIDE_FROM", 48)
    monkeypatch.setattr(candidates, "WIDTH_STEP", 4)
    return choose(CalibrationConfig(**settings), tiny_adapter(), 64, SilentProgress())


def test_a_small_model_is_not_timed_and_trains_the_usual_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure_costs", lambda *_: pytest.fail("nothing to choose from"))
    found = choose(CalibrationConfig(), tiny_adapter(), 64, SilentProgress())
    assert found == CandidateChoice(("1:block:deep:muon",))


def test_a_wide_model_trains_a_few_by_their_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow blocks are dear here, whatever their size: measured costs count, not parameters."""

    def measured(adapter: Any, priced: Any, shortlist_size: int) -> dict[str, MeasuredCosts]:
        cost = {candidate.name: 0.9 if candidate.head.spec.narrow else 0.1 for candidate in priced}
        return {name: MeasuredCosts((1, 8), (0.05, 0.05), (each, each), (1.0, 1.0)) for name, each in cost.items()}

    monkeypatch.setattr(choice, "measure_costs", measured)
    found = made_choice(monkeypatch)
    assert found.considered[0].name == "1:block:deep:muon"
    assert len(found.considered) == 3
    assert found.considered[0].speedup > 1.5 > found.considered[1].speedup
    assert found.considered[0].tokens_per_s == pytest.approx(found.considered[0].speedup)
    assert set(found.names) == {each.name for each in found.considered if each.trained}
    assert found.costs is not None
    assert set(found.costs) == set(found.names)


def test_passes_of_each_candidate_are_what_is_timed_and_a_smaller_head_costs_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that counts operations: the real one depends on what else runs."""

    def operations(run: Any, device: torch.device) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        return float(counter.get_total_flops())

    monkeypatch.setattr(pass_times, "_seconds", operations)
    adapter = tiny_adapter()
    specs = [CandidateSpec.parse(name) for name in ("1:block:deep:ffn=65536", "1:block:deep:inner=16:ffn=32")]
    made = [make_candidate(adapter, spec, max_distance=2, bottleneck=8, seed=0) for spec in specs]
    costs = measure_costs(adapter, made, 64)
    assert costs is not None
    large, small = (costs[spec.name] for spec in specs)
    assert large.draft_of(1) > small.draft_of(1) > small.shallow_of(1) > 0
    assert small.full_of(32) == large.full_of(32) > small.deep_of(32) > 0


def test_a_model_whose_layers_need_a_mask_is_priced_by_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure_costs", lambda *_: None)
    found = made_choice(monkeypatch)
    assert measure_costs(tiny_adapter("gemma2"), [], 64) is None
    assert found.costs is None
    assert all(each.tokens_per_s is None for each in found.considered)
    shares = [each.draft_share for each in found.considered]
    assert shares == sorted(shares), "the cheapest first"
    assert found.considered[0].inner == 12


def test_the_fastest_are_trained_wherever_they_are() -> None:
    priced = [considered("1:a", 1.9), considered("2:a", 1.7), considered("1:b", 2.0), considered("2:b", 1.8)]
    assert trained_names(priced) == {"1:a", "1:b"}
    assert trained_names([*priced, considered("3:a", 2.1)]) == {"3:a", "1:b"}


def test_all_candidates_that_are_listed_for_a_wide_model_are_trained_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("1:block:deep", "2:block:deep:inner=12", "3:block:deep:inner=12")
    found = made_choice(monkeypatch, candidates=names)
    assert set(found.names) == set(names)
    assert found.costs is not None
    assert set(found.costs) == set(names)


def test_a_choice_comes_back_from_its_file() -> None:
    costs = {"1:a": MeasuredCosts((1, 8), (0.1, 0.2), (0.2, 0.3), (1.0, 1.1))}
    made = CandidateChoice(("1:a",), (considered("1:a", 2.0, trained=True),), costs)
    assert CandidateChoice.from_json(made.to_json()) == made
    assert CandidateChoice.from_json(CandidateChoice(("1:a",)).to_json()) == CandidateChoice(("1:a",))
    with pytest.raises(ConfigError, match="choice of candidates"):
        CandidateChoice.from_json(b"{}")

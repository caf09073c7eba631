"""Which candidates of a wide model are trained: a few, by what passes cost on this device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.calibration.train.heads import tiny_adapter
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.risk.costs import Considered, MeasuredCosts
from tide_core.calibration.risk.pass_times import measure_costs
from tide_core.calibration.train import candidates, choice
from tide_core.calibration.train.candidates import CandidateSpec, make_candidate
from tide_core.calibration.train.choice import Choice, choose, trained_names
from tide_core.errors import ConfigError


def considered(name: str, speedup: float, **changes: Any) -> Considered:
    layer = int(name.partition(":")[0])
    plain = {"inner": 64, "ffn": 64, "num_parameters": 10, "draft_share": 0.1, "tokens_per_s": None, "trained": False}
    return Considered(name=name, layer=layer, speedup=speedup, **{**plain, **changes})


def made_choice(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Choice:
    """Of a tiny model that counts as a wide one."""
    monkeypatch.setattr(candidates, "WIDE_FROM", 48)
    monkeypatch.setattr(candidates, "WIDTH_STEP", 4)
    return choose(CalibrationConfig(**settings), tiny_adapter(), 64, SilentProgress())


def test_a_small_model_is_not_timed_and_trains_the_usual_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure_costs", lambda *_: pytest.fail("nothing to choose from"))
    found = choose(CalibrationConfig(), tiny_adapter(), 64, SilentProgress())
    assert found == Choice(("1:block:deep:muon",))


def test_a_wide_model_trains_a_few_by_their_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow blocks are dear here, whatever their size: measured costs count, not parameters."""

    def measured(adapter: Any, priced: Any, shortlist_size: int) -> dict[str, MeasuredCosts]:
        cost = {candidate.name: 0.9 if candidate.head.spec.narrow else 0.1 for candidate in priced}
        return {name: MeasuredCosts((1, 8), (0.05, 0.05), (each, each), (1.0, 1.0)) for name, each in cost.items()}

    monkeypatch.setattr(choice, "measure_costs", measured)
    found = made_choice(monkeypatch)
    assert found.considered[0].name == "1:block:deep:muon"
    assert len(found.considered) == 5
    assert found.considered[0].speedup > 1.5 > found.considered[1].speedup
    assert found.considered[0].tokens_per_s == pytest.approx(found.considered[0].speedup)
    assert set(found.names) == {each.name for each in found.considered if each.trained}
    assert found.costs is not None
    assert set(found.costs) == set(found.names)


def test_costs_are_timed_and_a_smaller_head_of_a_large_one_costs_less() -> None:
    adapter = tiny_adapter()
    specs = [CandidateSpec.parse(name) for name in ("1:block:deep:ffn=65536", "1:block:deep:inner=16:ffn=32")]
    made = [make_candidate(adapter, spec, max_distance=2, bottleneck=8, seed=0) for spec in specs]
    costs = measure_costs(adapter, made, 64)
    assert costs is not None
    large, small = (costs[spec.name] for spec in specs)
    assert large.first_draft_of(1) > small.first_draft_of(1) >= small.shallow_of(1) > 0
    assert small.full_of(32) == large.full_of(32) > small.deep_of(32) > 0


def test_a_further_draft_in_one_pass_is_timed_without_the_layers_and_the_block() -> None:
    adapter = tiny_adapter()
    spec = CandidateSpec.parse("3:block:deep:ffn=65536:cell=16")
    made = make_candidate(adapter, spec, max_distance=2, bottleneck=8, seed=0)
    costs = measure_costs(adapter, [made], 64)
    assert costs is not None
    assert costs[spec.name].in_one_pass
    assert 0 < costs[spec.name].next_draft_of(1) < costs[spec.name].first_draft_of(1)
    assert costs[spec.name].first_draft_of(1, 32) >= costs[spec.name].first_draft_of(1)


def test_in_one_pass_is_chosen_where_further_drafts_are_cheap_enough_for_its_prior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(adapter: Any, priced: Any, shortlist_size: int) -> dict[str, MeasuredCosts]:
        plain = (1, 8), (0.05, 0.05), (0.1, 0.1), (1.0, 1.0)
        own = {each.name: {"head": (0.01,) * 2, "further": (0.01,) * 2} for each in priced if each.head.spec.cell}
        return {each.name: MeasuredCosts(*plain, **own.get(each.name, {})) for each in priced}

    monkeypatch.setattr(choice, "measure_costs", measured)
    found = made_choice(monkeypatch)
    best, *others = found.considered
    assert best.name.endswith(":cell=12")
    assert (best.draft_share, best.further_share) == (pytest.approx(0.1), pytest.approx(0.01))
    assert others[-1].further_share is None
    assert best.speedup > others[-1].speedup
    assert Choice.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"head_cell": 0}, {"1:block:deep:muon"} | {f"1:block:deep:muon:inner={inner}" for inner in (12, 24)}),
        ({"head_inner": 20}, {"1:block:deep:muon:inner=20", "1:block:deep:muon:inner=20:cell=20"}),
        ({"head_inner": 20, "head_cell": 0}, set()),
        ({"head_inner": 20, "head_cell": 8}, set()),
        ({"candidates": ("1:block:deep", "1:block:deep:cell=8")}, set()),
    ],
)
def test_what_the_settings_name_is_not_varied(
    settings: dict[str, Any], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "measure_costs", lambda *_: None)
    assert {each.name for each in made_choice(monkeypatch, **settings).considered} == names


@pytest.mark.parametrize(("by_default", "cell"), [(False, ""), (True, ":cell=48")])
def test_one_constant_decides_whether_a_small_model_drafts_in_one_pass(
    by_default: bool, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "SMALL_IN_ONE_PASS", by_default)
    found = choose(CalibrationConfig(), tiny_adapter(), 64, SilentProgress())
    assert found == Choice((f"1:block:deep:muon{cell}",))
    named = choose(CalibrationConfig(head_cell=0), tiny_adapter(), 64, SilentProgress())
    assert named == Choice(("1:block:deep:muon",))


def test_a_model_whose_layers_need_a_mask_is_priced_by_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure_costs", lambda *_: None)
    found = made_choice(monkeypatch)
    assert measure_costs(tiny_adapter("gemma2"), [], 64) is None
    assert found.costs is None
    assert all(each.tokens_per_s is None for each in found.considered)
    one_by_one = [each.draft_share for each in found.considered if each.further_share is None]
    assert one_by_one == sorted(one_by_one), "the cheapest of a kind first"
    assert found.considered[0].inner == 12


def test_the_fastest_of_every_checkpoint_layer_is_trained_then_the_next_fastest() -> None:
    priced = [considered("1:a", 2.0), considered("1:b", 1.9), considered("1:c", 1.8), considered("2:a", 1.7)]
    assert trained_names(priced) == {"1:a", "2:a", "1:b"}
    assert trained_names([*priced, considered("3:a", 1.2), considered("4:a", 1.1)]) == {"1:a", "2:a", "3:a"}


def test_a_choice_comes_back_from_its_file() -> None:
    costs = {"1:a": MeasuredCosts((1, 8), (0.1, 0.2), (0.2, 0.3), (1.0, 1.1))}
    made = Choice(("1:a",), (considered("1:a", 2.0, trained=True),), costs)
    assert Choice.from_json(made.to_json()) == made
    assert Choice.from_json(Choice(("1:a",)).to_json()) == Choice(("1:a",))
    with pytest.raises(ConfigError, match="choice of candidates"):
        Choice.from_json(b"{}")

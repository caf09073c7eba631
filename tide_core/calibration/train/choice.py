"""Which candidates are trained: for a wide model those that should be fastest on this device, a few of them.

A head as wide as the model is right for a small model and too dear for a wide one. For a wide model narrow blocks are
considered next to it, at layer 0 and after the first layer, one token a pass and in one pass, and priced by passes
that are timed here. How often they will be right is not known yet, so all of a kind are given the same prior.
The one with the most predicted tokens/s of every checkpoint layer is trained, then the next best, up to `MOST_TRAINED`;
the traces of the trained ones decide.

The choice is made once in a run and kept in a file: timings differ from one start to the next, a run does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import Progress
from tide_core.calibration.risk.costs import Considered, Costs, DraftShares, MeasuredCosts, costs_of, prior_speedup
from tide_core.calibration.risk.pass_times import measure_costs
from tide_core.calibration.train.candidates import (
    WIDE_FROM,
    Candidate,
    CandidateSpec,
    candidates_of,
    head_spec,
    other_candidates,
)
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import ExitHead
from tide_core.exits.artefact.router import Router
from tide_core.models.adapter import ModelAdapter

MOST_TRAINED = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates of a run."""

    names: tuple[str, ...]
    """Those that are trained, as `CandidateSpec.parse` reads them."""
    considered: tuple[Considered, ...] = ()
    """The fastest first; none where the settings leave nothing to choose."""
    costs: Mapping[str, MeasuredCosts] | None = None
    """Of the candidates that are trained; None where costs are parameters read."""

    @property
    def specs(self) -> list[CandidateSpec]:
        return [CandidateSpec.parse(name) for name in self.names]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, raw: bytes) -> Choice:
        try:
            plain = json.loads(raw)
            costs = None
            if plain["costs"] is not None:
                costs = {
                    name: MeasuredCosts(**{key: tuple(values) for key, values in each.items()})
                    for name, each in plain["costs"].items()
                }
            considered = tuple(Considered(**each) for each in plain["considered"])
            return cls(tuple(plain["names"]), considered, costs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            came = f"{type(error).__name__}: {error}"
            raise ConfigError("choice of candidates", came, "the file that this run wrote") from error


def choose(config: CalibrationConfig, adapter: ModelAdapter, shortlist_size: int, progress: Progress) -> Choice:
    """The candidates to train; times passes of the model where there is a choice."""
    model = adapter.num_layers, int(adapter.config.hidden_size)
    usual, others = candidates_of(config, *model), other_candidates(config, *model)
    if not others and (len(usual) == 1 or model[1] < WIDE_FROM):
        return Choice(tuple(spec.name for spec in usual))
    specs = [*others, *usual]
    measured = measure_costs(adapter, [_untrained(config, adapter, spec) for spec in specs], shortlist_size)
    priced = {}
    for spec in specs:
        sizes = _untrained(config, adapter, spec, device="meta")
        costs: Costs = costs_of(sizes, adapter, shortlist_size) if measured is None else measured[spec.name]
        priced[spec.name] = _priced(config, sizes, costs, timed=measured is not None)
    names = trained_names(priced.values()) if others else set(priced)
    considered = [replace(each, trained=each.name in names) for each in _ranked(priced.values())]
    chosen = tuple(each.name for each in considered if each.trained)
    how = "parameters read" if measured is None else "passes timed here"
    shares = ", ".join(f"{name} ({priced[name].shares} of a full pass a draft)" for name in chosen)
    progress.note(f"candidates: {len(chosen)} of {len(specs)} are trained, by {how}: {shares}")
    return Choice(chosen, tuple(considered), None if measured is None else {name: measured[name] for name in chosen})


def trained_names(priced: Iterable[Considered]) -> set[str]:
    """Those with the most predicted tokens/s: one of every checkpoint layer, then the next, `MOST_TRAINED` at most."""
    ranked = _ranked(priced)
    first = [next(each for each in ranked if each.layer == layer) for layer in sorted({each.layer for each in ranked})]
    order = [*_ranked(first), *(each for each in ranked if each not in first)]
    return {each.name for each in order[:MOST_TRAINED]}


def _ranked(priced: Iterable[Considered]) -> list[Considered]:
    return sorted(priced, key=lambda each: (-each.speedup, each.draft_share))


def _priced(config: CalibrationConfig, sizes: Candidate, costs: Costs, *, timed: bool) -> Considered:
    spec = sizes.head.spec
    drafts = config.drafts_for(in_one_pass=spec.in_one_pass)
    speedup, shares = prior_speedup(costs, drafts), DraftShares.of(costs, drafts)
    return Considered(
        name=sizes.name,
        layer=sizes.layer,
        inner=spec.inner_width,
        ffn=spec.ffn,
        num_parameters=sizes.head.num_parameters,
        draft_share=shares.first,
        speedup=speedup,
        tokens_per_s=speedup / costs.full_of(1) if timed else None,
        trained=False,
        further_share=shares.further,
    )


def _untrained(
    config: CalibrationConfig, adapter: ModelAdapter, spec: CandidateSpec, device: str | None = None
) -> Candidate:
    """For its sizes and its time; the weights mean nothing."""
    with torch.device(device or adapter.device):
        head = ExitHead(head_spec(adapter, spec, config.drafts_for(in_one_pass=spec.in_one_pass)))
        router = Router(head.spec.width, config.router_bottleneck)
    return Candidate(spec.layer, spec.kind, head.requires_grad_(False), router.requires_grad_(False), spec.name)

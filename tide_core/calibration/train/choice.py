"""Which candidates are trained: for a wide model those that should be fastest on this device, a few of them.

A head as wide as the model is right for a small model and too dear for a wide one. For a wide model narrow blocks
after the first layer are considered next to it, and priced by passes that are timed here. How often they will be right
is not known yet, so all are given the same prior: the order is one of costs. The cheapest `MOST_TRAINED` are trained,
and their traces decide.

The choice is made once in a run and kept in a file: timings differ from one start to the next, a run does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import Progress
from tide_core.calibration.risk.costs import Considered, Costs, MeasuredCosts, costs_of, draft_share, prior_speedup
from tide_core.calibration.risk.pass_times import measure_costs
from tide_core.calibration.train import candidates
from tide_core.calibration.train.candidates import (
    Candidate,
    CandidateSpec,
    candidates_of,
    head_spec,
    narrow_candidates,
)
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import ExitHead
from tide_core.exits.artefact.router import Router
from tide_core.models.adapter import ModelAdapter

MOST_TRAINED = 2
"""Each makes a step of all of them longer."""


@dataclass(frozen=True, slots=True)
class CandidateChoice:
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
    def from_json(cls, raw: bytes) -> CandidateChoice:
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


def choose(
    config: CalibrationConfig, adapter: ModelAdapter, shortlist_size: int, progress: Progress
) -> CandidateChoice:
    """The candidates to train; times passes of the model where there is a choice."""
    usual = candidates_of(config, adapter.num_layers)
    narrow = narrow_candidates(config, adapter.num_layers, int(adapter.config.hidden_size))
    if not narrow and (len(usual) == 1 or int(adapter.config.hidden_size) < candidates.WIDE_FROM):
        return CandidateChoice(tuple(spec.name for spec in usual))
    specs = [*narrow, *usual]
    measured = measure_costs(adapter, [_untrained(config, adapter, spec) for spec in specs], shortlist_size)
    priced = {}
    for spec in specs:
        sizes = _untrained(config, adapter, spec, device="meta")
        costs: Costs = costs_of(sizes, adapter, shortlist_size) if measured is None else measured[spec.name]
        priced[spec.name] = _priced(config, sizes, costs, timed=measured is not None)
    names = trained_names(priced.values()) if narrow else set(priced)
    considered = [replace(each, trained=each.name in names) for each in _ranked(priced.values())]
    chosen = tuple(each.name for each in considered if each.trained)
    how = "parameters read" if measured is None else "passes timed here"
    shares = ", ".join(f"{name} ({priced[name].draft_share:.3f} of a full pass a draft)" for name in chosen)
    progress.note(f"candidates: {len(chosen)} of {len(specs)} are trained, by {how}: {shares}")
    return CandidateChoice(
        chosen, tuple(considered), None if measured is None else {name: measured[name] for name in chosen}
    )


def trained_names(priced: Iterable[Considered]) -> set[str]:
    """The fastest, `MOST_TRAINED` at most."""
    return {each.name for each in _ranked(priced)[:MOST_TRAINED]}


def _ranked(priced: Iterable[Considered]) -> list[Considered]:
    return sorted(priced, key=lambda each: (-each.speedup, each.draft_share))


def _priced(config: CalibrationConfig, sizes: Candidate, costs: Costs, *, timed: bool) -> Considered:
    spec, speedup = sizes.head.spec, prior_speedup(costs, config.max_drafts)
    return Considered(
        name=sizes.name,
        layer=sizes.layer,
        inner=spec.inner_width,
        ffn=spec.ffn,
        num_parameters=sizes.head.num_parameters,
        draft_share=draft_share(costs),
        speedup=speedup,
        tokens_per_s=speedup / costs.full_of(1) if timed else None,
        trained=False,
    )


def _untrained(
    config: CalibrationConfig, adapter: ModelAdapter, spec: CandidateSpec, device: str | None = None
) -> Candidate:
    """For its sizes and its time; the weights mean nothing."""
    with torch.device(device or adapter.device):
        head = ExitHead(head_spec(adapter, spec, config.max_drafts))
        router = Router(head.spec.width, config.router_bottleneck)
    return Candidate(spec.layer, spec.kind, head.requires_grad_(False), router.requires_grad_(False), spec.name)

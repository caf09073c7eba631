"""Whether exits pay on this machine: a freshly measured cost table, combined with the artefact's acceptance.

The verdict is the plan that the engine itself would make for each number of rows. A table for the default context is
written into the engine's cache, so that its next start needs no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, artefact_folder, assemble_loaded, cost_facts
from tide_core.errors import ConfigError
from tide_core.execution.cost_measure import CONTEXT, cache_path, measure, write_table
from tide_core.exits.artefact.artefact import Artefact, load_artefact
from tide_core.exits.cost import Acceptance, CostTable, DraftPlanner
from tide_core.models.identity import identify
from tide_core.models.loader import find_model, fingerprint, load_model, load_tokenizer
from tide_core.models.model_cache import default_cache_dir

LIMIT_S = 60.0
"""Time after which no further number of rows is measured."""


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """The verdict for one number of rows."""

    rows: int
    full_ms: float | None
    """Time of a step at full depth; None if this number of rows was not measured."""
    drafts: int
    speedup: float
    """Predicted tokens per second over those of full depth; 1 without drafts."""

    @property
    def pays(self) -> bool:
        return self.drafts > 0

    @property
    def text(self) -> str:
        if self.pays:
            return "exits pay"
        return "do not pay: serve it in `full`" if self.full_ms is not None else "not measured: served in `full`"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict for every number of rows, and its conditions."""

    model: str
    artefact: str
    device: str
    dtype: str
    kernels: str
    context: int
    max_drafts: int
    acceptance: tuple[float, ...]
    rows: tuple[RowsVerdict, ...]
    table: CostTable
    kept_in: Path | None
    """File of the table in the engine's cache; None for a context other than the default."""

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["kept_in"] = None if self.kept_in is None else str(self.kept_in)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain |= {"pays": row.pays, "verdict": row.text}
        return values


def decide(config: EngineConfig, rows: Sequence[int], *, context: int | None = None) -> Verdict:
    """Measure steps and cycles of this model and artefact, and plan for each number of rows."""
    context = CONTEXT if context is None else context
    parts, artefact, identity = _assemble(config)
    config = parts.config
    most = min(config.max_pending, artefact.manifest.max_drafts)
    limit = parts.max_model_len - most - 1
    if not 1 <= context <= limit:
        expected = f"an integer in 1..{limit}: the model's {parts.max_model_len} tokens less a cycle of {most} drafts"
        raise ConfigError("context", context, expected)
    pool = parts.core.scheduler.blocks
    if context + most + 1 > pool.num_blocks * pool.block_size:
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, f"at least one row of {context + most + 1} tokens")
    usual = context == CONTEXT
    table = measure(
        parts.runner,
        pool,
        max_rows=config.max_rows if usual else max(rows),
        max_drafts=most,
        context=context,
        limit_s=LIMIT_S,
        suffix_drafts=config.suffix_drafts,
    )
    acceptance = artefact.manifest.checkpoints[0].acceptance
    planner = DraftPlanner(most, Acceptance.prior(acceptance, most), table)
    return Verdict(
        model=parts.model_name,
        artefact=artefact.digest,
        device=str(parts.runner.cache.device),
        dtype=config.dtype,
        kernels=parts.kernels.name,
        context=context,
        max_drafts=most,
        acceptance=acceptance,
        rows=tuple(_plan(planner, table, count) for count in rows),
        table=table,
        kept_in=_keep(parts, artefact, identity, table, most) if usual else None,
    )


def _plan(planner: DraftPlanner, table: CostTable, rows: int) -> RowsVerdict:
    plan = planner.plan(rows, rows)
    return RowsVerdict(rows, 1e3 * table.full(rows) if rows <= table.max_rows else None, plan.drafts, plan.gain)


def _assemble(config: EngineConfig) -> tuple[Parts, Artefact, str]:
    """As the engine does, but without its own cost table."""
    resolved = find_model(config)
    folder = artefact_folder(config, is_demo=resolved.source == "demo")
    if folder is None:
        raise ConfigError("artefact", config.artefact, f"a folder of calibrated exits; {resolved.name} comes with none")
    model = load_model(resolved, dtype=config.dtype, device=config.device, quantization=config.quantization)
    tokenizer = load_tokenizer(resolved)
    identity = identify(model, tokenizer, resolved)
    artefact, key = load_artefact(folder, identity), fingerprint(resolved, identity.weights_sha256)
    parts = assemble_loaded(
        replace(config, drafts=0), model, tokenizer, name=resolved.name, identity=key, artefact=artefact
    )
    return parts, artefact, key


def _keep(parts: Parts, artefact: Artefact, identity: str, table: CostTable, most: int) -> Path | None:
    """Write the table into the cache, for engines with these settings."""
    facts = cost_facts(parts.config, parts.runner, identity, artefact.digest, most)
    path = cache_path(default_cache_dir(), facts)
    write_table(path, table, facts)
    return path if path.is_file() else None

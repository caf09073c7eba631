"""Parts `measure` and `profile`: the engine with the published exits.

One row answers prompt after prompt. In a batch every row that ends is followed by the next prompt, as under load, and
answers have different lengths, the same in both modes: with equal lengths all rows at full depth would end in one step,
with drafts they would not. Both modes run the same prompts in turns in one engine, and prefill is part of the time. The
prompts are not in the data of the calibration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.prompts import Prompt, different_kinds
from benchmarks.common.report import Measures, commit
from benchmarks.common.runs import Bench, Runs, greedy, output_ids, varied
from benchmarks.common.shapes import KV_GIB, bytes_of
from benchmarks.production.session import Session, Sizes
from tide_core.config import EngineConfig
from tide_core.engine.assemble import assemble_loaded
from tide_core.evaluation.machine import device_name
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.exits.cost import CostTable

MODES = ("full", "verified")
MAX_MODEL_LEN, SMALL_MODEL_LEN = 1024, 512
BATCH_TOKENS = 8192
"""Token budget of a step: enough for the prompts of most steps, and for all drafts of all rows."""
SLACK = 1.5
"""Expected time of a batch size, as a multiple of the time of its steps at full depth."""


def measure(session: Session) -> Measures:
    """`verified` against `full` at each batch size; those that an earlier call measured are not measured again."""
    if session.state.values["calibrated"] is None or not session.artefact.is_dir():
        raise SystemExit(f"benchmark: no artefact in {session.folder}; run the part calibrate first")
    found, key, done = Measures(), session.target.key, _done_before(session)
    for rows in session.sizes.batches:
        if str(rows) in done["batches"]:
            session.log(f"batch {rows}: done before")
        else:
            done["batches"][str(rows)] = _batch(session, rows)
            session.state.save()
        figures = done["batches"][str(rows)]
        found.figures[f"batch {rows}"] = figures
        found.add(f"{key}_{rows}", figures["over_full"], figures["shown"])
    found.figures["conditions"] = done["conditions"]
    return found


def _done_before(session: Session) -> dict[str, Any]:
    """Results under the same conditions, kept in the state."""
    conditions = {
        "artefact": session.state.values["calibrated"]["digest"],
        "commit": commit(),
        "hardware": device_name(torch.device(session.target.device)),
        "sizes": {name: value for name, value in asdict(session.sizes).items() if name != "batches"},
    }
    if session.state.values["measured"].get("conditions") != conditions:
        session.state.values["measured"] = {"conditions": conditions, "batches": {}}
    measured: dict[str, Any] = session.state.values["measured"]
    return measured


def _batch(session: Session, rows: int) -> dict[str, Any]:
    bench, sizes = session.bench, session.sizes
    groups, lengths = groups_of(bench.prompts, rows, sizes)
    rounds = sum(map(len, groups)) / rows
    session.deadline.check(f"batch {rows}", _expected_s(bench, rows, rounds, sizes))
    session.log(f"batch {rows}: {rounds:g} prompts a row, {sizes.repeats} repeats")
    with bench.at_most(rows):
        contracts = {mode: [greedy(mode, length) for length in lengths] for mode in MODES}
        runs = bench.turns(groups, contracts, sizes.repeats)
    full, verified = runs["full"], runs["verified"]
    num_different = _different(full, verified)
    figures = verified.figures()
    per_pass, drafts = figures["tokens_per_deep_pass"], figures["drafts_per_deep_pass"]
    rates = f"{verified.rate:.0f} against {full.rate:.0f} tokens/s, {per_pass:.2f} tokens and {drafts:.2f} drafts"
    shown = f"{rates} per deep pass, {num_different} of {len(full.answers)} answers differ"
    session.log(f"batch {rows}: {verified.over(full):.3f}, {shown}")
    return {
        "over_full": verified.over(full),
        "shown": shown,
        "full": full.figures(),
        "verified": figures,
        "num_answers": len(full.answers),
        "num_different": num_different,
        "identical": num_different == 0,
        "planned_drafts": bench.planner.plan(rows, rows).drafts,
        "predicted_by_calibration": session.state.values["calibrated"]["predicted"].get(str(rows)),
        "predicted_by_planner": bench.planner.plan(rows, rows).gain,
    }


def groups_of(prompts: Sequence[Prompt], rows: int, sizes: Sizes) -> tuple[list[list[Prompt]], list[int]]:
    """Groups of prompts of all kinds that run together, and the lengths of the answers of a group. With fewer prompts
    than a batch size needs, some come several times."""
    if rows == 1:
        return [[prompt] for prompt in different_kinds(prompts, sizes.prompts)], [sizes.tokens]
    needed = rows * sizes.rounds
    chosen = different_kinds(prompts, needed)
    return [[chosen[index % len(chosen)] for index in range(needed)]], varied(sizes.tokens, needed)


def _expected_s(bench: Bench, rows: int, rounds: float, sizes: Sizes) -> float:
    """Predicted seconds of a batch size by the engine's cost table; 0 if it has none."""
    table = bench.planner.table
    if table is None or not table.points:
        return 0.0
    return SLACK * table.full(rows) * sizes.tokens * len(MODES) * (rounds * sizes.repeats + 1)


def _different(first: Runs, second: Runs) -> int:
    return sum(output_ids(a) != output_ids(b) for a, b in zip(first.answers, second.answers, strict=True))


def start_bench(session: Session) -> Bench:
    """An engine on the model of the session with the published artefact."""
    loaded, most = session.loaded, max(session.sizes.batches)
    on_cuda = loaded.model.device.type == "cuda"
    config = EngineConfig(
        model="made",
        artefact="none",
        device=loaded.model.device.type,
        dtype=session.target.dtype,
        max_rows=most,
        max_model_len=SMALL_MODEL_LEN if session.small else MAX_MODEL_LEN,
        max_batch_tokens=BATCH_TOKENS,
        kv_memory_gib=KV_GIB if on_cuda else 0.5,
        prefix_caching=False,  # every turn computes its prompts
        suffix_drafts=False,  # what exits gain; past its end a text repeats itself
    )
    artefact = load_artefact(session.artefact, loaded.identity)
    key = hashlib.sha256(repr(loaded.identity).encode()).hexdigest()
    parts = assemble_loaded(config, loaded.model, loaded.tokenizer, name=loaded.name, identity=key, artefact=artefact)
    return Bench(config, session.prompt_file, parts)


def profile(session: Session) -> Measures:
    """Costs of the passes of a cycle, from the engine's own cost table."""
    found, bench = Measures(), session.bench
    table = bench.planner.table
    if table is None or not table.points:
        raise SystemExit("benchmark: the engine has no cost table")
    found.figures |= {"passes": pass_costs(table), "draft_bytes": draft_bytes(bench)}
    for point in found.figures["passes"]:
        known = [cycle for cycle in point["cycles"] if cycle["draft_ms"] is not None]
        if known:
            share = known[-1]["draft_ms"] / point["full_ms"]
            session.log(f"{point['rows']:4} rows: full {point['full_ms']:.3f} ms, a draft {share:.3f} of it")
    return found


def pass_costs(table: CostTable) -> list[dict[str, Any]]:
    """By rows and drafts: a cycle, its deep pass and one of its drafts, in milliseconds.

    A cycle of k drafts is k shallow passes with head and router, and a deep pass over k + 1 tokens of every row through
    all layers. A step at full depth of as many tokens takes as long as that deep pass, except for attention; where the
    table has no step of so many tokens, neither is known."""
    return [
        {
            "rows": point.rows,
            "full_ms": 1e3 * point.full_s,
            "cycles": [_cycle(table, point.rows, drafts, seconds) for drafts, seconds in point.cycle_s],
        }
        for point in table.points
    ]


def _cycle(table: CostTable, rows: int, drafts: int, seconds: float) -> dict[str, Any]:
    pending = rows * (drafts + 1)
    deep = table.full(pending) if pending <= table.max_rows else None
    return {
        "drafts": drafts,
        "cycle_ms": 1e3 * seconds,
        "deep_ms": None if deep is None else 1e3 * deep,
        "draft_ms": None if deep is None or not drafts else 1e3 * (seconds - deep) / drafts,
    }


def draft_bytes(bench: Bench) -> dict[str, int]:
    """Weights that one draft reads: what its time should be divided by."""
    exits, adapter = bench.parts.runner.exits, bench.parts.runner.adapter
    assert exits is not None
    first = exits.checkpoints[0]
    width = int(adapter.config.hidden_size)
    return {
        "layers": sum(bytes_of(layer) for layer in adapter.layers[: first.layer]),
        "head": bytes_of(first.head) - bytes_of(getattr(first.head, "fuse", None)),
        "shortlist": len(exits.shortlist) * width * adapter.dtype.itemsize,
        "router": bytes_of(first.router),
        "all_layers": sum(bytes_of(layer) for layer in adapter.layers),
    }

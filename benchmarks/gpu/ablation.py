"""Mechanisms taken out one at a time, in turns with the whole engine in one process.

For each switch of `switches.py`: tokens/s of modes `full` and `verified` without the mechanism over tokens/s of the
unchanged engine, the median of the ratios within each repeat. A mechanism that earns its keep has a ratio below 0.98 in
some line. The demo model runs as in the part `demo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.report import Measures
from benchmarks.common.runs import Contract, Runs, TimedBatch, Work, greedy, take_turns
from benchmarks.gpu.demo import batches_of
from benchmarks.gpu.parts import Session
from benchmarks.gpu.switches import SWITCHES, Switch

BASE = "base"
MODES = ("full", "verified")


def ablation(session: Session, switches: Mapping[str, Switch] = SWITCHES) -> Measures:
    found, bench, sizes = Measures(), session.bench, session.sizes
    parts = bench.parts
    for name, switch in switches.items():
        if switch(parts) is None:
            found.add(f"without_{name}", None, "this engine does not have it")
    present = {name: switch for name, switch in switches.items() if switch(parts) is not None}

    def without(name: str, group: Any, contract: Contract) -> Work:
        def work() -> TimedBatch:
            if name == BASE:
                return bench.timed(group, contract)
            off = present[name](parts)
            assert off is not None
            with off:
                return bench.timed(group, contract)

        return work

    for rows in sizes.batches:
        groups, lengths = batches_of(bench, sizes, rows)
        works = {
            f"{mode} {name}": [without(name, group, [greedy(mode, length) for length in lengths]) for group in groups]
            for name in (BASE, *present)
            for mode in MODES
        }
        with bench.at_most(rows):
            runs = take_turns(works, sizes.turns if rows == 1 else sizes.batch_turns)
        found.figures[f"batch {rows}"] = {name: mine.figures() for name, mine in runs.items()}
        for name in present:
            _add(found, runs, name, rows)
    return found


def _add(found: Measures, runs: Mapping[str, Runs], name: str, rows: int) -> None:
    ratios = {mode: runs[f"{mode} {name}"].over(runs[f"{mode} {BASE}"]) for mode in MODES}
    shown = ", ".join(
        f"{mode} {ratio:.3f} ({runs[f'{mode} {name}'].rate:.0f} against {runs[f'{mode} {BASE}'].rate:.0f} tokens/s)"
        for mode, ratio in ratios.items()
    )
    found.figures.setdefault("over_base", {}).setdefault(name, {})[str(rows)] = ratios
    found.add(f"without_{name}_{rows}", min(ratios.values()), shown)

"""`full` and `verified` at the cost of a production model, with exits that are calibrated on it.

    python -m benchmarks.production --factor 8 --state DIR --parts calibrate,measure --out FILE
    python -m benchmarks.production --state DIR --set steps=1000 --limit 300   # settings of the calibration, seconds
    python -m benchmarks.production --small                                    # a tiny model on the CPU: does it run
    python -m benchmarks.gpu.table FILE --into docs/performance.md --keep      # its rows of the table

    calibrate  exits of the model, as `tide calibrate` makes them: seconds and memory of each phase, size of the result
    measure    verified against full, greedy, rows kept busy, at each batch size; whether all answers are identical
    profile    costs of a draft and of a deep pass, from the engine's cost table

The model is a real small checkpoint, made wider (widen.py): its text and its acceptance are those of the small model,
and a step costs as much as one of a large model. A call ends within `--limit` seconds. Results are kept in `--state`,
and the same command continues from there; its exit code is 3 until everything is done, and 1 if a part failed, a bar is
missed or an answer of `verified` differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import ROOT
from benchmarks.common.bars import Bar, bars_as_json
from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.report import Measures, Report, commit, run_parts
from benchmarks.gpu.table import ROWS, bars_of, render
from benchmarks.production.calibrate import calibrate
from benchmarks.production.measure import measure, profile
from benchmarks.production.session import TINY, Deadline, OutOfTime, Session, Sizes, Target
from benchmarks.production.widen import MAX_FACTOR
from tide_core.calibration.config import CalibrationConfig
from tide_core.errors import ConfigError
from tide_core.evaluation.machine import device_name
from tide_core.kernels import native_digest, select_kernels

PARTS: dict[str, Callable[[Session], Measures]] = {"calibrate": calibrate, "measure": measure, "profile": profile}
UNFINISHED = 3
"""Exit code if the time of the call ended first."""
LIMIT_S = 570.0
STATES = ROOT / "build" / "production"
UNTIMED: dict[str, Any] = {"measure_batches": [], "fast_steps": 0}
"""The part `measure` times the exits; mode fast is not measured here."""
CALIBRATION = {**UNTIMED, "minutes": 13}
"""Without the time to make the model."""
SMALL_CALIBRATION = {
    **UNTIMED,
    "num_samples": 24,
    "max_prompt_tokens": 48,
    "max_new_tokens": 12,
    "self_prompt_tokens": 12,
    "generation_batch": 8,
    "shortlist_size": 64,
    "steps": 6,
    "batch_tokens": 256,
    "max_drafts": 2,
    "router_bottleneck": 8,
    "min_calibration": 4,
    "min_test": 4,
}
SMALL_SIZES = Sizes(batches=(1, 4), tokens=12, repeats=2, prompts=2, rounds=2)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure exits at the cost of a production model.")
    parser.add_argument(
        "--state", type=Path, help="a folder for all that is done; default: build/production/MODEL_xFACTOR"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", help="demo (the default), a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--factor", type=int, help="how many times as wide; 1 takes the model as it is; default: 8")
    parser.add_argument("--batches", help="rows of the part measure, such as 1,8; default: 1,8,32,128")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the calibration")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=f"default: {LIMIT_S:g}")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, on the CPU")
    parser.add_argument("--prompt-file", type=Path, default=PROMPT_FILE)
    parser.add_argument("--out", type=Path, help="a file for the report, written after every part")
    parser.add_argument("--no-bars", action="store_true", help="do not fail on a missed bar")
    options = parser.parse_args(argv)
    options.parts = tuple(dict.fromkeys(options.parts.split(",")))
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    options.factor = (2 if options.small else 8) if options.factor is None else options.factor
    if not 1 <= options.factor <= MAX_FACTOR:
        parser.error(f"--factor: got {options.factor}, expected 1 to {MAX_FACTOR}")
    if options.batches is not None:
        if not all(rows.isdecimal() and int(rows) for rows in options.batches.split(",")):
            parser.error(f"--batches: got {options.batches}, expected numbers of rows such as 1,8")
        options.batches = tuple(int(rows) for rows in options.batches.split(","))
    values = dict(SMALL_CALIBRATION if options.small else CALIBRATION)
    try:
        options.calibration = CalibrationConfig.from_mapping(values | settings(options.set))
    except (ConfigError, ValueError) as error:
        parser.error(f"--set: {error}")
    return options


def settings(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, with values as JSON, as `tide calibrate --set` takes them."""
    values: dict[str, Any] = {}
    for setting in given:
        key, _, value = setting.partition("=")
        try:
            values[key] = json.loads(value)
        except ValueError:
            raise ValueError(f"got {setting}, expected KEY=VALUE with a JSON value") from None
    return values


def make_session(options: argparse.Namespace, log: Callable[[str], None]) -> Session:
    device = "cpu" if options.small else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmark: no CUDA device can be used here; --small runs without one")
    model = options.model or (TINY.name if options.small else "demo")
    target = Target(model, options.factor, device, "float32" if device == "cpu" else "bfloat16")
    sizes = SMALL_SIZES if options.small else Sizes()
    if options.batches is not None:
        sizes = replace(sizes, batches=options.batches)
    session = Session(
        target,
        options.state or STATES / target.key,
        options.calibration,
        Deadline(options.limit),
        log,
        sizes=sizes,
        prompt_file=options.prompt_file,
        small=options.small,
    )
    _ = session.state  # refuses a folder of other settings before any work is done
    return session


def conditions(session: Session, argv: Sequence[str]) -> dict[str, Any]:
    target, device = session.target, torch.device(session.target.device)
    return {
        "command": " ".join(["python -m benchmarks.production", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": device_name(device),
        "cuda": torch.version.cuda,
        "kernels": select_kernels("auto", device).name,
        "native_digest": native_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "small": session.small,
        **asdict(target),
        "sizes": asdict(session.sizes),
        "calibration": session.calibration.to_mapping(),
        "timing": "medians by the host's clock, prompts included",
    }


def identity_bars(report: Mapping[str, Any]) -> list[Bar]:
    """Mode `verified` emits what mode `full` emits."""
    figures = report["parts"].get("measure", {}).get("figures", {})
    return [
        Bar(f"{name}: answers that differ", figure["num_different"], 0, at_least=False)
        for name, figure in figures.items()
        if "num_different" in figure
    ]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)

    def log(line: str) -> None:
        print(line, flush=True)

    started = time.perf_counter()
    session = make_session(options, log)
    report: Report = {"conditions": conditions(session, argv), "parts": {}, "bars": [], "finished": False}
    for name, value in report["conditions"].items():
        log(f"{name:14} {value}")
    chosen = {
        name: PARTS[name] for name in PARTS if name in options.parts
    }  # in the order in which they need each other
    try:
        run_parts(session, chosen, report, log, options.out, bars_of)
        report["finished"] = True
    except OutOfTime as stop:
        log(f"\nout of time: {stop}. The same command continues from {session.folder}")
    finally:
        session.close()
    report["seconds"] = time.perf_counter() - started
    report["bars"] += bars_as_json(identity_bars(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report, log)
    if not report["finished"]:
        return UNFINISHED
    failed = any("error" in part for part in report["parts"].values())
    return int(failed or (not options.no_bars and not all(bar["holds"] for bar in report["bars"])))


def show(report: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """The rows of the table that this report has, and its bars."""
    known = {key for part in report["parts"].values() for key in part.get("measures", {})}
    lines = render([report]).splitlines()[2:]
    log("")
    for row, line in zip(ROWS, lines, strict=True):
        if row.key in known:
            log(line)
    for bar in report["bars"]:
        log(f"  {Bar(bar['name'], bar['value'], bar['limit'], bar['at_least']).line()}")
    log(f"{report['seconds']:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())

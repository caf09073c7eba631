"""Block drafters against the present exit head, after equal training: tokens per deep pass, and predicted speed-up.

    python -m benchmarks.block_drafter --out FILE                   # the demo model on a GPU, all usual variants
    python -m benchmarks.block_drafter --out FILE --minutes 1.5 --variants head,block:layers=2:mix
    python -m benchmarks.block_drafter --tiny                       # a tiny random model on the CPU: does it run

Every variant is trained for `--minutes` on the same text and evaluated on held-out prompts, some written by the model
and some by people. FILE is written after the costs and after every variant; the same command continues with the missing
ones. A call ends within `--limit` seconds, with exit code 3 if variants are missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.block_drafter.cost import ROWS, SCALES, Place, cost_key, measure_costs
from benchmarks.block_drafter.data import Batches, Text, make_text
from benchmarks.block_drafter.evaluate import evaluate
from benchmarks.block_drafter.table import render
from benchmarks.block_drafter.train import BlockTrainee, HeadTrainee, Sizes, train
from benchmarks.block_drafter.variants import Variant
from benchmarks.common import ROOT
from benchmarks.common.report import commit
from benchmarks.common.shapes import SMALL
from benchmarks.production.session import TINY, Deadline, OutOfTime, Target
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train.teacher import Teacher
from tide_core.disk import write_whole
from tide_core.errors import ConfigError, one_line
from tide_core.evaluation.machine import device_name
from tide_core.models.adapter import ModelAdapter
from tide_core.models.loader import TORCH_DTYPES

LENGTHS = (2, 3, 4, 6, 8, 12, 16)
VARIANTS = (
    "head",
    "block:layers=2",
    "block:layers=1",
    "block:layers=5",
    "block:layers=3:mix:taps=4",
    "head:width=0.25",
    "block:layers=2:width=0.5",
    "block:layers=2:checkpoint=0",
    "block:layers=2:places=16",
    "block:layers=2:seed=none",
)
"""The most informative first, since a call may end before the last."""
UNFINISHED = 3
EVALUATION_S = 15.0
"""Seconds reserved for the evaluation of a variant."""
MINUTES, LIMIT_S, SAMPLES, PEOPLE = 0.5, 480.0, 12288, 225
TINY_CALIBRATION: dict[str, Any] = {
    "max_prompt_tokens": 48,
    "max_new_tokens": 24,
    "self_prompt_tokens": 12,
    "generation_batch": 8,
    "shortlist_size": 64,
}
TINY_SIZES = Sizes(batch_tokens=512, blocks=32, rows=128, distances=3)
STATES = ROOT / "build" / "block_drafter"
PURPOSE = ("model", "minutes", "max_steps", "samples", "people", "seed", "sizes")
"""Conditions that must be equal for variants to be compared."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare block drafters with the present exit head.")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas between them; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="training of each; default: %(default)s")
    parser.add_argument("--max-steps", type=int, help="end a training after so many steps, if that is earlier")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--model", help="demo (the default), a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--device", help="default: cuda, with --tiny cpu")
    parser.add_argument("--samples", type=int, help=f"sequences of the model's own prompts; default: {SAMPLES}")
    parser.add_argument("--people", type=int, help=f"prompts of people; default: {PEOPLE}")
    parser.add_argument("--new-tokens", type=int, help="tokens of an answer; default: that of a calibration")
    parser.add_argument("--batch-tokens", type=int, help="tokens of a training step")
    parser.add_argument("--blocks", type=int, help="blocks of a training step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a folder for the text; default: build/block_drafter/MODEL")
    parser.add_argument("--out", type=Path, help="a file for the report, written after every variant")
    parser.add_argument("--no-costs", action="store_true", help="do not time cycles; the table has no speed-ups")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and few steps, on the CPU")
    options = parser.parse_args(argv)
    try:
        options.variants = [Variant.parse(text) for text in options.variants.split(",")]
    except ConfigError as error:
        parser.error(str(error))
    if options.minutes <= 0 or options.limit <= 0:
        parser.error("--minutes and --limit: expected a number above 0")
    options.model = options.model or (TINY.name if options.tiny else "demo")
    options.device = options.device or ("cpu" if options.tiny else "cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmark: no CUDA device can be used here; --tiny or --device cpu runs without one")
    options.samples = options.samples or (24 if options.tiny else SAMPLES)
    options.people = options.people or (6 if options.tiny else PEOPLE)
    if options.tiny and options.max_steps is None:
        options.max_steps = 6
    usual = TINY_SIZES if options.tiny else Sizes()
    options.sizes = Sizes(
        options.batch_tokens or usual.batch_tokens,
        options.blocks or usual.blocks,
        usual.rows,
        usual.distances,
        options.seed,
    )
    return options


def calibration(options: argparse.Namespace) -> CalibrationConfig:
    """Settings of the text and of the exit heads."""
    values: dict[str, Any] = {
        "num_samples": options.samples,
        "seed": options.seed,
        "greedy_share": 1.0,
        "calibration_share": 0.001,
        "min_calibration": 1,
        "test_share": 0.03,
        "min_test": 4,
        "max_drafts": options.sizes.distances,
        **(TINY_CALIBRATION if options.tiny else {}),
    }
    if options.new_tokens:
        values["max_new_tokens"] = options.new_tokens
    return CalibrationConfig.from_mapping(values)


class Study:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str], log: Callable[[str], None]) -> None:
        self._options, self._log = options, log
        self._deadline = Deadline(options.limit)
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        self._target = Target(options.model, 1, options.device, dtype)
        self._place = Place(torch.device(options.device), TORCH_DTYPES[dtype])
        sizes = {name: getattr(options.sizes, name) for name in options.sizes.__slots__}
        self.report: dict[str, Any] = {
            "conditions": {
                "command": " ".join(["python -m benchmarks.block_drafter", *argv]),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit(),
                "hardware": device_name(self._place.device),
                "torch": torch.__version__,
                **{name: getattr(options, name) for name in PURPOSE if name != "sizes"},
                "sizes": sizes,
            },
            "costs": None,
            "variants": {},
        }
        self._continue()

    def _continue(self) -> None:
        """Take over the results of an earlier call."""
        out = self._options.out
        if out is None or not out.exists():
            return
        before = json.loads(out.read_text())
        mine = self.report["conditions"]
        if changed := [name for name in PURPOSE if before["conditions"].get(name) != mine[name]]:
            raise SystemExit(f"benchmark: {out} was made with other {', '.join(changed)}; name another --out")
        self.report["variants"] = {name: each for name, each in before["variants"].items() if "error" not in each}
        self.report["costs"] = before["costs"]

    def run(self) -> int:
        """The exit code: 3 if variants are missing, 1 if one has failed."""
        try:
            self._measure_costs()
            self._train_all()
        except OutOfTime as stop:
            self._log(f"\nout of time: {stop}. The same command continues")
        done = self.report["variants"]
        if {each.name for each in self._options.variants} - set(done):
            return UNFINISHED
        return int(any("error" in each for each in done.values()))

    def _measure_costs(self) -> None:
        """Time cycles, unless an earlier call timed those of all variants. Variants are trained even if this fails."""
        options, before = self._options, self.report["costs"] or {}
        wanted = {cost_key(each) for each in options.variants}
        known = [set(costs["cycle_ms"]) for by_rows in before.values() for costs in by_rows.values()]
        if options.no_costs or (known and all(wanted <= each for each in known)):
            return
        began = time.perf_counter()
        scales, rows = ((SMALL,), (1,)) if options.device == "cpu" else (SCALES, ROWS)
        try:
            self.report["costs"] = measure_costs(scales, options.variants, rows, self._place)
        except Exception:
            self._log(f"costs: failed\n{traceback.format_exc()}")
            return
        self._log(f"costs: measured in {time.perf_counter() - began:.1f} s")
        self._save()

    def _train_all(self) -> None:
        options = self._options
        missing = [each for each in options.variants if each.name not in self.report["variants"]]
        if not missing:
            return
        loaded = self._target.make()
        adapter = ModelAdapter(loaded.model, paged=False)
        config = calibration(options)
        folder = options.state or STATES / self._target.key
        text = make_text(folder, config, adapter, loaded.tokenizer, options.people, self._log)
        teacher = Teacher(adapter, text.shortlist)
        for variant in missing:
            self._deadline.check(variant.name, 60 * options.minutes + EVALUATION_S)
            try:
                found = self._one(variant, adapter, teacher, config, text)
            except Exception as error:  # continue with the other variants
                self._log(f"{variant.name}: failed\n{traceback.format_exc()}")
                found = {"error": one_line(error)}
            self.report["variants"][variant.name] = found
            self._save()

    def _one(
        self, variant: Variant, adapter: ModelAdapter, teacher: Teacher, config: CalibrationConfig, text: Text
    ) -> dict[str, Any]:
        options, sizes = self._options, self._options.sizes
        trainee: BlockTrainee | HeadTrainee = (
            HeadTrainee(variant, adapter, teacher, config, sizes)
            if variant.kind == "head"
            else BlockTrainee(variant, adapter, teacher, sizes)
        )
        batches = Batches(text.train, sizes.batch_tokens, sizes.seed).epochs()
        trained = train(
            trainee,
            batches,
            adapter,
            60 * options.minutes,
            is_plain=teacher.is_plain,
            max_steps=options.max_steps,
        )
        began = time.perf_counter()
        held_out = {
            kind: evaluate(trainee, teacher, sequences, LENGTHS, batch_tokens=sizes.batch_tokens)
            for kind, sequences in text.held_out.items()
        }
        seconds = time.perf_counter() - began
        self._log(
            f"{variant.name}: {trained.steps} steps in {trained.seconds:.1f} s, evaluated in {seconds:.1f} s: "
            + ", ".join(f"{kind} {max(each['tokens_per_pass'].values()):.3f}" for kind, each in held_out.items())
        )
        if adapter.device.type == "cuda":
            torch.cuda.empty_cache()
        return {
            "parameters": trainee.num_parameters,
            "steps": trained.steps,
            "seconds": trained.seconds,
            "curve": trained.curve,
            "held_out": held_out,
        }

    def _save(self) -> None:
        if self._options.out is not None:
            self._options.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._options.out, (json.dumps(self.report, indent=1) + "\n").encode())


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = arguments(argv)

    def log(line: str) -> None:
        print(line, flush=True)

    study = Study(options, argv, log)
    for name, value in study.report["conditions"].items():
        log(f"{name:10} {value}")
    code = study.run()
    for line in render(study.report):
        log(line)
    return code


if __name__ == "__main__":
    sys.exit(main())

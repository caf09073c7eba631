"""Exits of mode fast after equal training: on the mode's own answers, how many tokens differ and how many layers run.

    python -m benchmarks.fast_exits --out FILE                     # the demo model and its draft head, on a GPU
    python -m benchmarks.fast_exits --out FILE --minutes 2 --variants rank=64,rank=256:layers=10
    python -m benchmarks.fast_exits --device cpu --samples 64 --minutes 10   # the same, slower
    python -m benchmarks.fast_exits --tiny                         # a tiny random model: does it run

Each variant trains exits and skip maps behind the same draft head for `--minutes`. Then the engine answers held-out
prompts that people wrote, greedily, in mode fast at each threshold, from the first exit on and from the second one on;
full depth reads each answer. FILE is written after every variant; the same command continues with the missing ones. A
call ends within `--limit` seconds, with exit code 3 if variants are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.block_drafter.__main__ import STATES, TINY_CALIBRATION
from benchmarks.block_drafter.data import Text, make_text
from benchmarks.common.report import commit
from benchmarks.production.session import TINY, Deadline, OutOfTime, Target
from tide_core.calibration.collect.shards import TokenShards, write_shard
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.progress import SilentProgress
from tide_core.calibration.train.candidates import Candidate, CandidateSpec, make_candidate
from tide_core.calibration.train.fast import MapWeights, TrainedFast, fit_fast
from tide_core.config import EngineConfig
from tide_core.disk import write_whole
from tide_core.engine import assemble
from tide_core.engine.engine import Engine
from tide_core.evaluation.full_depth import FullDepth
from tide_core.evaluation.machine import device_name
from tide_core.exits.artefact.artefact import Artefact, Checkpoint, DataSummary, Manifest, load_artefact, save_artefact
from tide_core.models.adapter import ModelAdapter
from tide_core.models.identity import identify
from tide_core.request import SamplingParams

VARIANTS = (
    "rank=64",
    "rank=64:kept=0",
    "rank=256",
    "rank=64:states=0",
    "rank=1024",
    "rank=256:layers=10",
    "rank=256:layers=8+15+22",
)
"""The most informative first, since a call may end before the last."""
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.5)
UNFINISHED = 3
EVALUATION_S = 60.0
"""Seconds reserved for the evaluation of a variant."""
MAX_DRAFTS = 5
PURPOSE = ("model", "minutes", "samples", "people", "new_tokens", "thresholds")
"""Conditions that must be equal for variants to be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    name: str
    layers: tuple[int, ...] | None = None
    rank: int = 64
    hidden: int | None = None
    states: float = 1.0
    kept: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Variant:
        kinds: dict[str, Any] = {"rank": int, "hidden": int, "states": float, "kept": float}
        values: dict[str, Any] = {}
        for part in text.split(":"):
            key, given, value = part.partition("=")
            if key == "layers" and given:
                values[key] = tuple(int(layer) for layer in value.split("+"))
            elif key in kinds and given:
                values[key] = kinds[key](value)
            else:
                raise ValueError(f"{part}: expected layers=N+N, rank=N, hidden=N, states=X or kept=X")
        return cls(text, **values)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare exits and skip maps of mode fast.")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas between them; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1.0, help="training of each; default: %(default)s")
    parser.add_argument("--limit", type=float, default=480.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--device", help="default: cuda, with --tiny cpu")
    parser.add_argument("--samples", type=int, help="sequences of the model's own prompts; default: 8192")
    parser.add_argument("--people", type=int, help="prompts of people; default: 64")
    parser.add_argument("--new-tokens", type=int, help="tokens of an answer; default: 128")
    parser.add_argument("--batch-tokens", type=int, help="tokens of a training step; default: 8192, on a CPU 1024")
    parser.add_argument("--thresholds", default=",".join(f"{each:g}" for each in THRESHOLDS))
    parser.add_argument("--state", type=Path, help="a folder for the text; default: build/block_drafter/MODEL")
    parser.add_argument("--out", type=Path, help="a file for the report, written after every variant")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and few steps, on the CPU")
    options = parser.parse_args(argv)
    try:
        options.variants = [Variant.parse(text) for text in options.variants.split(",")]
        options.thresholds = [float(each) for each in options.thresholds.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.model = TINY.name if options.tiny else "demo"
    options.device = options.device or ("cpu" if options.tiny else "cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmark: no CUDA device can be used here; --tiny or --device cpu runs without one")
    options.samples = options.samples or (24 if options.tiny else 8192)
    options.people = options.people or (4 if options.tiny else 64)
    options.new_tokens = options.new_tokens or (8 if options.tiny else 128)
    usual = 256 if options.tiny else 1024 if options.device == "cpu" else 8192
    options.batch_tokens = options.batch_tokens or usual
    return options


class Study:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str]) -> None:
        self._options = options
        self._deadline = Deadline(options.limit)
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        self._target = Target(options.model, 1, options.device, dtype)
        self.report: dict[str, Any] = {
            "conditions": {
                "command": " ".join(["python -m benchmarks.fast_exits", *argv]),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit(),
                "hardware": device_name(torch.device(options.device)),
                "torch": torch.__version__,
                **{name: getattr(options, name) for name in PURPOSE},
            },
            "variants": {},
        }
        out = options.out
        if out is not None and out.exists():
            before = json.loads(out.read_text())
            mine = self.report["conditions"]
            if changed := [name for name in PURPOSE if before["conditions"].get(name) != mine[name]]:
                raise SystemExit(f"benchmark: {out} was made with other {', '.join(changed)}; name another --out")
            self.report["variants"] = before["variants"]

    def run(self) -> int:
        """The exit code: 3 if variants are missing."""
        options, done = self._options, self.report["variants"]
        missing = [each for each in options.variants if each.name not in done]
        if not missing:
            return 0
        config = self._config(None)
        loaded = self._target.make()
        adapter = ModelAdapter(loaded.model, paged=False)
        text = make_text(
            options.state or STATES / self._target.key, config, adapter, loaded.tokenizer, options.people, print
        )
        prompts = [each.tokens[: each.prompt_len].tolist() for each in text.held_out["people"]]
        try:
            for variant in missing:
                self._deadline.check(variant.name, 60 * options.minutes + EVALUATION_S)
                done[variant.name] = self._one(variant, text, prompts)
                if options.out is not None:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(options.out, (json.dumps(self.report, indent=1) + "\n").encode())
        except OutOfTime as stop:
            print(f"\nout of time: {stop}. The same command continues")
            return UNFINISHED
        return 0

    def _config(self, variant: Variant | None) -> CalibrationConfig:
        options = self._options
        values: dict[str, Any] = {
            "num_samples": options.samples,
            "greedy_share": 1.0,
            "calibration_share": 0.001,
            "min_calibration": 1,
            "test_share": 0.03,
            "min_test": 4,
            "max_drafts": MAX_DRAFTS,
            "batch_tokens": options.batch_tokens,
            "fast_steps": 6 if options.tiny else 2**20,
            **(TINY_CALIBRATION if options.tiny else {}),
        }
        if variant is not None:
            values |= {"fast_rank": variant.rank, "fast_hidden": variant.hidden, "fast_layers": variant.layers}
        return CalibrationConfig.from_mapping(values)

    def _one(self, variant: Variant, text: Text, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Train and evaluate one variant, on a model of its own: an engine takes over the model it is given."""
        options = self._options
        loaded = self._target.make()
        loaded.model.requires_grad_(False)
        adapter = ModelAdapter(loaded.model, paged=False)
        base = _draft_of(adapter, loaded, text, tiny=options.tiny)
        draft = Candidate(
            base.manifest.checkpoints[0].layer,
            base.manifest.checkpoints[0].head.kind,
            base.heads[0].to(adapter.device),
            base.routers[0].to(adapter.device),
            "draft",
        )
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            write_shard(Path(folder), "train", 0, text.train)
            trained = fit_fast(
                self._config(variant),
                adapter,
                TokenShards(Path(folder), "train"),
                base.shortlist,
                draft,
                progress=SilentProgress(),
                seconds=60 * options.minutes,
                weights=MapWeights(variant.states, variant.kept),
            )
            trained_s = time.perf_counter() - began
            shown = {name: round(value, 3) for name, value in trained.losses.items()}
            print(f"{variant.name}: trained in {trained_s:.0f} s: {shown}", flush=True)
            artefact = _with_fast(Path(folder) / "artefact", base, trained)
        found = self._evaluate(loaded, artefact, prompts)
        size = sum(p.numel() for skip_map in trained.modules.maps for p in skip_map.parameters())
        return {"seconds": trained_s, "losses": trained.losses, "map_parameters": size, "at": found}

    def _evaluate(self, loaded: Any, artefact: Artefact, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        options = self._options
        config = EngineConfig(
            model=options.model,
            dtype=self._target.dtype,
            device=options.device,
            kv_memory_gib=2.0 if options.device == "cuda" else 0.5,
            max_rows=len(prompts),
            suffix_drafts=False,
            audit_share=0.0,
            drafts=MAX_DRAFTS,
        )
        # Nothing is timed and mode fast takes the plain path: graphs would only be captured.
        with mock.patch.object(assemble, "_graphs", return_value=(None, None)):
            parts = assemble.assemble_loaded(
                config, loaded.model, loaded.tokenizer, name=options.model, identity="study", artefact=artefact
            )
        judge = FullDepth(parts.runner.adapter, parts.kernels)
        assert parts.fast is not None
        found = []
        with Engine.from_parts(parts) as engine:
            for first in (0, *parts.fast.layers[1:2]):
                for threshold in options.thresholds:
                    each = _answers(engine, judge, prompts, threshold, first, options.new_tokens)
                    each["layers_share"] = each.pop("layers") / parts.runner.adapter.num_layers
                    found.append({"threshold": threshold, "min_layers": first, **each})
                    print(
                        f"  from layer {first or parts.fast.layers[0]} at {threshold:g}: "
                        f"{each['differing']:.4f} differ, {each['layers_share']:.3f} of the layers, {each['exits']}",
                        flush=True,
                    )
        return found


def _answers(
    engine: Engine, judge: FullDepth, prompts: Sequence[list[int]], threshold: float, first: int, new_tokens: int
) -> dict[str, Any]:
    """The mean loss over answers, layers per token and the share of tokens by exit layer."""
    params = SamplingParams(max_tokens=new_tokens, mode="fast", threshold=threshold, min_layers=first)
    outputs, exits, layers = [], Counter[int](), 0
    for answer in engine.generate(list(prompts), params):
        if answer.error is not None:
            raise answer.error
        assert answer.usage is not None
        outputs.append([token.token_id for token in answer.tokens])
        exits.update(token.exit_layer for token in answer.tokens)
        layers += answer.usage.layers_run
    judged = judge.score_all(list(zip(prompts, outputs, strict=True)))
    losses = [each.agreed(ids).count(False) / len(ids) for each, ids in zip(judged, outputs, strict=True)]
    num = exits.total()
    return {
        "differing": sum(losses) / len(losses),
        "layers": layers / num,
        "exits": {layer: round(count / num, 3) for layer, count in sorted(exits.items())},
    }


def _draft_of(adapter: ModelAdapter, loaded: Any, text: Text, *, tiny: bool) -> Artefact:
    """The artefact with the draft head: that of the demo, or an untrained one for the tiny model."""
    if not tiny:
        return load_artefact(assemble.DEMO_ARTEFACT, None)
    spec = CandidateSpec.parse("1:mlp:deep:hidden=32:taps=0")
    made = make_candidate(adapter, spec, max_distance=MAX_DRAFTS, bottleneck=8, seed=0)
    point = Checkpoint(1, made.head.spec, 8, (0.5,) * MAX_DRAFTS, 0.0)
    identity = identify(loaded.model, loaded.tokenizer, None)
    manifest = Manifest(
        model=identity,
        checkpoints=(point,),
        max_drafts=MAX_DRAFTS,
        shortlist_size=len(text.shortlist),
        shortlist_coverage=1.0,
        data=DataSummary("self", "0" * 64, 0, 0, 0, 0),
    )
    with tempfile.TemporaryDirectory() as folder:
        save_artefact(Path(folder) / "draft", manifest, [made.head], [made.router], text.shortlist)
        return load_artefact(Path(folder) / "draft", None)


def _with_fast(folder: Path, base: Artefact, trained: TrainedFast) -> Artefact:
    [point] = base.manifest.checkpoints
    manifest = dataclasses.replace(
        base.manifest, checkpoints=(dataclasses.replace(point, fast=None),), fast=trained.record, files={}
    )
    heads, routers = [head.cpu() for head in base.heads], [router.cpu() for router in base.routers]
    save_artefact(folder, manifest, heads, routers, base.shortlist, fast=trained.modules)
    return load_artefact(folder, None)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    study = Study(arguments(argv), argv)
    for name, value in study.report["conditions"].items():
        print(f"{name:10} {value}", flush=True)
    return study.run()


if __name__ == "__main__":
    sys.exit(main())

"""A GGUF model with its matrices as they are against the same weights widened to float32, in one run on a CPU.

    python -m benchmarks.quantised                       # a table and the bars, about four minutes
    python -m benchmarks.quantised --text wiki.test.txt  # perplexity on a text, too
    python -m benchmarks.quantised --llama-cpp FOLDER    # and llama.cpp, one row (see llama_cpp.py)

Both engines answer the same prompts in turns, greedy; every ratio is the median of the ratios within each repeat. Peak
memory is that of a process with one engine. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.common.bars import Bar, Part, conclude
from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.runs import Bench, greedy, output_ids, take_turns
from benchmarks.quantised.llama_cpp import LlamaCpp
from tide_core.cli.runs import open_engine
from tide_core.config import EngineConfig
from tide_core.evaluation.full_depth import FullDepth
from tide_core.evaluation.machine import cpu_name
from tide_core.models.resolver import resolve
from tide_core.request import SamplingParams

FORMS = {"widened": "none", "quantised": "auto"}
MODES = ("full", "verified")
LEAST_RATIO = 2.2
MOST_MIB = 528
"""Of a process with the demo: half of what the widened one took when there was no other."""
LEAST_OF_LLAMA_CPP = {"full": 0.9, "verified": 1.2}
WINDOW_TOKENS, NUM_WINDOWS = 512, 8


def speed(
    benches: dict[str, Bench], rows: int, count: int, tokens: int, repeats: int, other: LlamaCpp | None = None
) -> Part:
    prompts = next(iter(benches.values())).spread(count)
    groups = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    works = {
        f"{mode} {form}": [functools.partial(bench.timed, group, greedy(mode, tokens)) for group in groups]
        for mode in MODES
        for form, bench in benches.items()
    }
    if other is not None:
        works["llama.cpp"] = [functools.partial(other.timed, group, tokens) for group in groups]
    runs = take_turns(works, repeats)
    part = Part(f"batch {rows}", data={name: mine.figures() for name, mine in runs.items()})
    if other is not None:
        theirs = runs["llama.cpp"]
        part.lines.append(f"  batch {rows}, llama.cpp {theirs.rate:.1f} tokens/s ({other.facts})")
        for mode, least in LEAST_OF_LLAMA_CPP.items():
            ratio = runs[f"{mode} quantised"].over(theirs)
            part.bars.append(Bar(f"batch {rows}, {mode}: quantised against llama.cpp", ratio, least))
    for mode in MODES:
        quantised, widened = runs[f"{mode} quantised"], runs[f"{mode} widened"]
        part.lines.append(
            f"  batch {rows}, {mode:8} quantised {quantised.rate:7.1f} tokens/s, widened {widened.rate:7.1f}: "
            f"{quantised.over(widened):.2f}"
        )
        if (rows, mode) == (1, "full"):
            part.bars.append(Bar("batch 1, full: quantised against widened", quantised.over(widened), LEAST_RATIO))
    same = [
        output_ids(a) == output_ids(b)
        for a, b in zip(runs["full quantised"].answers, runs["verified quantised"].answers, strict=True)
    ]
    part.bars.append(Bar(f"batch {rows}: answers of verified equal to full, quantised", sum(same) / len(same), 1.0))
    return part


def quality(benches: dict[str, Bench], count: int, tokens: int, text: Path | None) -> Part:
    """How often float32 would have chosen another token after the same ones, and perplexity on a text."""
    quantised, widened = benches["quantised"], benches["widened"]
    scores = {form: FullDepth(bench.parts.runner.adapter, bench.parts.kernels) for form, bench in benches.items()}
    num_tokens = num_other = 0
    for prompt, answer in zip(
        quantised.spread(count), quantised.run(quantised.spread(count), greedy("full", tokens)), strict=True
    ):
        agreed = scores["widened"].score(prompt.ids, output_ids(answer)).agreed(output_ids(answer))
        num_tokens += len(agreed)
        num_other += len(agreed) - sum(agreed)
    part = Part("quality", data={"tokens": num_tokens, "float32_chooses_another": num_other / num_tokens})
    part.lines.append(f"  float32 would have chosen another token for {num_other} of {num_tokens}")
    if text is not None:
        ids = widened.engine.tokenizer.encode(text.read_text(encoding="utf-8"))
        windows = [ids[start : start + WINDOW_TOKENS] for start in range(0, len(ids), WINDOW_TOKENS)][:NUM_WINDOWS]
        for form, score in scores.items():
            logprobs = [value for window in windows for value in score.score(window[:1], window[1:]).logprobs]
            part.data[f"perplexity_{form}"] = math.exp(-sum(logprobs) / len(logprobs))
            part.lines.append(f"  perplexity {form}: {part.data[f'perplexity_{form}']:.3f} ({len(logprobs)} tokens)")
    return part


def memory(model: str) -> Part:
    part = Part("memory")
    for form in FORMS:
        command = [sys.executable, "-m", "benchmarks.quantised", "--model", model, "--peak-of", form]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        part.data[form] = json.loads(done.stdout)
        part.lines.append(f"  peak memory {form}: {part.data[form]:.0f} MiB")
    if model == "demo":
        part.bars.append(
            Bar("peak memory of the demo, quantised, MiB", part.data["quantised"], MOST_MIB, at_least=False)
        )
    return part


def gguf_file(model: str) -> Path:
    found = resolve(model, quantised=True).gguf
    if found is None:
        raise SystemExit(f"benchmark: --model: got {model}; expected demo or a .gguf file")
    return found


def print_peak(config: EngineConfig) -> None:
    with open_engine(config) as engine:
        engine.generate("The capital of France is", SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure quantised weights against the same weights widened.")
    parser.add_argument("--model", default="demo", help="demo, or a .gguf file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="where npm installed node-llama-cpp")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak-of", choices=sorted(FORMS), help="run one engine and print the peak of its memory, MiB")
    chosen = parser.parse_args(argv)
    config = EngineConfig(model=chosen.model, device="cpu", max_model_len=2048, prefix_caching=False)
    if chosen.peak_of:
        print_peak(replace(config, quantization=FORMS[chosen.peak_of]))
        return 0

    def log(line: str) -> None:
        print(line, file=sys.stderr if chosen.json else sys.stdout, flush=True)

    parts = [memory(chosen.model)]
    benches = {form: Bench(replace(config, quantization=kept), PROMPT_FILE) for form, kept in FORMS.items()}
    conditions: dict[str, Any] = {
        "model": chosen.model,
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "kernels": benches["quantised"].engine.stats().kernels,
        "tokens": chosen.tokens,
        "prompts": chosen.prompts,
        "repeats": chosen.repeats,
    }
    log(json.dumps(conditions))
    other = None
    if chosen.llama_cpp is not None:
        other = LlamaCpp(chosen.llama_cpp, gguf_file(chosen.model), torch.get_num_threads())
    for rows in chosen.rows:
        beside = other if rows == 1 else None
        parts.append(speed(benches, rows, chosen.prompts, chosen.tokens, chosen.repeats, beside))
    if other is not None:
        other.close()
    parts.append(quality(benches, chosen.prompts, chosen.tokens, chosen.text))
    for part in parts:
        for line in part.lines:
            log(line)
    return conclude(conditions, parts, log, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())

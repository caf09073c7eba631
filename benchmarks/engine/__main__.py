"""The engine at full depth against `transformers` generate, on the demo model, in one run.

    python -m benchmarks.engine            # a table and the bars
    python -m benchmarks.engine --json     # the same as one JSON object

Each side runs in its own process, so that peak memory is its own. The two run in turns, so that a noisy machine
disturbs both. Every figure is a median over the rounds, every bar a ratio within this run.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
from typing import Any

import typer

from benchmarks.common import ROOT
from benchmarks.common.bars import Bar, bars_as_json
from tide_core.evaluation.machine import cpu_name

PROMPT_TOKENS = 64
NEW_TOKENS = 128
CONCURRENT = 8
MANY_REQUESTS = 1000
MANY_NEW_TOKENS = 8
VOCAB_LIMIT = 49_000


class Worker:
    """One side of the comparison, in its own process: a JSON line in, a JSON line out."""

    def __init__(self, side: str) -> None:
        command = [sys.executable, "-m", "benchmarks.engine", "--side", side]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.facts = self._read()

    def ask(self, work: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark worker ended early, status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def prompt(index: int) -> list[int]:
    """64 fixed ids for each prompt, without a common prefix."""
    return [100 + (7919 * (index + 1) + 104_729 * i) % (VOCAB_LIMIT - 100) for i in range(PROMPT_TOKENS)]


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(run: Any) -> float:
    import time

    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def generate_side() -> dict[str, Any]:
    """`transformers` generate with its default cache."""
    import torch

    from tide_core.models.loader import load_model
    from tide_core.models.resolver import resolve

    model = load_model(resolve("demo"), dtype="float32", device="cpu")
    ids = torch.tensor([prompt(0)])

    def one() -> dict[str, Any]:
        tokens: list[int] = []

        def run() -> None:
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                )
            tokens.extend(out[0, PROMPT_TOKENS:].tolist())

        seconds = timed(run)
        return {"tokens_per_s": len(tokens) / seconds, "tokens": tokens, "peak_rss_mib": peak_rss_mib()}

    return {"one": one}


def engine_side() -> dict[str, Any]:
    """This engine, without prefix caching, so that every round computes its prompts."""
    from tide_core import Engine, SamplingParams

    engine = Engine(
        "demo",
        device="cpu",
        dtype="float32",
        quantization="none",  # as `transformers` has the weights
        prefix_caching=False,
        artefact="none",
        suffix_drafts=False,
    )
    # The end-of-text id is barred on both sides, so that both generate the same number of tokens.
    params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)

    def batch(size: int) -> dict[str, Any]:
        answers: list[Any] = []
        seconds = timed(lambda: answers.extend(engine.generate([prompt(i) for i in range(size)], params)))
        num_tokens = sum(len(answer.tokens) for answer in answers)
        stats = engine.stats()
        return {
            "tokens_per_s": num_tokens / seconds,
            "tokens": [token.token_id for token in answers[0].tokens],
            "peak_rss_mib": peak_rss_mib(),
            "max_blocks_owned": stats.max_blocks_owned,
            "block_size": engine.config.block_size,
            "max_model_len": engine.max_model_len,
            "kernels": stats.kernels,
        }

    def many() -> dict[str, Any]:
        before = engine.stats()
        prompts = [prompt(i)[:8] for i in range(MANY_REQUESTS)]
        short = SamplingParams(max_tokens=MANY_NEW_TOKENS, min_tokens=MANY_NEW_TOKENS)
        seen: list[int] = []
        tokens: list[int] = []

        def run() -> None:
            for index, answer in engine.generate_as_completed(prompts, short):
                seen.append(index)
                tokens.append(len(answer.tokens))

        seconds = timed(run)
        after = engine.stats()
        return {
            "finished": len(seen),
            "distinct": len(set(seen)),
            "all_whole": all(count == MANY_NEW_TOKENS for count in tokens),
            "pool_restored": after.blocks_owned == before.blocks_owned == 0,
            "seconds": seconds,
            "output_tokens_per_s": sum(tokens) / seconds,
        }

    return {"one": lambda: batch(1), "eight": lambda: batch(CONCURRENT), "many": many}


def serve_side(side: str) -> None:
    """The loop of a worker: print a line when it is ready, then one line for each line of input."""
    import torch
    import transformers

    works = {"generate": generate_side, "engine": engine_side}[side]()
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(works[line.strip()]()), flush=True)


def measure(rounds: int) -> dict[str, Any]:
    theirs, ours = Worker("generate"), Worker("engine")
    theirs.ask("one"), ours.ask("one")  # warm-up of both
    generate_runs, one_runs, eight_runs = [], [], []
    for _ in range(rounds):
        generate_runs.append(theirs.ask("one"))
        one_runs.append(ours.ask("one"))
    one_rss = one_runs[-1]["peak_rss_mib"]
    one_blocks = one_runs[-1]["max_blocks_owned"]
    for _ in range(rounds):
        one_runs.append(ours.ask("one"))
        eight_runs.append(ours.ask("eight"))
    many = ours.ask("many")
    ours.close(), theirs.close()

    def rate(runs: list[dict[str, Any]]) -> float:
        return statistics.median(run["tokens_per_s"] for run in runs)

    results = {
        "generate_tokens_per_s": rate(generate_runs),
        "engine_tokens_per_s": rate(one_runs[:rounds]),
        "engine_tokens_per_s_beside_eight": rate(one_runs[rounds:]),
        "engine_8_tokens_per_s": rate(eight_runs),
        "generate_peak_rss_mib": generate_runs[-1]["peak_rss_mib"],
        "engine_peak_rss_mib": one_rss,
        "engine_8_peak_rss_mib": eight_runs[-1]["peak_rss_mib"],
        "kv_blocks_owned": one_blocks,
        "same_tokens_as_generate": one_runs[-1]["tokens"] == generate_runs[-1]["tokens"],
        "many": many,
    }
    needed_blocks = -(-(PROMPT_TOKENS + NEW_TOKENS - 1) // one_runs[-1]["block_size"])
    whole = many["finished"] == many["distinct"] == MANY_REQUESTS and many["all_whole"] and many["pool_restored"]
    bars = [
        Bar("batch 1 against generate", results["engine_tokens_per_s"] / results["generate_tokens_per_s"], 1.25),
        Bar(
            "8 concurrent against 1",
            results["engine_8_tokens_per_s"] / results["engine_tokens_per_s_beside_eight"],
            3.5,
        ),
        Bar(
            "peak RSS against generate",
            results["engine_peak_rss_mib"] / results["generate_peak_rss_mib"],
            1.3,
            at_least=False,
        ),
        Bar("KV blocks against those the tokens need", one_blocks / needed_blocks, 1.0, at_least=False),
        Bar("greedy tokens equal generate", float(results["same_tokens_as_generate"]), 1.0),
        Bar(f"{MANY_REQUESTS} requests at once: all whole, none lost, pool restored", float(whole), 1.0),
    ]
    return {
        "conditions": {
            "model": "demo (SmolLM2-135M-Instruct, dequantised)",
            "dtype": "float32",
            "mode": "full",
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "sampling": "greedy",
            "rounds": rounds,
            "machine": platform.machine(),
            "cpu": cpu_name(),
            "kernels": one_runs[-1]["kernels"],
            "max_model_len": one_runs[-1]["max_model_len"],
            **ours.facts,
        },
        "results": results,
        "bars": bars_as_json(bars),
    }


def main(as_json: bool = typer.Option(False, "--json"), rounds: int = 5, side: str = "") -> None:
    """Measure, print, and fail if a bar is missed."""
    if side:
        serve_side(side)
        return
    report = measure(rounds)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for key, value in report["conditions"].items():
            print(f"{key:16} {value}")
        for bar in report["bars"]:
            print(Bar(bar["name"], bar["value"], bar["limit"], bar["at_least"]).line())
    if not all(bar["holds"] for bar in report["bars"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

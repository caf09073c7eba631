"""Other implementations on the same machine in the same run: `transformers` generate, eager and compiled, and
`tide-inference`.

Each runs in its own process with the same random model, because the engine changes the layers of its model. Each has a
time limit, because compilation may take any time. The time of a step is the difference of two generations over the
difference of their lengths, so that prompts and set-up do not count.

    python -m benchmarks.gpu.rivals --side eager --device cpu --small    # one of them alone
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.common.report import Measures
from benchmarks.common.shapes import EIGHT_B, SMALL, byte_tokenizer, make_model
from benchmarks.common.timing import cycle_times, synchronize
from benchmarks.gpu.parts import Session

SIDES = ("eager", "static", "tide")
SHORT = 4
"""New tokens of the shorter generation."""
TIMED = 3
TIDE_MODULE = "TIDE"
HOW_TO_REPEAT = "not installed; `pip install tide-inference`, then `python -m benchmarks.gpu --parts rivals`"
Generate = Callable[[Any, int], Any]
"""Prompt ids [1, S] and a number of new tokens to ids [1, S + N]."""


def rivals(session: Session) -> Measures:
    """Time of their step over the time of ours: one row, the same model and context."""
    found, subject, sizes = Measures(), session.subject, session.sizes
    [ours] = cycle_times(subject.plain, [-1], 1, subject.shape.context, sizes.repeats)
    found.figures["engine_ms"] = 1e3 * ours
    small = ["--small"] if subject.shape is SMALL else []
    for side in SIDES:
        if side == "tide" and importlib.util.find_spec(TIDE_MODULE) is None:
            found.add(side, None, HOW_TO_REPEAT)
            continue
        answer = run_side(
            side, [*small, "--device", subject.device.type, "--tokens", str(sizes.rival_tokens)], sizes.rival_limit_s
        )
        found.figures[side] = answer
        if "error" in answer:
            found.add(side, None, f"did not run: {answer['error']}")
        else:
            shown = f"{1e3 * answer['step_s']:.2f} against {1e3 * ours:.2f} ms"
            found.add(
                side,
                answer["step_s"] / ours,
                shown if answer["compiled"] == (side == "static") else f"{shown}, not compiled",
            )
    return found


def run_side(side: str, more: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The result of a side, or its error."""
    command = [sys.executable, "-m", "benchmarks.gpu.rivals", "--side", side, *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit_s:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"error": lines[-1][:200]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def step_s(generate: Generate, ids: torch.Tensor, tokens: int) -> float:
    """Seconds of one step of a generation."""
    for count in (tokens, SHORT):  # warm-up; compiles if requested
        generate(ids, count)
    times: list[float] = []
    for _ in range(TIMED):
        pair = []
        for count in (SHORT, tokens):
            synchronize(ids.device)
            began = time.perf_counter()
            out = generate(ids, count)
            synchronize(ids.device)
            pair.append((time.perf_counter() - began, out.shape[1] - ids.shape[1]))
        (short_s, short), (long_s, long) = pair
        if long <= short:
            raise RuntimeError(f"the generation ended after {long} tokens")
        times.append((long_s - short_s) / (long - short))
    return statistics.median(times)


def library(model: Any, *, static: bool) -> Generate:
    settings = {"cache_implementation": "static"} if static else {}

    def generate(ids: torch.Tensor, count: int) -> Any:
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **settings)

    return generate


def public_tide(model: Any) -> Generate:
    """With routers calibrated on a few samples: it runs all layers whatever their scores are."""
    tide: Any = importlib.import_module(TIDE_MODULE)
    path = Path(tempfile.mkdtemp(prefix="tide-rival-")) / "router.pt"
    tide.calibrate(model, byte_tokenizer(), config=tide.TIDEConfig(calibration_samples=8), save_path=str(path))
    engine = tide.TIDE(model, router_path=str(path))
    return lambda ids, count: engine.generate(ids, max_new_tokens=count, temperature=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one side, in its own process."""
    parser = argparse.ArgumentParser(description="Time a step of another implementation.")
    parser.add_argument("--side", required=True, choices=SIDES)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=36, help="of the longer generation")
    options = parser.parse_args(argv)
    shape, device = SMALL if options.small else EIGHT_B, torch.device(options.device)
    model = make_model(shape, device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    generate = public_tide(model) if options.side == "tide" else library(model, static=options.side == "static")
    ids = torch.arange(shape.context - options.tokens // 2, device=device)[None] % 200 + 3
    seconds = step_s(generate, ids, options.tokens)
    compiled = bool(torch._dynamo.utils.counters["frames"]["ok"])
    print(json.dumps({"side": options.side, "step_s": seconds, "compiled": compiled}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

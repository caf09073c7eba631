"""Effect of the exit threshold: sweep it in mode fast, and compare with full depth and verified.

    python examples/tune_threshold.py
    python examples/tune_threshold.py --model org/name --artefact exits --thresholds 0.5,0.9

In mode `verified` the threshold changes only the speed. In mode `fast` an exit is final, so a lower threshold is faster
and further from full depth. `tide eval` measures the same over a file of prompts, token by token.
"""

from __future__ import annotations

import argparse
import time

from torch import Tensor

from tide_core import TIDE

PROMPTS = ("What is photosynthesis?", "A function that sorts a list:", "The difference between TCP and UDP is")


def num_same(output: Tensor, full: Tensor) -> int:
    """Tokens of all rows before the first one of their row that differs from full depth."""
    width = min(output.shape[1], full.shape[1])
    return int((output[:, :width] == full[:, :width]).cumprod(dim=1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--artefact", default="auto", help="its calibrated exits; auto: those of the demo model")
    parser.add_argument("--thresholds", default="0.99,0.95,0.9,0.8,0.6")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    runs = [("full", None), ("verified", None), *(("fast", float(value)) for value in args.thresholds.split(","))]
    print("mode      threshold   tok/s    exits   layers/token   as at full depth")
    with TIDE(args.model, args.artefact) as tide:
        prompts = [tide.tokenizer(prompt).input_ids for prompt in PROMPTS]
        full = tide.generate(prompts, max_new_tokens=args.max_new_tokens, mode="full")  # warms up too
        num_prompt = len(prompts) * max(map(len, prompts))
        for mode, threshold in runs:
            started = time.perf_counter()
            output = tide.generate(prompts, max_new_tokens=args.max_new_tokens, mode=mode, threshold=threshold)
            seconds = time.perf_counter() - started
            stats, same = tide.last_stats, num_same(output, full) - num_prompt
            shown = "-" if threshold is None else f"{threshold:g}"
            print(
                f"{mode:8}{shown:>11}{stats.total_tokens / seconds:>8.1f}{stats.exit_rate:>9.1%}"
                f"{stats.layers_per_token:>15.1f}{same / (full.numel() - num_prompt):>19.1%}"
            )


if __name__ == "__main__":
    main()

"""Exits for your own model: load it with transformers, calibrate once, generate.

    python examples/any_model.py                                          # the demo model; minutes on two cores
    python examples/any_model.py --model org/name --samples 12288 --steps 1800 --batch-tokens 8192     # on a GPU

The numbers here are small enough for a laptop. Exits calibrated with so little data are seldom accepted, and the engine
does not use exits that do not pay. Omit the numbers in your own call: the defaults of `calibrate` are for one
data-centre GPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_core import TIDE, TIDEConfig, calibrate
from tide_core.models.resolver import resolve

PROMPT = "A tide is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--artefact", type=Path, default=Path("my-exits"), help="created if missing")
    parser.add_argument("--data", default="self", help="self: the model's own text; or a file, or a datasets name")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    folder = resolve(args.model).path  # any folder that from_pretrained accepts
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    if not args.artefact.exists():
        config = TIDEConfig(calibration_samples=args.samples, calibration_dataset=args.data, exit_strategy="mlp")
        sizes = {"steps": args.steps, "batch_tokens": args.batch_tokens, "max_new_tokens": args.max_new_tokens}
        calibrate(model, tokenizer, save_path=args.artefact, config=config, **sizes)

    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with TIDE(model, args.artefact, tokenizer=tokenizer) as tide:
        for mode in ("full", "verified"):
            tide.generate(ids, max_new_tokens=4, mode=mode)  # warm up
            started = time.perf_counter()
            output = tide.generate(ids, max_new_tokens=args.max_new_tokens, mode=mode)
            rate = (output.shape[1] - ids.shape[1]) / (time.perf_counter() - started)
            print(f"{mode}: {rate:.1f} tok/s: {tokenizer.decode(output[0], skip_special_tokens=True)!r}")
        print(tide.last_stats)


if __name__ == "__main__":
    main()

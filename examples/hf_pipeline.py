"""A transformers pipeline whose tokens come from TIDE.

    python examples/hf_pipeline.py

The pipeline still runs tokenizer, chat template and post-processing. Only `model.generate` is replaced, by a function
with the same arguments. Deleting it and closing TIDE restores the original.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tide_core import TIDE
from tide_core.models.resolver import resolve

DEMO_EXITS = Path(__file__).parents[1] / "deploy" / "artefacts" / "demo"
CHAT = [{"role": "user", "content": "Name three things that the moon does to the sea."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--artefact", default=DEMO_EXITS, help="its calibrated exits; none: full depth")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    folder = resolve(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pipe = pipeline("text-generation", AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer)

    def ask(who: str) -> str:
        started = time.perf_counter()
        [answer] = pipe(CHAT, max_new_tokens=args.max_new_tokens, do_sample=False)
        text = answer["generated_text"][-1]["content"]
        print(f"{who}, {time.perf_counter() - started:.2f} s: {text}")
        return text

    before = ask("transformers")
    with TIDE(pipe.model, args.artefact, tokenizer=tokenizer) as tide:

        def generate(input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
            return tide.generate(input_ids, attention_mask, max_new_tokens=options["max_new_tokens"])  # greedy

        pipe.model.generate = generate
        after = ask("the same pipeline on TIDE")
        print(f"same text: {after == before}; {tide.last_stats}")
        del pipe.model.generate


if __name__ == "__main__":
    main()

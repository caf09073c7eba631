"""Generate text with exits, and print the exit layers of its tokens.

    python examples/quickstart.py
    python examples/quickstart.py --model org/name --artefact exits      # calibrated before, see any_model.py

The mode is `verified`: the text equals that of full depth.
"""

from __future__ import annotations

import argparse

from tide_core import TIDE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder, a .gguf file or a Hugging Face id")
    parser.add_argument("--artefact", default="auto", help="its calibrated exits; auto: those of the demo model")
    parser.add_argument("--prompt", default="The three laws of motion say that")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    with TIDE(args.model, args.artefact) as tide:
        ids = tide.tokenizer(args.prompt, return_tensors="pt").input_ids
        output = tide.generate(ids, max_new_tokens=args.max_new_tokens)
        print(tide.tokenizer.decode(output[0], skip_special_tokens=True))
        print(f"\n{tide.last_stats}")


if __name__ == "__main__":
    main()

"""llama.cpp on the same file, threads and prompts, as another side of the benchmark.

It comes with the npm package `node-llama-cpp`, as libraries for each kind of processor:
`npm install node-llama-cpp@3.22.1`, in a folder of the caller's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.prompts import Prompt
from benchmarks.common.runs import TimedBatch

SCRIPT = Path(__file__).with_suffix(".mjs")


class LlamaCpp:
    """A process with the model loaded."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        node = shutil.which("node")
        if node is None or not (folder / "node_modules" / "node-llama-cpp").is_dir():
            raise SystemExit(f"benchmark: --llama-cpp: got {folder}; expected node on the PATH and a folder in which "
                             "`npm install node-llama-cpp` was run")  # fmt: skip
        self._process = subprocess.Popen(
            [node, str(SCRIPT)], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.facts = self._ask({"model": str(model), "threads": threads})

    def timed(self, prompts: Sequence[Prompt], tokens: int) -> TimedBatch:
        """One prompt after another; answers are left out, since other kernels may choose other tokens."""
        done = [self._ask({"ids": prompt.ids, "tokens": tokens}) for prompt in prompts]
        return TimedBatch(sum(len(each["ids"]) for each in done), sum(each["seconds"] for each in done), [])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark: llama.cpp ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

"""Prompt tokens that leave early, in mode fast only.

A prompt is compute-bound, so every token that skips the deep layers saves its share of them. A chunk runs up to the
first checkpoint, the head scores each of its tokens (without a deep state: none is known yet for a chunk), and those
whose score reaches the threshold stay behind; the rest goes on together. The last token of a prompt never leaves: what
follows it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_core.execution.depth_loop import DepthLoop
from tide_core.execution.drafting import Drafter
from tide_core.exits.row_cycle import RowCycle


def leave_prompt(rows: Sequence[RowCycle], depth: DepthLoop, drafter: Drafter) -> None:
    """Let prompt tokens of rows in mode fast leave at the first checkpoint."""
    prompts = [row for row in rows if row.step.policy.skips_layers and row.tracked and len(row.step.token_ids) > 1]
    if not prompts:
        return
    depth.run(prompts, 0, 1)
    for row, scores in zip(prompts, drafter.score_all(prompts), strict=True):
        threshold = row.step.policy.exit_thresholds[0]
        for token, score in enumerate(scores[:-1]):
            if score >= threshold:  # never true for NaN
                row.left_at[token] = 0

"""Contracts of mode fast, certified in an engine: its own greedy answers, judged by full depth.

The engine answers in mode fast at a threshold. Full depth then reads each prompt with its answer and says, for every
token, which one it would have chosen after those before: in the engine's own dtype, without a layer skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tide_core.calibration.progress import Progress
from tide_core.calibration.risk.certify import Answer, Answers, Certified, Goal, certify
from tide_core.errors import EngineError
from tide_core.evaluation.full_depth import FullDepth
from tide_core.request import SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.assemble import Parts
    from tide_core.engine.engine import Engine


def certify_fast(engine: Engine, parts: Parts, goal: Goal, progress: Progress) -> Certified:
    """The contracts of the artefact in this engine, which nobody else uses meanwhile."""
    judge = FullDepth(parts.runner.adapter, parts.kernels)
    with progress.stage("certify", None, "threshold") as stage:

        def answered(prompts: Sequence[Sequence[int]]) -> Answers:
            def answers(threshold: float) -> list[Answer]:
                found = answers_at(engine, judge, prompts, threshold, goal.max_tokens)
                differing = sum(each.num_differing for each in found) / sum(each.num_tokens for each in found)
                stage.update(1, threshold=threshold, differing=differing)
                return found

            return answers

        return certify(goal, answered(goal.prompts), answered(goal.selection))


def answers_at(
    engine: Engine, judge: FullDepth, prompts: Sequence[Sequence[int]], threshold: float, max_tokens: int
) -> list[Answer]:
    """What full depth finds of the answers of mode fast at a threshold."""
    params = SamplingParams(max_tokens=max_tokens, mode="fast", threshold=threshold)
    found, texts = [], []
    for prompt, answer in zip(prompts, engine.generate(list(prompts), params), strict=True):
        if answer.error is not None:
            raise EngineError(f"mode fast at threshold {threshold:.4f}: {answer.error}")
        assert answer.usage is not None
        if answer.tokens:
            texts.append((prompt, [token.token_id for token in answer.tokens]))
            found.append(answer.usage.layers_per_token)
    return [
        Answer(len(output), scores.agreed(output).count(False), layers)
        for (_, output), scores, layers in zip(texts, judge.score_all(texts), found, strict=True)
    ]

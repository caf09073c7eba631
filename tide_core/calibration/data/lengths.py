"""How long sequences may be."""

from __future__ import annotations

from dataclasses import dataclass

from tide_core.calibration.config import CalibrationConfig


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers may be in this model."""

    prompt: int
    new: int
    text: int

    @classmethod
    def of(cls, config: CalibrationConfig, max_positions: int) -> Lengths:
        new = min(config.max_new_tokens, max(1, max_positions // 2))
        return cls(min(config.max_prompt_tokens, max_positions - new), new, min(config.text_tokens, max_positions))

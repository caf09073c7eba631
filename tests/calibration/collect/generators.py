"""Generators over tiny models."""

from typing import Any

from tide_core.calibration.collect.generation import Generator
from tide_core.models.adapter import ModelAdapter

EOS = (0,)


def make_generator(model: Any, batch: int = 4, *, fast: bool = False) -> Generator:
    return Generator(ModelAdapter(model, paged=False), pad_id=0, batch=batch, fast=fast)

"""Parts `fp8` and `seventy`: steps at full depth of a model whose layers have weights in 8 bits."""

from __future__ import annotations

import gc
import statistics

import torch

from benchmarks.common.report import Measures
from benchmarks.common.shapes import SEVENTY_B, SMALL, Shape, Subject
from benchmarks.common.timing import step_time
from benchmarks.gpu.parts import Session

TURNS = 3


def fp8(session: Session) -> Measures:
    """Over steps of the same shape in half width, in turns; and over the time to read its own weights."""
    found, wide, sizes = Measures(), session.subject, session.sizes
    narrow = _in_8_bits(session, wide.shape)
    context, repeats = wide.shape.context, max(1, sizes.repeats // (6 * TURNS))
    floor = session.floor_s(narrow.weight_bytes)
    found.figures |= {"weight_bytes": narrow.weight_bytes, "floor_ms": 1e3 * floor}
    for rows in sizes.batches:
        turns = [
            [step_time(subject.plain, rows, context, sizes.steps, repeats) for subject in (wide, narrow)]
            for _ in range(min(TURNS, sizes.repeats))
        ]
        half, ours = (statistics.median(each) for each in zip(*turns, strict=True))
        found.figures[f"batch {rows}"] = {"half_width_ms": 1e3 * half, "ms": 1e3 * ours, "over_floor": ours / floor}
        found.add(
            f"fp8_{rows}",
            statistics.median(narrow_s / wide_s for wide_s, narrow_s in turns),
            f"{1e3 * ours:.3f} against {1e3 * half:.3f} ms",
        )
        if rows == 1:
            found.add("fp8_floor", ours / floor, f"{1e3 * ours:.3f} ms against {1e3 * floor:.3f} ms")
    return found


def seventy(session: Session) -> Measures:
    """Steps of a shape that fits the device in 8 bits alone."""
    found, sizes = Measures(), session.sizes
    subject = _in_8_bits(session, SMALL if session.subject.shape is SMALL else SEVENTY_B)
    floor = session.floor_s(subject.weight_bytes)
    found.figures |= {"shape": subject.shape.name, "weight_bytes": subject.weight_bytes, "floor_ms": 1e3 * floor}
    for rows in sizes.batches:
        seconds = step_time(subject.plain, rows, subject.shape.context, sizes.steps, max(1, sizes.repeats // 15))
        shown = f"{1e3 * seconds:.3f} ms against {1e3 * floor:.3f} ms, {subject.weight_bytes / 1e9:.1f} GB of weights"
        found.add(f"seventy_{rows}", seconds / floor, shown)
    del subject
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _in_8_bits(session: Session, shape: Shape) -> Subject:
    given = session.subject
    return Subject(shape, given.device.type, kernels=given.kernels, max_rows=given.max_rows, fp8=True)

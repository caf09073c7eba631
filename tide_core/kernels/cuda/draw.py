"""Draws on a GPU. See `tide_core.kernels.reference.draw`."""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import checks
from tide_core.kernels.checks import DTYPE_CODES, Faults
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda.cycle import meta_faults
from tide_core.kernels.cuda.launch import device_of, launch, ptr, row_stride
from tide_core.kernels.reference.draw import MOST_VOCABULARY, NUM_HEAD, NUM_SETTINGS, NUM_STREAMS, DrawnCycle, Out


def draw(logits: Tensor, settings: Tensor, numbers: Tensor, vocab_size: int, *, out: Out | None = None) -> Out:
    """A place in each row of `logits` [R, W], [R] int64, and what it was drawn from, [R, 4] float64."""
    device = device_of(logits)
    checks.refuse(_logits_faults(logits, device))
    rows, width = logits.shape
    if not width <= vocab_size <= MOST_VOCABULARY:
        raise ValueError(f"vocab_size: got {vocab_size}, expected {width} to {MOST_VOCABULARY}")
    checks.refuse(checks.exact_faults("settings", settings, torch.float64, (NUM_SETTINGS, rows), "[5, R]", device))
    checks.refuse(checks.exact_faults("numbers", numbers, torch.float64, (rows,), "[R]", device))
    places, heads = _outputs(out, device, (torch.int64, rows), (torch.float64, rows, NUM_HEAD))
    tensors = logits, settings, numbers, places, heads
    launch(
        device,
        "draw",
        DTYPE_CODES[logits.dtype],
        *(ptr(tensor) for tensor in tensors),
        rows,
        width,
        row_stride(logits),
        vocab_size,
    )
    return places, heads


def verify_drawn(logits: Tensor, cycle: DrawnCycle, *, out: Out | None = None) -> Out:
    """The largest of each row of `logits` [T, V], [T] float32, and the token to output there, [T] int64."""
    device = device_of(logits)
    checks.refuse(_logits_faults(logits, device))
    checks.refuse(_cycle_faults(logits, cycle, device))
    num_tokens, vocab_size = logits.shape
    (_, rows, shortlist), drafts = cycle.draft_logits.shape, cycle.scores.shape[0]
    best, tokens = _outputs(out, device, (torch.float32, num_tokens), (torch.int64, num_tokens))
    launch(
        device,
        "verify_drawn",
        DTYPE_CODES[logits.dtype],
        ptr(logits),
        *(ptr(tensor) for tensor in cycle),
        ptr(best),
        ptr(tokens),
        num_tokens,
        rows,
        drafts,
        vocab_size,
        shortlist,
        row_stride(logits),
    )
    return best, tokens


def draw_numbers(keys: Tensor, starts: Tensor, positions: Tensor, row_meta: Tensor, out: Tensor) -> None:
    """The random numbers of every row in a cycle, into `out` [4, K + 1, R] float64."""
    device = device_of(row_meta)
    checks.refuse(meta_faults(row_meta, device))
    checks.refuse([checks.dims_fault("out", out, 3)])
    rows, distances = row_meta.shape[1], out.shape[1]
    for name, tensor, dtype, shape, letters in (
        ("keys", keys, torch.int64, (NUM_STREAMS, rows), "[4, R]"),
        ("starts", starts, torch.int32, (rows + 1,), "[R + 1]"),
        ("positions", positions, torch.int64, (rows * distances,), "[T]"),
        ("out", out, torch.float64, (NUM_STREAMS, distances, rows), "[4, K + 1, R]"),
    ):
        checks.refuse(checks.exact_faults(name, tensor, dtype, shape, letters, device))
    tensors = keys, starts, positions, row_meta, out
    launch(device, "draw_numbers", *(ptr(tensor) for tensor in tensors), rows, distances)


def _outputs(out: Out | None, device: torch.device, *kinds: tuple[torch.dtype, *tuple[int, ...]]) -> Out:
    """`out`, checked, or new tensors of these types and shapes."""
    if out is None:
        first, second = (torch.empty(shape, dtype=dtype, device=device) for dtype, *shape in kinds)
        return first, second
    for number, (tensor, (dtype, *shape)) in enumerate(zip(out, kinds, strict=True)):
        checks.refuse(checks.exact_faults(f"out[{number}]", tensor, dtype, tuple(shape), str(shape), device))
    return out


def _logits_faults(logits: Tensor, device: torch.device) -> Faults:
    yield from cuda_checks.matrix_faults("logits", logits, device)
    if not 0 < logits.shape[1] <= MOST_VOCABULARY:
        yield checks.shape_error("logits", logits, f"rows of 1 to {MOST_VOCABULARY} numbers")


def _cycle_faults(logits: Tensor, cycle: DrawnCycle, device: torch.device) -> Faults:
    yield checks.dims_fault("draft_logits", cycle.draft_logits, 3)
    yield checks.dims_fault("scores", cycle.scores, 2)
    tokens, vocab_size = logits.shape
    (passes, rows, shortlist), drafts = cycle.draft_logits.shape, cycle.scores.shape[0]
    if passes > drafts:
        yield checks.shape_error("draft_logits", cycle.draft_logits, f"at most {drafts} drafts, as scores has")
    wide, whole, single = torch.float64, torch.int64, torch.int32
    expected = (
        (whole, (tokens,), "[T]"),
        (single, (1,), "[1]"),
        (single, (rows,), "[R]"),
        (wide, (NUM_SETTINGS, rows), "[5, R]"),
        (wide, (drafts + 1, rows), "[K + 1, R]"),
        (wide, (drafts, rows), "[K, R]"),
        (wide, (drafts, rows), "[K, R]"),
        (torch.float32, (drafts, rows), "[K, R]"),
        (whole, (drafts, rows), "[K, R]"),
        (logits.dtype, (passes, rows, shortlist), "[K, R, S]"),
        (wide, (drafts, rows, NUM_HEAD), "[K, R, 4]"),
        (single, (vocab_size,), "[V]"),
    )
    for name, tensor, (dtype, shape, letters) in zip(cycle._fields, cycle, expected, strict=True):
        yield from checks.exact_faults(name, tensor, dtype, shape, letters, device)

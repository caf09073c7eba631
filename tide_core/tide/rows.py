"""Batches as `transformers` users hold them, to rows of ids and back; and a tokenizer for when there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tide_core.errors import RequestError

EXPECTED = "token ids: a tensor of integers of shape [batch, length], or a list of lists"


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[list[int]]:
    """The ids of each row that its mask lets through: padding on either side goes. Without a mask, all of them."""
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            expected = "none beside lists, which are not padded"
            raise RequestError("attention_mask", type(attention_mask).__name__, expected)
        return _checked_lists(input_ids)
    if input_ids.dim() != 2 or not len(input_ids) or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise RequestError("input_ids", f"{input_ids.dtype} of shape {list(input_ids.shape)}", EXPECTED)
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            shape = list(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
            raise RequestError("attention_mask", shape, f"a tensor of the shape of input_ids, {list(input_ids.shape)}")
        rows = [
            [token_id for token_id, kept in zip(row, mask, strict=True) if kept]
            for row, mask in zip(rows, attention_mask.bool().tolist(), strict=True)
        ]
    for index, row in enumerate(rows):
        if not row:
            field = "input_ids" if attention_mask is None else "attention_mask"
            raise RequestError(f"{field}[{index}]", "a row without a token", "at least one token in every row")
    return rows


def joined(input_ids: Any, rows: Sequence[Sequence[int]], new: Sequence[Sequence[int]], pad_id: int | None) -> Tensor:
    """What came in, with what was generated behind it: [batch, length + most new tokens], on the device of the input.

    A tensor stays as it was, padding and all. Lists are padded on the left, new tokens on the right."""
    longest = max(len(row) for row in rows)
    most = max(len(ids) for ids in new)
    ragged = any(len(ids) < most for ids in new)
    if not isinstance(input_ids, Tensor):
        ragged |= any(len(row) < longest for row in rows)
    if ragged and pad_id is None:
        expected = "an id to fill short rows with; neither tokenizer nor model have one, nor an end-of-text id"
        raise RequestError("pad_token_id", pad_id, expected)
    fill = pad_id or 0
    if isinstance(input_ids, Tensor):
        prompts = input_ids.long()
    else:
        prompts = torch.tensor([[fill] * (longest - len(row)) + list(row) for row in rows])
    behind = torch.tensor([[*ids, *[fill] * (most - len(ids))] for ids in new], device=prompts.device)
    return torch.cat((prompts, behind.long()), dim=1)


def _checked_lists(rows: Any) -> list[list[int]]:
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)) or not rows:
        raise RequestError("input_ids", type(rows).__name__, EXPECTED)
    for index, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, (str, bytes)) or not row:
            raise RequestError(f"input_ids[{index}]", row, "a list of at least one token id")
    return [list(row) for row in rows]  # ids are checked one by one by the engine


class IdsOnly:
    """Stands where the engine expects a tokenizer, for callers that hold ids and want ids. No id has text."""

    chat_template = None
    bos_token = eos_token = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"": 0}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return ""

    def encode(self, text: str, **options: Any) -> list[int]:
        raise RequestError("prompt", "text", "token ids: no tokenizer was given")

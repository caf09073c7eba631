"""Convert batches in `transformers` layout to rows of ids and back; and a tokenizer stand-in for ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tide_core.errors import RequestError

EXPECTED = "token ids: a tensor of integers of shape [batch, length], or a list of lists"


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[list[int]]:
    """The ids of each row where its mask is 1, so without padding on either side. Without a mask, all ids."""
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            expected = "none with lists, which have no padding"
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
    """The input followed by the generated ids: [batch, length + most new tokens], on the device of the input.

    A tensor keeps its padding. Lists are padded on the left, new tokens on the right."""
    longest = max(len(row) for row in rows)
    most = max(len(ids) for ids in new)
    ragged = any(len(ids) < most for ids in new)
    if not isinstance(input_ids, Tensor):
        ragged |= any(len(row) < longest for row in rows)
    if ragged and pad_id is None:
        expected = "an id to pad short rows: neither tokenizer nor model has a pad or end-of-text id"
        raise RequestError("pad_token_id", pad_id, expected)
    fill = pad_id or 0
    if isinstance(input_ids, Tensor):
        prompts = input_ids.long()
    else:
        prompts = torch.tensor([[fill] * (longest - len(row)) + list(row) for row in rows])
    generated = torch.tensor([[*ids, *[fill] * (most - len(ids))] for ids in new], device=prompts.device)
    return torch.cat((prompts, generated.long()), dim=1)


def _checked_lists(rows: Any) -> list[list[int]]:
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)) or not rows:
        raise RequestError("input_ids", type(rows).__name__, EXPECTED)
    for index, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, (str, bytes)) or not row:
            raise RequestError(f"input_ids[{index}]", row, "a list of at least one token id")
    return [list(row) for row in rows]  # the engine checks the ids


class IdsOnly:
    """A tokenizer stand-in for callers that use ids only. No id has text."""

    chat_template = None
    bos_token = eos_token = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"": 0}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return ""

    def encode(self, text: str, **options: Any) -> list[int]:
        raise RequestError("prompt", "text", "token ids: no tokenizer was given")

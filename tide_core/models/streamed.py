"""Load a Hugging Face folder tensor by tensor, straight to its device: the host never holds the model.

The headers of the files are checked against the model before any memory is taken. Linears of the decoder layers may
stay in FP8, or be rounded to it; weights in FP8 are widened otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tide_core.errors import ModelError, one_line
from tide_core.kernels.fp8 import Fp8Weight, quantised_by_row
from tide_core.models.checkpoint import STORED, StoredTensor, stored_tensors
from tide_core.models.folder import check_keys
from tide_core.models.fp8.layers import check_numbers, layer_linears, refuse_rounding
from tide_core.models.fp8.scheme import BLOCK, IGNORED, Fp8Scheme
from tide_core.models.load_progress import LoadProgress
from tide_core.models.quantised import Fp8Linear
from tide_core.models.without_data import fill_computed, model_without_data, refuse_unfilled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tide")
MAPPED_BYTES = 2**30
STORED_FP8 = "F8_E4M3"
"""Name of the safetensors format."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""A matrix of one expert. The library has those of all in two tensors: gates above `up`, and `down`."""
GATE, UP = ("gate_proj", "w1"), ("up_proj", "w3")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, and where it goes."""

    source: str
    target: str
    """A parameter or buffer of the model."""
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    """Of a matrix of the target's experts."""
    scales: str | None = None
    """Of a matrix in FP8."""


def load_streamed(
    folder: Path, name: str, *, dtype: torch.dtype, place: torch.device, scheme: Fp8Scheme | None, fp8: bool
) -> PreTrainedModel | None:
    """The model in `folder`, called `name`, with states in `dtype`. `scheme`: of weights that are stored in FP8. None
    where the tensors are not those of the model: transformers renames some while it loads them, and says what is wrong.

    With `fp8` linears of the decoder layers have weights in 8 bits: as they are stored, or rounded where there is no
    scheme. Without it all is widened, to the numbers that those multiply with."""
    model = model_without_data(folder, dtype)
    stored = stored_tensors(folder)
    try:
        pieces = _pieces(model, stored, scheme, name)
    except ModelError:
        if scheme is not None:
            raise
        return None
    in_8_bits = {f"{path}.weight" for path, _ in layer_linears(model)} if fp8 else set()
    if fp8 and scheme is None and not in_8_bits:
        refuse_rounding(model)
    reader = _Reader(stored, place, LoadProgress(name, sum(stored[key].num_bytes for key in _sources(pieces))))
    try:
        for piece in sorted(pieces, key=lambda piece: stored[piece.source].path):
            _put(model, piece, in_8_bits, reader.read, rounds=scheme is None)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"weights of {name}", one_line(error), "whole safetensors files") from error
    finally:
        reader.close()
    _tie(model)
    fill_computed(model)
    refuse_unfilled(model, name)
    if scheme is not None:
        num_fp8 = sum(piece.scales is not None for piece in pieces)
        num_kept = sum(isinstance(module, Fp8Linear) for module in model.modules())
        log.info("%s: %d matrices in FP8, of which %d stay in 8 bits", name, num_fp8, num_kept)
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.to(place).eval()
    return loaded


class _Reader:
    """Tensors of the files, on the device. Files are mapped, and what was read of one stays in the process's memory
    until it is closed: one is open at a time, and after `MAPPED_BYTES` it is closed and opened again."""

    def __init__(self, stored: Mapping[str, StoredTensor], place: torch.device, progress: LoadProgress) -> None:
        self._stored, self._place, self._progress = stored, place, progress
        self._files = contextlib.ExitStack()
        self._path: Path | None = None
        self._file: Any = None
        self._mapped = 0
        """Bytes that were read since the file was opened."""

    def read(self, key: str) -> Tensor:
        path = self._stored[key].path
        if path != self._path or self._mapped >= MAPPED_BYTES:
            self.close()
            self._file, self._path = self._files.enter_context(safe_open(path, framework="pt", device="cpu")), path
        values: Tensor = self._file.get_tensor(key).to(self._place)
        self._mapped += values.nbytes
        self._progress.add(values.nbytes)
        return values

    def close(self) -> None:
        self._files.close()
        self._file = self._path = None
        self._mapped = 0


def _sources(pieces: Iterable[Piece]) -> set[str]:
    """All tensors that are read."""
    return {key for piece in pieces for key in (piece.source, piece.scales) if key is not None}


def outline_fp8(folder: Path, name: str, scheme: Fp8Scheme, *, dtype: torch.dtype) -> PreTrainedModel:
    """The same model without data, with the linears that stay in 8 bits, for the sizes of its weights."""
    model = model_without_data(folder, dtype)
    stored = stored_tensors(folder)
    linears = {f"{path}.weight" for path, _ in layer_linears(model)}
    for piece in _pieces(model, stored, scheme, name):
        if piece.scales is not None and piece.target in linears:
            _put(model, piece, linears, lambda key: _empty(stored[key]))
    outline: PreTrainedModel = model
    return outline


def _empty(tensor: StoredTensor) -> Tensor:
    kind = torch.float8_e4m3fn if tensor.dtype == STORED_FP8 else torch.float32
    return torch.empty(tensor.shape, dtype=kind, device="meta")


def _pieces(model: Any, stored: Mapping[str, StoredTensor], scheme: Fp8Scheme | None, name: str) -> list[Piece]:
    """Where every stored tensor goes; refuses by key what does not fit the model."""
    scale_names, no_weights = (scheme.scale_names, IGNORED) if scheme is not None else ((), ())
    state, tied = model.state_dict(), _tied(model)
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    of_model = [key for key in stored if not any(each.search(key) for each in ignored)]
    unused = {key for key in of_model if key.rpartition(".")[2] in scale_names}
    unexpected: list[str] = []
    mismatched: list[str] = []
    pieces: list[Piece] = []
    used: set[str | None] = set()
    for key in of_model:
        last = key.rpartition(".")[2]
        if key in unused or last in no_weights or key.endswith("rotary_emb.inv_freq"):  # of old writers
            continue
        tensor, piece = stored[key], _target(key, state)
        if piece is None:
            unexpected.append(key)
        elif piece.target in tied and tied[piece.target] not in stored:
            unused -= {f"{key.rpartition('.')[0]}.{each}" for each in scale_names}
        elif tensor.shape != piece.shape:
            mismatched.append(f"{key} (got {list(tensor.shape)}, expected {list(piece.shape)})")
        else:
            scales = _scales_of(key, tensor, stored, scheme)
            pieces.append(replace(piece, scales=scales))
            used.add(scales)
    # What has another shape is not missing.
    missing = [] if mismatched else _missing(pieces, state, set(tied))
    unexpected += sorted(unused - used)
    check_keys(name, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": mismatched})
    return pieces


def _target(key: str, state: Mapping[str, Tensor]) -> Piece | None:
    """Where the tensor of this key belongs; None for nowhere."""
    name = key.replace(".block_sparse_moe.", ".mlp.")  # of Mixtral
    if name in state:
        return Piece(key, name, tuple(state[name].shape))
    if (found := EXPERT.fullmatch(name)) is None:
        return None
    experts, index, kind = found[1], int(found[2]), found[3]
    stack = f"{experts}.{'gate_up_proj' if kind in GATE + UP else 'down_proj'}"
    if stack not in state or state[stack].dim() != 3 or index >= len(state[stack]):
        return None
    num_rows, width = state[stack].shape[1:]
    half = num_rows // 2
    rows = (0, half) if kind in GATE else (half, num_rows) if kind in UP else (0, num_rows)
    return Piece(key, stack, (rows[1] - rows[0], width), index, rows)


def _scales_of(
    key: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], scheme: Fp8Scheme | None
) -> str | None:
    """The key of the scales of a matrix in FP8; None for a tensor of the dtypes that models run in."""
    if tensor.dtype in STORED:
        return None
    if scheme is None or tensor.dtype != STORED_FP8 or len(tensor.shape) != 2:
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise ModelError(key, got, f"a matrix in {STORED_FP8}, or a tensor in {', '.join(STORED)}")
    base = key.rpartition(".")[0]
    names = [f"{base}.{name}" for name in scheme.scale_names]
    scales = next((name for name in names if name in stored), None)
    if scales is None:
        raise ModelError(key, f"{STORED_FP8} without scales", f"{' or '.join(names)} in the checkpoint")
    found = stored[scales]
    if found.dtype not in STORED:
        raise ModelError(scales, found.dtype, f"one of {', '.join(STORED)}")
    allowed = _shapes(tensor.shape, scheme)
    if found.shape not in allowed:
        raise ModelError(scales, list(found.shape), " or ".join(str(list(shape)) for shape in allowed))
    return scales


def _shapes(shape: tuple[int, ...], scheme: Fp8Scheme) -> list[tuple[int, ...]]:
    """Of the scales of a matrix."""
    shapes: list[tuple[int, ...]] = []
    if "tensor" in scheme.strategies:
        shapes += [(), (1,), (1, 1)]
    if "channel" in scheme.strategies:
        shapes += [shape[:1], (shape[0], 1)]
    if "block" in scheme.strategies:
        shapes += [tuple(-(-size // block) for size, block in zip(shape, BLOCK, strict=True))]
    return shapes


def _weight(values: Tensor, scales: Tensor) -> Fp8Weight:
    """One scale becomes one for each row, so that linears of one input can be joined."""
    num_rows, width = values.shape
    scales = scales.to(torch.float32)
    if scales.numel() == 1 or scales.shape[0] == num_rows:
        return Fp8Weight(values, scales.reshape(-1, 1).expand(num_rows, 1).contiguous(), 1, width)
    return Fp8Weight(values, scales, *BLOCK)


def _missing(pieces: list[Piece], state: Mapping[str, Tensor], tied: set[str]) -> list[str]:
    filled: dict[str, int] = {}
    for piece in pieces:
        filled[piece.target] = filled.get(piece.target, 0) + torch.Size(piece.shape).numel()
    return [key for key, tensor in state.items() if key not in tied and filled.get(key, 0) < tensor.numel()]


def _put(model: Any, piece: Piece, in_8_bits: set[str], read: Callable[[str], Tensor], *, rounds: bool = False) -> None:
    """Read one tensor into its module, or put a linear in FP8 into its place."""
    path, _, name = piece.target.rpartition(".")
    module = model.get_submodule(path)
    values, dtype = read(piece.source), _dtype_of(model, piece.target)
    if piece.scales is not None or (rounds and piece.target in in_8_bits):
        weight = quantised_by_row(values.to(dtype)) if piece.scales is None else _weight(values, read(piece.scales))
        check_numbers(piece.source, weight)
        if piece.target in in_8_bits:
            # A bias that came first moves along, one that comes later finds the new module.
            model.set_submodule(path, Fp8Linear(weight, module.bias))
            return
        values = weight.dequantised(dtype)
    values = values.to(dtype)
    if piece.expert is not None:
        stack = getattr(module, name)
        if stack.is_meta:
            stack = nn.Parameter(torch.empty(stack.shape, dtype=values.dtype, device=values.device), False)
            setattr(module, name, stack)
        assert piece.rows is not None
        stack[piece.expert, slice(*piece.rows)] = values
    elif name in module._buffers:
        module._buffers[name] = values
    else:
        setattr(module, name, nn.Parameter(values, requires_grad=False))


def _dtype_of(model: Any, target: str) -> torch.dtype:
    """The library keeps a few tensors of some families in float32."""
    dtype: torch.dtype = model.dtype
    names = set(model._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else set()
    if dtype is torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    return torch.float32 if names & set(target.split(".")) else dtype


def _tied(model: Any) -> dict[str, str]:
    """Names of tensors that are others under a second name, and those others."""
    if not model.config.tie_word_embeddings:
        return {}
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head, embedding = (names.get(id(each)) for each in (model.get_output_embeddings(), model.get_input_embeddings()))
    return {head: embedding} if head is not None and embedding is not None else {}


def _tie(model: Any) -> None:
    """As transformers does: a head that the checkpoint has, too, and that differs, stays."""
    if not model.config.tie_word_embeddings:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight.is_meta or torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    else:
        log.warning("config.json ties the head to the embedding, but the checkpoint has another one: it stays")

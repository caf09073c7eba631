"""Continue prompts with the model in large batches, one sampling setting per batch.

On CUDA, where the model family allows it, with the decoder of `decoder.py`; else with the library's `generate`, padded
on the left. The same seed on the same machine gives the same batches. When memory runs out, a batch is split in halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tide_core.calibration.collect.decoder import MAX_CHOICES, Decoder, Sampling, can_decode
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter

if TYPE_CHECKING:
    from transformers import GenerationConfig

CUDA_BATCH = 2048
CPU_BATCH = 8


class Generator:
    """A model that continues prompts."""

    def __init__(
        self, adapter: ModelAdapter, *, pad_id: int, batch: int | None = None, fast: bool | None = None
    ) -> None:
        """`fast` selects the decoder or `generate`; None selects the decoder on CUDA if the family supports it."""
        self._model, self._pad_id = adapter.model, pad_id
        on_cuda = adapter.device.type == "cuda"
        self.batch = batch or (CUDA_BATCH if on_cuda else CPU_BATCH)
        """Prompts in one call."""
        use_decoder = (on_cuda and can_decode(adapter)) if fast is None else fast
        self._decoder = Decoder(adapter) if use_decoder else None

    def release(self) -> None:
        """Free memory; the next run allocates it again."""
        if self._decoder is not None:
            self._decoder.release()
        torch.cuda.empty_cache()

    def run(
        self, prompts: Sequence[list[int]], sampling: Sampling, *, max_new: int, stop_ids: Sequence[int], seed: int
    ) -> list[NDArray[np.int32]]:
        """The new ids of each prompt, up to and including the first of `stop_ids`; independent of earlier runs."""
        new: list[NDArray[np.int32]] = []
        most = self.batch
        while len(new) < len(prompts):
            some = prompts[len(new) : len(new) + most]
            with contextlib.suppress(torch.OutOfMemoryError):
                new += self._run(some, sampling, max_new, stop_ids, (seed + len(new)) % 2**63)
                continue
            # Outside the block nothing references the memory of the failed batch.
            if len(some) == 1:
                raise ConfigError("generation_batch", 1, "memory for one sequence on the model's device")
            most = len(some) // 2
            self.release()
        return new

    def _run(
        self, prompts: Sequence[list[int]], sampling: Sampling, max_new: int, stop_ids: Sequence[int], seed: int
    ) -> list[NDArray[np.int32]]:
        if self._decoder is not None:
            new = self._decoder.run(prompts, sampling, max_new=max_new, stop_ids=stop_ids, seed=seed)
        else:
            new = self._generate(prompts, sampling, max_new, stop_ids, seed)
        ends = np.isin(new, np.array(stop_ids, np.int32))
        lengths = np.where(ends.any(1), ends.argmax(1) + 1, new.shape[1])
        return [row[:length].copy() for row, length in zip(new, lengths, strict=True)]

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, max_new: int, stop_ids: Sequence[int], seed: int
    ) -> NDArray[np.int32]:
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._pad_id, np.int64)
        mask = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        device = self._model.device
        draws = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": MAX_CHOICES}
        settings = GenerationConfig(
            max_new_tokens=max_new,
            do_sample=not sampling.greedy,
            pad_token_id=self._pad_id,
            eos_token_id=list(stop_ids) or None,
            use_cache=True,
            **({} if sampling.greedy else draws),
        )
        with _seeded(seed, device), _settings(self._model, settings):
            out = self._model.generate(
                torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device)
            )
        new: NDArray[np.int32] = out[:, longest:].to("cpu", torch.int32).numpy()
        return new


@contextlib.contextmanager
def _settings(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's own generation settings, such as penalties, while the block runs."""
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield

"""A tokenizer for models with random weights: every byte a token."""

from __future__ import annotations

from typing import Any

END = "<|end|>"


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **dict.fromkeys(("eos_token", "pad_token"), END))

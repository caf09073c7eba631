"""Build a Hugging Face tokenizer from the tokenizer in a GGUF.

transformers' own builder is not used: it knows only some pre-tokenizers, falls back to GPT-2's without a warning (for
the demo model that changes the ids of digits after two spaces), and differs between versions. Here an unlisted
pre-tokenizer is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tide_core.errors import ModelError
from tide_core.models.gguf.file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"
TURN_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
"""Control tokens that end an answer, whether or not a file names them: files of Phi-3 and others name the end of a
document alone."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class BytePairStyle:
    """How one family of byte-level vocabularies splits text before merging."""

    split: str | None = None
    """Pattern of the pieces; None: GPT-2's."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A piece that is itself a token is never split."""
    add_bos: bool = False
    """Default if the file does not set it."""


GPT2 = BytePairStyle()
DIGITS = BytePairStyle(single_digits=True)
LLAMA3 = BytePairStyle(LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
QWEN2 = BytePairStyle(LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"))
TEKKEN = BytePairStyle(TEKKEN_SPLIT, ignore_merges=True, add_bos=True)
STYLES = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Special token ids. `ends` starts with `eos` and includes the end-of-turn tokens."""

    bos: int | None
    eos: int
    pad: int
    unk: int | None
    ends: tuple[int, ...]


def token_ids(file: GGUFFile) -> TokenIds:
    tokens = file.strings("tokenizer.ggml.tokens")
    last = len(tokens) - 1

    def optional(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return file.integer(key, high=last) if key in file.metadata else None

    eos = file.integer("tokenizer.ggml.eos_token_id", high=last)
    pad = optional("padding")
    turns = [optional("eot"), *(index for index, token in enumerate(tokens) if token in TURN_ENDS)]
    ends = tuple(dict.fromkeys([eos, *(index for index in turns if index is not None)]))
    return TokenIds(optional("bos"), eos, eos if pad is None else pad, optional("unknown"), ends)


def build_tokenizer(file: GGUFFile, ids: TokenIds, max_length: int) -> Any:
    """A PreTrainedTokenizerFast with the file's vocabulary, special tokens, BOS rule and chat template."""
    tokens = file.strings("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens", "a token twice", "every token once")
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        kinds = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type", len(tokens))]
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(file, tokens, kinds, ids), True
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model", kind, "gpt2 or llama")
    named = {index for index in (ids.bos, *ids.ends, ids.pad) if index is not None}
    special = [index for index, entry in enumerate(kinds) if entry == CONTROL or index in named]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special])
    plain = [token for token, entry in zip(tokens, kinds, strict=True) if entry == USER_DEFINED]
    # SentencePiece looks for them in text whose spaces are marked; a prefix would be added to the tokens, too.
    marked = kind == "llama" and not file.flag("tokenizer.ggml.add_space_prefix", True)
    backend.add_tokens([AddedToken(token, normalized=marked, special=False) for token in plain])
    add_bos = file.flag("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    if add_bos and ids.bos is None:
        file.missing("tokenizer.ggml.bos_token_id")
    first = [ids.bos] if add_bos and ids.bos is not None else []
    last = [ids.eos] if add_eos else []
    if first or last:
        frame = [*(tokens[i] for i in first), "$A", *(tokens[i] for i in last)]
        used = [(tokens[i], i) for i in dict.fromkeys(first + last)]
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=used)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=None if ids.bos is None else tokens[ids.bos],
        eos_token=tokens[ids.eos],
        pad_token=tokens[ids.pad],
        unk_token=None if ids.unk is None else tokens[ids.unk],
        chat_template=file.text("tokenizer.chat_template") if "tokenizer.chat_template" in file.metadata else None,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.text("tokenizer.ggml.pre", "gpt-2")
    style = STYLES.get(name)
    if style is None:
        raise ModelError(f"{file.path}: tokenizer.ggml.pre", name, f"one of {', '.join(STYLES)}")
    merges: list[tuple[str, str]] = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not left or not space or not right or " " in right:
            raise ModelError(f"{file.path}: tokenizer.ggml.merges", merge, "two tokens with a space between them")
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{file.path}: tokenizer.ggml.merges", f"{left} {right}", "tokens of the vocabulary")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=style.ignore_merges))
    cut: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if style.single_digits else []
    if style.split is not None:
        cut.append(pre_tokenizers.Split(Regex(style.split), behavior="isolated"))
    prefix = file.flag("tokenizer.ggml.add_space_prefix", False)
    cut.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=style.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    backend.decoder = decoders.ByteLevel()
    return backend, style.add_bos


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int], ids: TokenIds) -> Tokenizer:
    """SentencePiece BPE merges the pair with the best score; merges ranked by score do the same."""
    scores = file.numbers("tokenizer.ggml.scores", len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == NORMAL:
            parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            ranked += [(-score, left, right) for left, right in parts if left in vocab and right in vocab]
    ranked.sort(key=lambda entry: entry[0])
    unknown = tokens[ids.unk] if ids.unk is not None else None
    merges = [(left, right) for _, left, right in ranked]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend

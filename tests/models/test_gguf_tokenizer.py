from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.models.gguf_factory import make_gguf
from tide_core.models.gguf.convert import convert

TEXTS = [
    "",
    "hello world",
    "  two  spaces 12  34\n\n\ttabs\r\n",
    "naïve café — “quoted” …",
    "日本語とemoji 🙂👩‍👩‍👧 and ﷽",
    "e\u0301 \u00a0 \u200b \x00 \x7f",
    "def f(x):\n    return [\n        1,\n        22]\n",
]


def tokenizer_of(tmp_path: Path, metadata: dict[str, Any] | None = None) -> PreTrainedTokenizerBase:
    tiny = make_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(tiny.path, folder)
    tiny.path.unlink()
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_text_comes_back_from_its_ids(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("stated", [{}, {"tokenizer.ggml.add_bos_token": False}])
def test_plain_text_gets_no_bos_unless_the_file_asks(stated: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, stated)
    assert tokenizer.bos_token_id == 1
    assert 1 not in tokenizer("hello world").input_ids


def test_bos_and_eos_are_added_when_the_file_asks(tmp_path: Path) -> None:
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ids = tokenizer_of(tmp_path, asked)("hello").input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert len(ids) == 3


def test_special_tokens_are_single_ids_and_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer("<|im_start|>hello<|im_end|>").input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


@pytest.mark.parametrize(("stated", "expected"), [({}, 2), ({"tokenizer.ggml.padding_token_id": 0}, 0)])
def test_there_is_always_a_pad_token(stated: dict[str, Any], expected: int, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, stated)
    assert tokenizer.pad_token_id == expected
    assert tokenizer(["hello", "hello hello hello"], padding=True).input_ids[0][-1] == expected


def test_the_chat_template_is_kept(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "hello"}]
    text = tokenizer_of(tmp_path).apply_chat_template(turn, tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


def test_digits_are_cut_off_before_spaces_are_shared_out(tmp_path: Path) -> None:
    """With GPT-2's pattern alone the second space would go to the digit."""
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello  1").input_ids) == ["hello", "ĠĠ", "1"]


def kind_of(processor: Any, index: int, symbols: Sequence[str]) -> int:
    if processor.is_unknown(index):
        return 2
    if processor.id_to_piece(index) in symbols:
        return 4
    return 3 if processor.is_control(index) else 6 if processor.is_byte(index) else 1


def sentencepiece_metadata(symbols: Sequence[str] = (), *, prefix: bool = True) -> tuple[Any, dict[str, Any]]:
    """`symbols`: tokens that are found before anything is merged. `prefix`: whether text begins with a space."""
    spm = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    words = ["hello world", "the lower the slower", "held hollow shell words", "low lower lowest", "new newer newest"]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 20),
        model_writer=trained,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        user_defined_symbols=list(symbols),
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    processor = spm.SentencePieceProcessor(model_proto=trained.getvalue())
    size = processor.get_piece_size()
    first = next(i for i in range(size) if kind_of(processor, i, symbols) == 1)
    order = [*range(first), *range(size - 1, first - 1, -1)]  # scores, not places, must decide
    return processor, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in order],
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in order],
        "tokenizer.ggml.token_type": [kind_of(processor, i, symbols) for i in order],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


def test_a_sentencepiece_vocabulary_gives_the_pieces_of_sentencepiece(tmp_path: Path) -> None:
    processor, metadata = sentencepiece_metadata()
    tokenizer = tokenizer_of(tmp_path, metadata)
    for text in ["hello world", "the slowest shell", "  two  spaces", "日本 🙂", "newlow\nlower"]:
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *processor.encode(text, out_type=str)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_symbols_of_a_sentencepiece_vocabulary_are_found_before_anything_is_merged(tmp_path: Path) -> None:
    """As in Gemma's: runs of spaces and of line ends, and tags."""
    processor, metadata = sentencepiece_metadata(["▁▁", "▁▁▁", "\n\n", "<b>"], prefix=False)
    tokenizer = tokenizer_of(tmp_path, metadata)
    for text in ["hello  world", "   the\n\n<b>low</b>", "new \n\n  newer    lower", " held"]:
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *processor.encode(text, out_type=str)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

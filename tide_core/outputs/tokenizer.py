"""Text to ids and ids to text. What users write is always text: no string of theirs becomes a special token."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tide_core.errors import RequestError
from tide_core.outputs.text import IdText, TextStream

__all__ = ["MAX_MESSAGES", "ROLES", "TextStream", "Tokenizer"]

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 1000
MAX_COMPOSED = 4
"""Most characters that Unicode composes to one (NFC), as a tokenizer's normalizer may do."""


class Tokenizer:
    """The tokenizer of a model, as the engine needs it. May be used by several threads at once."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, model_vocab_size: int = 0) -> None:
        """`model_vocab_size`: ids the model may choose. It is often padded past the tokens there are; such ids are
        valid and have no text."""
        self._hf = hf_tokenizer
        # Whether special tokens are read as text is a switch inside the tokenizer, and chat templates need the other
        # position. A copy for plain text and a lock for chats keep two threads from turning it under each other.
        self._text_only = copy.deepcopy(hf_tokenizer)
        self._chat_lock = threading.Lock()
        vocabulary: dict[str, int] = hf_tokenizer.get_vocab()
        added = hf_tokenizer.added_tokens_decoder
        ids = set(vocabulary.values())
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self.vocab_size = max(model_vocab_size, max(ids) + 1)
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        composes = backend is not None and backend.normalizer is not None
        self.max_token_chars = max(map(len, vocabulary)) * (MAX_COMPOSED if composes else 1)
        """Most characters of text that one token stands for."""
        decode: Callable[[Sequence[int]], str] = self._decode
        whole: dict[int, str] | None = None
        if _has_plain_decode(hf_tokenizer):  # what the library puts around it costs several times the decoding
            decode = functools.partial(hf_tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
            whole = {} if _reads_apart(hf_tokenizer.backend_tokenizer.decoder) else None
        self._id_text = IdText(
            decode=decode,
            vocab_size=self.vocab_size,
            silent_ids=frozenset(special_ids | (set(range(self.vocab_size)) - ids)),
            byte_ids=frozenset(vocabulary[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary),
            whole=whole,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the beginning-of-text id if the tokenizer puts one there."""
        _check_unicode("prompt", text)
        ids: list[int] = self._text_only.encode(text, split_special_tokens=True, verbose=False)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the model's chat template filled with `messages`, up to where the assistant's answer begins.

        Only the template writes special tokens; the same strings inside a message are text.
        """
        if not self._hf.chat_template:
            expected = "a model with a chat template; this one takes plain text only"
            raise RequestError("messages", f"{len(messages)} messages", expected)
        _check_messages(messages)
        # An older transformers takes the option for a template variable and ignores it.
        can_sanitize = "sanitize_control_tokens" in inspect.signature(self._hf.apply_chat_template).parameters
        if not can_sanitize:
            self._refuse_control_tokens(messages)
        options = {"sanitize_control_tokens": True} if can_sanitize else {}
        try:
            with self._chat_lock:
                ids: list[int] = self._hf.apply_chat_template(
                    [{"role": message["role"], "content": message["content"]} for message in messages],
                    add_generation_prompt=True,
                    return_dict=False,
                    **options,
                )
        except (jinja2.TemplateError, ValueError) as error:
            expected = f"messages that the model's chat template accepts; its error: {error}"
            raise RequestError("messages", f"{len(messages)} messages", expected) from error
        return ids

    def _refuse_control_tokens(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Without the library's help a special token's string in a message would become the token."""
        for index, message in enumerate(messages):
            for token in self._hf.added_tokens_decoder.values():
                if token.content in message["content"]:
                    expected = "no string of a special token; a newer transformers takes it as text"
                    raise RequestError(f"messages[{index}].content", token.content, expected)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; half characters become U+FFFD."""
        for token_id in ids:
            self._id_text.check(token_id)
        return self._decode(ids)

    def stream(self, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()) -> TextStream:
        """A stream for the text that follows `prompt_ids`."""
        return TextStream(self._id_text, prompt_ids, stop)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _has_plain_decode(hf_tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding is that of the tokenizers library and nothing else; some models' classes add steps."""
    kind = type(hf_tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):
        return False
    return kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode


def _reads_apart(decoder: Any) -> bool:
    """Whether an id that is text by itself adds the same text after any text of whole characters.

    True of decoders that put bytes together, and of chains that change single characters and treat the first one of
    the text apart. Others may look at neighbours."""
    if decoder is None:
        return False
    spec = json.loads(decoder.__getstate__())
    if spec["type"] == "Sequence":
        return all(_is_local(step) for step in spec["decoders"])
    return spec["type"] in ("ByteLevel", "Metaspace")


def _is_local(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Fuse" | "ByteFallback"}:
            return True
        case {"type": "Strip", "start": 0 | 1, "stop": 0}:
            return True
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return len(pattern) == 1 and content != ""
    return False


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    # The text of a message is the user's own: errors name its place and its type, never its text.
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", f"{len(messages)} messages", f"1..{MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(name, type(message).__name__, "an object with role and content")
        if extra := sorted(str(key) for key in message.keys() - {"role", "content"}):
            raise RequestError(name, extra, "role and content and nothing else")
        if message.get("role") not in ROLES:
            raise RequestError(f"{name}.role", message.get("role"), f"one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise RequestError(f"{name}.content", type(content).__name__, "a string")
        _check_unicode(f"{name}.content", content)


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer takes it.
        raise RequestError(field, f"a lone surrogate at character {error.start}", "valid Unicode text") from None

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
from tide_core.request import Chat

__all__ = ["MAX_MESSAGES", "ROLES", "TextStream", "Tokenizer"]

ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
MAX_MESSAGES = 1000
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""What a template raises for messages, tools or variables that it does not expect."""
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
        has_normalizer = getattr(getattr(hf_tokenizer, "backend_tokenizer", None), "normalizer", None) is not None
        self.max_token_chars = max(map(len, vocabulary)) * (MAX_COMPOSED if has_normalizer else 1)
        """Most characters of text that one token stands for."""
        has_plain_decode = _has_plain_decode(hf_tokenizer)
        backend = hf_tokenizer.backend_tokenizer if has_plain_decode else None
        without_text = set(range(self.vocab_size)) - ids
        byte_names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        bytes_of = {vocabulary[name]: byte for name, byte in byte_names.items() if name in vocabulary}

        def id_text(silent_ids: set[int], skip: bool) -> IdText:
            decode: Callable[[Sequence[int]], str] = functools.partial(self._decode, skip_special_tokens=skip)
            if backend is not None:  # what the library puts around it costs several times the decoding
                decode = functools.partial(backend.decode, skip_special_tokens=skip)
            whole: dict[int, str] | None = {} if backend is not None and _reads_apart(backend.decoder) else None
            return IdText(decode, self.vocab_size, frozenset(silent_ids), frozenset(bytes_of), whole)

        self._id_text = id_text(special_ids | without_text, True)
        self._with_special = id_text(without_text, False)
        self._bytes_of = bytes_of
        self._added_ids = frozenset(added)
        self._control_texts = [text for token in added.values() if (text := token.content).strip()]
        self._is_byte_level = backend is not None and _is_byte_level(backend.decoder)

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The model's chat template, or its templates by name."""
        template: str | Mapping[str, str] | None = self._hf.chat_template
        return template

    def added_id(self, text: str) -> int | None:
        """The id of a text that is a token of its own beside the vocabulary, such as a marker of a chat template."""
        return next((i for i, token in self._hf.added_tokens_decoder.items() if token.content == text), None)

    def is_special(self, token_id: int) -> bool:
        """Whether the text of answers leaves the token out."""
        return token_id in self._id_text.silent_ids

    @property
    def named_tokens(self) -> dict[str, str]:
        """Texts of the tokens that have a name in the model's files, such as `eos_token`."""
        named: dict[str, str] = self._hf.special_tokens_map
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text, with the beginning-of-text id if the tokenizer puts one there."""
        _check_unicode("prompt", text)
        ids: list[int] = self._text_only.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False
        )
        return ids

    def encode_chat(self, chat: Chat | Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the model's chat template filled with a chat, or with messages alone.

        Only the template writes special tokens; the same strings inside a message or a tool are text.
        """
        if not isinstance(chat, Chat):
            chat = Chat(chat)
        messages = chat.messages
        if not self._hf.chat_template:
            expected = "a model with a chat template; this one takes plain text only"
            raise RequestError("messages", f"{len(messages)} messages", expected)
        _check_messages(messages)
        # An older transformers takes the option for a template variable and ignores it.
        known = inspect.signature(self._hf.apply_chat_template).parameters
        can_sanitize = "sanitize_control_tokens" in known
        # The library sanitizes values of messages and tools, not the names in them, and no variables.
        for field, value in (("messages", messages), ("tools", chat.tools)):
            self._refuse_control_tokens(field, value, names_only=can_sanitize)
        self._refuse_control_tokens("chat_template_kwargs", chat.template_kwargs)
        for name in chat.template_kwargs:
            if name in known or name in ("messages", "tools"):
                raise RequestError("chat_template_kwargs", name, "variables of the model's chat template")
        options = {"sanitize_control_tokens": True} if can_sanitize else {}
        try:
            with self._chat_lock:
                ids: list[int] = self._hf.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in chat.tools] or None,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    return_dict=False,
                    **options,
                    **chat.template_kwargs,
                )
        except TEMPLATE_ERRORS as error:
            expected = f"messages that the model's chat template accepts; its error: {error}"
            raise RequestError("messages", f"{len(messages)} messages", expected) from error
        return ids

    def _refuse_control_tokens(self, field: str, value: Any, *, names_only: bool = False) -> None:
        """Without the library's help a special token's string in a message would become the token."""
        if isinstance(value, str):
            if not names_only:
                self._refuse_in(field, value)
        elif isinstance(value, Mapping):
            for name, child in value.items():
                self._refuse_in(field, str(name))
                self._refuse_control_tokens(f"{field}.{name}", child, names_only=names_only)
        elif isinstance(value, Sequence):
            for index, child in enumerate(value):
                self._refuse_control_tokens(f"{field}[{index}]", child, names_only=names_only)

    def _refuse_in(self, field: str, text: str) -> None:
        for token in self._control_texts:
            if token in text:
                raise RequestError(field, token, "no string of a special token")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; half characters become U+FFFD."""
        for token_id in ids:
            self._id_text.check(token_id)
        return self._decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to a text, also where they are a part of a character; none for an id without
        text."""
        self._id_text.check(token_id)
        if (byte := self._bytes_of.get(token_id)) is not None:
            return bytes([byte])
        name = self._hf.convert_ids_to_tokens(token_id)
        if name is None:
            return b""
        if token_id in self._added_ids:
            return str(name).encode()
        if self._is_byte_level:
            return bytes(_BYTES_OF_CHARACTERS[character] for character in name)
        return self.decode([token_id]).encode() if not name.startswith(SPACE_MARK) else _with_spaces(name)

    def stream(
        self,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> TextStream:
        """A stream for the text that follows `prompt_ids`."""
        id_text = self._id_text if skip_special_tokens else self._with_special
        return TextStream(id_text, prompt_ids, stop, include_stop=include_stop)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text


SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How vocabularies with Metaspace write a space."""


def _with_spaces(name: str) -> bytes:
    return name.replace(SPACE_MARK, " ").encode()


def _characters_of_bytes() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: the byte's own where it is printable, else
    one from 256 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _characters_of_bytes()


def _is_byte_level(decoder: Any) -> bool:
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


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


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    # The text of a message is the user's own: errors name its place and its type, never its text.
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", f"{len(messages)} messages", f"1..{MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(name, type(message).__name__, "an object with role and content")
        if extra := sorted(str(key) for key in message.keys() - MESSAGE_FIELDS):
            raise RequestError(name, extra, f"no other fields than {', '.join(sorted(MESSAGE_FIELDS))}")
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

"""Encode records as prompt ids. Only the chat template writes special tokens; their strings in a record are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.records import Record
from tide_core.errors import ConfigError

BATCH = 1024
MAX_CUTS = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """Maximum tokens of prompts, answers and pieces of documents in this model."""

    prompt: int
    new: int
    text: int

    @classmethod
    def of(cls, config: CalibrationConfig, max_positions: int) -> Lengths:
        new = min(config.max_new_tokens, max(1, max_positions // 2))
        return cls(min(config.max_prompt_tokens, max_positions - new), new, min(config.text_tokens, max_positions))


class PromptEncoder:
    """Encodes records in at most `max_tokens` ids each, as a request to the engine would be."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._special = sorted({token.content for token in tokenizer.added_tokens_decoder.values() if token.special})

    def prompts(self, records: Sequence[Record]) -> list[list[int]]:
        """The ids before an answer."""
        encoded: list[list[int]] = []
        for start in range(0, len(records), BATCH):
            encoded += self._prompts(records[start : start + BATCH])
        return encoded

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of plain text, with the beginning-of-text id if the tokenizer adds one; not cut."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer([self._plain(text) for text in texts], verbose=False)["input_ids"]
        return ids

    def _prompts(self, records: Sequence[Record]) -> list[list[int]]:
        chats = {i: self._chat(record) for i, record in enumerate(records) if self._is_chat(record)}
        texts = [i for i in range(len(records)) if i not in chats]
        encoded: list[list[int]] = [[] for _ in records]
        for i, ids in zip(texts, self.texts([str(records[i].content) for i in texts]), strict=True):
            encoded[i] = ids[: self._max_tokens]
        for i, ids in zip(chats, self._templated(list(chats.values())), strict=True):
            encoded[i] = ids if len(ids) <= self._max_tokens else self._cut(chats[i], ids)
        return encoded

    def _is_chat(self, record: Record) -> bool:
        if record.kind == "messages" and not self._tokenizer.chat_template:
            raise ConfigError("data", "records with messages", "prompts or text: the model has no chat template")
        return record.kind != "text" and bool(self._tokenizer.chat_template)

    def _chat(self, record: Record) -> list[dict[str, str]]:
        if isinstance(record.content, str):
            return [{"role": "user", "content": self._plain(record.content)}]
        return [{"role": m["role"], "content": self._plain(m["content"])} for m in record.content]

    def _templated(self, chats: list[list[dict[str, str]]]) -> list[list[int]]:
        if not chats:
            return []
        try:
            ids: list[list[int]] = self._tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_dict=False
            )
        except (jinja2.TemplateError, ValueError) as error:
            raise ConfigError("data", "a chat", f"messages that the model's chat template takes: {error}") from error
        return ids

    def _cut(self, chat: list[dict[str, str]], ids: list[int]) -> list[int]:
        """Shorten the last message of the user until the chat fits; if that is not enough, drop the first ids."""
        words: list[int] = self._tokenizer.encode(chat[-1]["content"], add_special_tokens=False, verbose=False)
        for _ in range(MAX_CUTS):
            words = words[: max(0, len(words) - (len(ids) - self._max_tokens))]
            if not words:
                break
            shorter = self._tokenizer.decode(words, skip_special_tokens=True)
            [ids] = self._templated([[*chat[:-1], {"role": "user", "content": shorter}]])
            if len(ids) <= self._max_tokens:
                return ids
        return ids[-self._max_tokens :]

    def _plain(self, text: str) -> str:
        for special in self._special:
            text = text.replace(special, "")
        return text


def chat_opening(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of a chat before the text of the user, and the ids after it."""
    mark = "qjx7zkv"  # in no template and no vocabulary
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, after = text.partition(mark)
    assert found, "a chat template contains the user's text"
    return tokenizer.encode(before, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False)

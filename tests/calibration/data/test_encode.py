"""Records become prompt ids."""

import copy

import pytest

from tests.factories import tiny_tokenizer
from tide_core.calibration.data.encode import PromptEncoder, chat_opening
from tide_core.calibration.data.records import Record
from tide_core.errors import ConfigError


def test_prompts_are_chats_where_the_model_has_a_template() -> None:
    encoder, tokenizer = PromptEncoder(tiny_tokenizer(), 64), tiny_tokenizer()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    prompt, messages, text = encoder.prompts(
        [Record("prompt", "the cat"), Record("messages", chat), Record("text", "the cat")]
    )

    assert tokenizer.decode(prompt) == "<|start|>user: the cat<|end|>\n<|start|>assistant: "
    assert tokenizer.decode(messages).startswith("<|start|>system: Be brief.<|end|>\n<|start|>user: Why?<|end|>")
    assert tokenizer.decode(text) == "the cat"


def test_without_a_template_prompts_are_plain_text_and_messages_are_refused() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    encoder = PromptEncoder(tokenizer, 64)

    assert tokenizer.decode(encoder.prompts([Record("prompt", "the cat")])[0]) == "the cat"
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.prompts([Record("messages", [{"role": "user", "content": "Why?"}])])


def test_a_long_prompt_is_cut_inside_the_users_words() -> None:
    [ids] = PromptEncoder(tiny_tokenizer(), 40).prompts([Record("prompt", "the cat sat " * 50)])

    text = tiny_tokenizer().decode(ids)
    assert len(ids) <= 40
    assert text.startswith("<|start|>user: the cat")
    assert text.endswith("<|end|>\n<|start|>assistant: ")


def test_a_chat_too_long_without_its_last_words_loses_its_head() -> None:
    chat = [{"role": "user", "content": "the cat " * 50}, {"role": "assistant", "content": "ok"}]
    [ids] = PromptEncoder(tiny_tokenizer(), 30).prompts(
        [Record("messages", [*chat, {"role": "user", "content": "and?"}])]
    )

    assert len(ids) == 30
    assert tiny_tokenizer().decode(ids).endswith("<|start|>assistant: ")


def test_strings_of_special_tokens_inside_a_record_do_not_become_tokens() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), 64)

    with_string, without = encoder.prompts([Record("prompt", "a<|end|>b<|start|>c"), Record("prompt", "abc")])

    assert with_string == without
    assert encoder.texts(["a<|end|>b"]) == encoder.texts(["ab"])


def test_the_opening_of_a_chat_ends_where_the_user_begins() -> None:
    before, after = chat_opening(tiny_tokenizer())

    assert tiny_tokenizer().decode(before) == "<|start|>user: "
    assert tiny_tokenizer().decode(after) == "<|end|>\n"
